"""The session's leak check (tests/conftest.py) can fail: it finds each kind of leak."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

LEAKS = {
    "process": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
    "runtime directory": "os.mkdir(os.environ['XDG_RUNTIME_DIR'] + '/gradwire')",
    "descriptor": "os.memfd_create('gradwire-leak')",
    "mapping": "mapped()",
}

TEST = """
import mmap, os, subprocess, sys

keep = []

def mapped():
    fd = os.memfd_create("gradwire-leak")
    os.ftruncate(fd, 4096)
    mapping = mmap.mmap(fd, 4096)
    os.close(fd)
    return mapping

def test_leak():
    keep.extend([{leaks}])
"""


def run_session(folder: Path, leaks: Iterable[str]) -> tuple[int, str]:
    """One session of pytest with our conftest, in which a test leaks."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    source = CONFTEST.read_text()
    (folder / "conftest.py").write_text(re.sub(r"^LEAVING_S = \S+", "LEAVING_S = 0.2", source, flags=re.M))
    (folder / "test_one.py").write_text(TEST.format(leaks=", ".join(leaks)))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        "-c",
        os.devnull,
    ]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    for pid in re.findall(r"^  process (\d+)", done.stdout, flags=re.M):
        with contextlib.suppress(ProcessLookupError):  # it has no parent any more that would wait for it
            os.kill(int(pid), 9)
    return done.returncode, done.stdout + done.stderr


def test_a_clean_session_passes(tmp_path: Path) -> None:
    code, output = run_session(tmp_path, [])
    assert code == 0, output


def test_leaks_fail_the_session(tmp_path: Path) -> None:
    """Any of them would: the session passes where nothing is listed."""
    code, output = run_session(tmp_path, LEAKS.values())
    assert code == 1, output
    for kind in LEAKS:
        assert re.search(rf"left behind:(\n  .*)*\n  {kind} ", output), output
