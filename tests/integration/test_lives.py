"""Whole programs with real workers, killed, interrupted and left (field reports R51, R53, R55, R56, R58, R60, R61, R62).

The lives of processes alone, in every combination, are tested in ``lives/``; here calls are under way. A call that must not
be waited for takes longer than pytest lets a test take, so no clock decides.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw

pytestmark = pytest.mark.integration

TARGETS = """
import ctypes, os, signal, sys, time

def double(x):
    return x * 2

def after(x, seconds):
    print("working", flush=True)
    time.sleep(seconds)
    return x

def end_by(x, how):
    print("last words", flush=True)
    if how == "exit": os._exit(1)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault": ctypes.string_at(0)

def chatter(x):
    print("by print")
    os.write(2, b"by descriptor\\n")
    return x
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the targets are."""
    folder = tmp_path_factory.mktemp("targets")
    (folder / "targets.py").write_text(TARGETS)
    return folder


@pytest.fixture
def worker(folder: Path) -> Iterator[Any]:
    """A numpy worker of a bridge of its own."""
    with gw.connect() as bridge:
        yield bridge.worker("numpy", path=[folder])


X = np.arange(4.0)

# ---- A worker dies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "exit_code", "name"),
    [("exit", 1, None), ("kill", None, "SIGKILL"), ("segfault", None, "SIGSEGV")],
)
def test_r55_in_the_middle_of_a_call(worker: Any, how: str, exit_code: int | None, name: str | None) -> None:
    with pytest.raises(gw.WorkerDiedError) as caught:
        worker.function("targets:end_by")(X, how)
    assert (caught.value.exit_code, caught.value.signal, caught.value.was_running) == (exit_code, name, True)
    assert "last words" in caught.value.output
    assert caught.value.__suppress_context__  # three tracebacks of ours, before what there is to read


def test_r55_between_calls(worker: Any) -> None:
    double = worker.function("targets:double")
    double(X)
    os.kill(worker.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while worker.alive:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(gw.WorkerDiedError) as caught:
        double(X)
    assert (caught.value.signal, caught.value.was_running) == ("SIGKILL", False)
    worker.restart()
    np.testing.assert_array_equal(double(X), X * 2)


def test_r55_all_waiting_threads_wake(worker: Any) -> None:
    after = worker.function("targets:after")
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(after, X, 600.0) for _ in range(4)]
        time.sleep(0.3)
        os.kill(worker.pid, signal.SIGKILL)
        for call in calls:
            with pytest.raises(gw.WorkerDiedError):
                call.result(60.0)


def test_r55_a_stopped_worker_meets_the_deadline(worker: Any) -> None:
    double = worker.function("targets:double")
    double(X)
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(gw.DeadlineError):
        double.options(timeout=0.5)(X)
    os.kill(worker.pid, signal.SIGCONT)
    np.testing.assert_array_equal(double(X), X * 2)


# ---- Programs ------------------------------------------------------------------------------------------------------

HEAD = """
import os, signal, sys, time
import numpy as np
import gradwire as gw
x = np.arange(4.0)
bridge = gw.connect()
worker = bridge.worker("numpy")
double, after = worker.function("targets:double"), worker.function("targets:after")
"""


@pytest.fixture
def run(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program that begins with `HEAD`; what it leaves running fails the session, not this test alone."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, arguments: list[str] | None = None, **popen: Any) -> subprocess.Popen[str]:
        command = [sys.executable, *(arguments or ["-c", HEAD + code])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **popen}
        started.append(subprocess.Popen(command, cwd=folder, text=True, **pipes))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate(timeout=60)


def ended(process: subprocess.Popen[str], within_s: float = 60.0) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    output, errors = process.communicate(timeout=within_s)
    return process.returncode, output, errors


def wait_gone(pids: list[int], within_s: float = 60.0) -> list[int]:
    """Those processes that are still there when the time is up."""
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if _lives(pid)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("load", ["", "; double.submit(big)", "; after.submit(big, 600.0)"])
@pytest.mark.parametrize("victims", ["program", "broker", "worker", "program+worker", "program+broker"])
def test_r51_killed_with_50_mb_under_way(
    run: Callable[..., Any], sweep_for_the_killed: Callable[[], None], victims: str, load: str
) -> None:
    one = run(f"big = np.ones(50 << 17)\ndouble(big){load}\nprint(worker.pid, flush=True)\ntime.sleep(600)")
    worker = int(one.stdout.readline())
    pids = {"program": one.pid, "worker": worker, "broker": parent_of(worker)}
    for victim in victims.split("+"):
        with contextlib.suppress(ProcessLookupError):  # others may have ended it by now
            os.kill(pids[victim], signal.SIGKILL)
    expected = [
        pid
        for name, pid in pids.items()
        if name in victims or "program" in victims or victims == "broker" != name
    ]
    if victims == "broker":
        expected.remove(one.pid)
    one.poll()
    assert not wait_gone(expected)
    if "program" not in victims:
        assert one.poll() is None
    if victims == "program+broker":
        sweep_for_the_killed()


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('at top level')", 1)]
)
def test_r53_call_kill_call_end_without_close(run: Callable[..., Any], end: str, code: int) -> None:
    one = run(f"""
