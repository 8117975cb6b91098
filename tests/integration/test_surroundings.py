"""Programs in odd surroundings: started oddly, without what a shell gives, out of memory, forked, in development mode.

Each is a whole program of its own, in which everything must be right, or say what to do; none may hang or leave anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw

pytestmark = pytest.mark.integration

TARGETS = str(Path(__file__).parent / "targets")

# Everything a program does, in a second: it says "fine" to the file OUT, for it may have no stdout.
PROGRAM = f"""
import os, sys
import numpy as np
import gradwire as gw
x = np.arange(100_000.0)
def use(bridge):
    worker = bridge.worker("numpy", path=[{TARGETS!r}], threads=1)
    double = worker.function("fragile:double")
    worker.function("fragile:chatter")(1.0)
    y, pullback = worker.function("fragile:dot").vjp(x, x)
    assert (double(x) == 2 * x).all() and double(1.0) == 2 and (pullback(np.float64(1.0))[0] == x).all()
    assert double.submit(x).result(60)[1] == 2
    return double
def say_fine():
    with open(os.environ["OUT"], "a") as out: out.write("fine ")
def main():
    with gw.connect() as bridge: use(bridge)
    say_fine()
"""
CLOSED = PROGRAM + "main()\n"
IN_AN_EXIT_FUNCTION = (
    PROGRAM + "import atexit; atexit.register(main); atexit.register(lambda: use(gw.connect()))\n"
)
LEFT_OPEN = "kept = use(gw.connect()); say_fine()\n"
HINDERED = """
import signal, socket
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
socket.setdefaulttimeout(0.05)
"""
IN_CHILDREN = (
    PROGRAM
    + """
import multiprocessing, pickle
if __name__ == "__main__":
    bridge = gw.connect()
    double = use(bridge)
    for how in ("spawn", "fork"):
        child = multiprocessing.get_context(how).Process(target=main)
        child.start(); child.join(60)
        assert child.exitcode == 0 and double(2.0) == 4.0, how
    for mine in (bridge, *bridge.workers()):
        try: pickle.dumps(mine)
        except gw.UsageError as error: assert "another process makes its own" in str(error)
    bridge.close()
"""
)
AS_A_DAEMON = (
    PROGRAM
    + """
if not os.fork():
    os.setsid()
    if not os.fork():
        for standard in (0, 1, 2): os.close(standard)
        main()
    os._exit(0)
os.wait()
"""
)


def run(
    code: str, folder: Path, *before: str, options: tuple[str, ...] = (), **other: Any
) -> tuple[str, str]:
    """What the program reports of itself, once all of it is through, and what it writes to stderr."""
    script = folder / "program.py"  # a file: children of multiprocessing's spawn import it
    script.write_text(code)
    env = {**os.environ, "OUT": str(folder / "out"), **other.pop("env", {})}
    command = [*before, sys.executable, *options, str(script)]
    with open(folder / "errors", "w+b") as errors:
        ended = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=errors, env=env, check=False, timeout=90, **other
        )
        deadline, out = time.monotonic() + 60, folder / "out"
        while (
            not (out.exists() and out.stat().st_size) and time.monotonic() < deadline and not ended.returncode
        ):
            time.sleep(
                0.02
            )  # a daemon's parent does not wait for it; and what has been opened is not written yet
        errors.seek(0)
        said = errors.read().decode()
    assert ended.returncode == 0, said
    return (folder / "out").read_text(), said


SAID = "[numpy] by print\n[numpy] by descriptor\n"
SHELL = ("sh", "-c")
NO_ENVIRONMENT = 'exec env -i OUT="$OUT" GRADWIRE_TEST_SESSION="$GRADWIRE_TEST_SESSION" "$@"'
DEVELOPMENT = ("-X", "dev", "-W", "error")
STARTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], int, int]] = {
    # program, what comes before it, options, how often it is fine, how often the worker is heard
    "development mode, and a bridge left open": (CLOSED + LEFT_OPEN, (), DEVELOPMENT, 2, 2),
    "development mode, and bridges made in exit functions alone": (
        IN_AN_EXIT_FUNCTION,
        (),
        DEVELOPMENT,
        1,
        2,
    ),
    "without assertions and docstrings": (CLOSED, (), ("-OO", "-P", "-bb"), 1, 1),
    "no environment": (CLOSED, (*SHELL, NO_ENVIRONMENT, "sh"), (), 1, 1),
    "nothing open": (CLOSED, (*SHELL, 'exec "$@" <&- >&- 2>&-', "sh"), (), 1, 0),
    "a daemon": (AS_A_DAEMON, (), (), 1, 0),
    "SIGHUP and SIGCHLD ignored, impatient sockets": (HINDERED + CLOSED, ("nohup",), (), 1, 1),
    "in children": (IN_CHILDREN, (), (), 2, 3),
}


@pytest.mark.parametrize("start", STARTS)
def test_however_a_program_is_started(start: str, tmp_path: Path) -> None:
    code, before, options, fine, heard = STARTS[start]
    assert run(code, tmp_path, *before, options=options) == (fine * "fine ", heard * SAID)


def test_user_code_writes_files_as_its_program_would(tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text("def write(path):\n    open(path, 'w').close()\n")
    before = os.umask(0o027)
    try:
        with gw.connect() as bridge:
            bridge.worker("numpy", path=[tmp_path]).function("writes:write")(str(tmp_path / "made"))
            assert bridge._link.folder is not None
            sockets = [path.lstat().st_mode for path in Path(bridge._link.folder).iterdir()]
    finally:
        os.umask(before)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o640
    assert len(sockets) >= 3 and not any(mode & 0o077 for mode in sockets)


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_frozen_program_does_not_start_itself_for_ever(is_marked: bool, tmp_path: Path) -> None:
    """Its `sys.executable` is itself (PyInstaller's have ``sys.frozen``), and runs its main program whatever it is given."""
    program, starts = tmp_path / "program", tmp_path / "starts"
    program.write_text(f"""#!{sys.executable}
import os, sys
with open({str(starts)!r}, "a") as file: file.write("x")
assert os.path.getsize({str(starts)!r}) < 5, "it goes on and on"
sys.executable = {str(program)!r}
sys.frozen = {is_marked}
import gradwire
try: gradwire.connect()
except gradwire.ConnectError as error: sys.exit(str(error))
""")
    program.chmod(0o700)
    ended = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and "`gradwire up FILE`" in ended.stderr
    assert starts.read_text() == ("x" if is_marked else "xx")


# ---- Folders -------------------------------------------------------------------------------------------------------


@pytest.fixture
def short() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gwt-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def mounted(*commands: str) -> tuple[str, ...]:
    """What comes before a program that is to see other file systems than the rest of the world."""
    before = ("unshare", "--mount", "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*before, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this system lets nobody mount anything")
    return before


@pytest.mark.parametrize("flaw", ["read-only", "not UTF-8"])
def test_r52_a_tmpdir_that_cannot_be_used(flaw: str, short: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(short) + b"/\xff")) if flaw == "not UTF-8" else short / "t"
    folder.mkdir()
    mount = (f"mount -t tmpfs none {folder}", f"mount -o remount,ro {folder}")
    before = mounted(*mount) if flaw == "read-only" else ()
    where = {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}
    assert run(CLOSED, tmp_path, *before, env=where) == ("fine ", SAID)


