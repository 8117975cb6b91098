"""The session's leak check (tests/conftest.py) can fail: each kind of leak fails a session of its own."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    keep.append({leak})
"""


def run_session(folder: Path, leak: str) -> tuple[int, str]:
    """One session of pytest with our conftest, in which a test leaks."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    source = CONFTEST.read_text()
    (folder / "conftest.py").write_text(re.sub(r"^LEAVING_S = \S+", "LEAVING_S = 0.2", source, flags=re.M))
    (folder / "test_one.py").write_text(TEST.format(leak=leak))
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
    code, output = run_session(tmp_path, "1")
    assert code == 0, output


@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_fails_the_session(tmp_path: Path, kind: str) -> None:
    code, output = run_session(tmp_path, LEAKS[kind])
    assert code == 1, output
    assert re.search(rf"left behind:(\n  .*)*\n  {kind} ", output), output