double(x)
os.kill(worker.pid, 9)
try: double(x)
except gw.WorkerDiedError: print("died", flush=True)
{end}
""")
    assert one.stdout.readline() == "died\n"
    status, _, errors = ended(one)
    assert status == code
    assert ("at top level" in errors) == (code == 1)


def test_r53_in_the_middle_of_a_call(run: Callable[..., Any]) -> None:
    one = run("after.submit(x, 600.0)\ntime.sleep(0.3)\nprint('up', flush=True)\nsys.exit(3)")
    one.stdout.readline()
    assert ended(one)[0] == 3


def test_r53_daemon_threads_that_call_at_the_exit_say_nothing(run: Callable[..., Any]) -> None:
    one = run("""
import asyncio, threading
def call(way, started):
    way()
    started.release()
    while True: way()
ways = [lambda: double(x), lambda: double(x.repeat(20_000)), lambda: double.submit(x).result(),
        lambda: worker.function("targets:double"), lambda: asyncio.run(double.aio(x))]
started = threading.Semaphore(0)
for way in ways: threading.Thread(target=call, args=(way, started), daemon=True).start()
for way in ways: started.acquire()
sys.exit(3)
""")
    assert ended(one) == (3, "", "")


def test_an_exit_function_from_before_the_first_bridge_finds_it_open(run: Callable[..., Any]) -> None:
    """What keeps bridges comes with the first of them, what closes them with `import gradwire`."""
    late = "import atexit, gradwire\natexit.register(lambda: print(double(x), 'in', double(x.repeat(2000)).size))\n"
    one = run("", ["-c", late + HEAD])
    assert ended(one) == (0, "[0. 2. 4. 6.] in 8000\n", "")


def test_r56_a_bridge_opened_in_a_thread_that_ends(run: Callable[..., Any]) -> None:
    one = run("""
import threading
made = []
def open_it():
    made.append(gw.connect())
    made.append(made[0].worker("numpy").function("targets:double"))
thread = threading.Thread(target=open_it)
thread.start(); thread.join()
time.sleep(0.2)
print(made[1](x))
""")
    assert ended(one)[1] == "[0. 2. 4. 6.]\n"


SIX_LINES = """
import gradwire as gw, numpy as np
print("once")
bridge = gw.connect()
double = bridge.worker("numpy").function("targets:double")
print(double(np.arange(3.0)))
"""


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_r58_six_lines_without_a_guard(run: Callable[..., Any], folder: Path, how: str) -> None:
    script = folder / "six.py"
    script.write_text(SIX_LINES)
    with open(script) as stdin:
        arguments = {"file": [str(script)], "-c": ["-c", SIX_LINES], "stdin": ["-"]}[how]
        assert ended(run("", arguments, stdin=stdin)) == (0, "once\n[0. 2. 4.]\n", "")


def test_r60_what_remote_code_prints_is_shown(run: Callable[..., Any]) -> None:
    status, _, errors = ended(run("worker.function('targets:chatter')(x)\nbridge.close()"))
    assert (status, errors) == (0, "[numpy] by print\n[numpy] by descriptor\n")


def test_r61_again_after_a_kill(run: Callable[..., Any]) -> None:
    first = run("double(x)\nprint('up', flush=True)\ntime.sleep(600)")
    first.stdout.readline()
    first.kill()
    others = [run("print(double(x))") for _ in range(3)]
    assert [ended(one)[:2] for one in others] == [(0, "[0. 2. 4. 6.]\n")] * 3


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("to", ["the program alone", "the group"])
def test_r62_ctrl_c_in_a_long_call(run: Callable[..., Any], to: str) -> None:
    one = run(
        """
print("up", flush=True)
try: after(x, 600.0)
except KeyboardInterrupt: print("interrupted", flush=True)
print(double(x), after(x, 0.0))
""",
        start_new_session=True,
    )
    one.stdout.readline()
    assert "working" in one.stderr.readline()
    if to == "the group":
        os.killpg(one.pid, signal.SIGINT)
    else:
        os.kill(one.pid, signal.SIGINT)
    assert one.stdout.readline() == "interrupted\n"
    # (communicate would lose what readline has read ahead)
    assert one.stdout.readline() == "[0. 2. 4. 6.] [0. 1. 2. 3.]\n"
    assert ended(one)[0] == 0