def test_r52_no_folder_at_all_is_said_with_each_ones_flaw(tmp_path: Path) -> None:
    places = ("/tmp", "/var/tmp", "/dev/shm")
    if any(Path(sys.executable).is_relative_to(place) for place in places):
        pytest.skip("this interpreter lies where the test mounts something else")
    mount = [f"mount -t tmpfs none {place} && mount -o remount,ro {place}" for place in places]
    code = "import gradwire\ntry: gradwire.connect()\nexcept gradwire.ConnectError as error: print(error)"
    ended = subprocess.run(
        [*mounted(*mount), sys.executable, "-c", code],
        env={**os.environ, "XDG_RUNTIME_DIR": "relative"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd="/",
    )
    assert "set XDG_RUNTIME_DIR to a folder of yours" in ended.stdout, ended.stderr
    for flaw in ("relative: not an absolute path", *(f"{place}: Read-only file system" for place in places)):
        assert flaw in ended.stdout


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    code = f"""
import os, shutil
os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone")
import gradwire as gw
with gw.connect() as bridge:
    for relative in ({{}}, {{"cwd": "/"}}, {{"cwd": "/", "path": ["here"]}}, {{"cwd": "/", "path": [], "python": "bin/python"}}):
        try: bridge.worker("numpy", **relative)
        except gw.UsageError as error: assert "not there any more" in str(error)
        else: raise SystemExit("it was taken")
    worker = bridge.worker("numpy", cwd="/", path=[{TARGETS!r}])
    open(os.environ["OUT"], "w").write(str(worker.function("fragile:double")(2.0)))
"""
    assert run(code, tmp_path, cwd=tmp_path) == ("4.0", "")


# ---- Memory --------------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with 200 MB, below this process's own."""
    for folder, limit in own_groups():
        made = folder / f"gradwire-test-{os.getpid()}"
        try:
            made.mkdir()
            (made / limit).write_text(str(200 << 20))
        except OSError:
            remove_group(made)
            continue
        yield made
        remove_group(made)
        return
    pytest.skip("this system lets nobody make a control group with a limit")


def own_groups() -> Iterator[tuple[Path, str]]:
    """Folder and name of the limit on memory, by version."""
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        elif number == "0":
            yield root / path.lstrip("/"), "memory.max"


def remove_group(made: Path) -> None:
    deadline = time.monotonic() + 60
    while made.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # whoever was in it is still ending
            made.rmdir()
        time.sleep(0.02)


def test_r55_a_worker_that_the_kernel_kills_for_want_of_memory(group: Path) -> None:
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[TARGETS], threads=1, restart="on-failure")
        double = worker.function("fragile:double")
        try:
            (group / "cgroup.procs").write_text(str(worker.pid))
        except OSError as error:
            pytest.skip(f"this system lets nobody move a process into a control group: {error}")
        with pytest.raises(gw.MemoryExhaustedError, match="memory left to this control group"):
            worker.function("numpy:zeros")(20 << 20)  # 160 MB, and as much again to share it
        with pytest.raises(gw.WorkerDiedError, match=r"SIGKILL .*that is how memory runs out"):
            worker.function("builtins:bytearray")(1 << 29)
        assert (double(np.ones(3)) == 2).all(), "in the next process"
