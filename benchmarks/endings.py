"""How soon ends are told and followed by others; exits 1 where a limit is missed.

    python benchmarks/endings.py [--json FILE] [--rounds N]

Tests hold that each of these happens, whatever the machine's load; this holds the seconds that users were promised (the
field reports' R53, R55, R56 and R62), as the longest of the rounds:

- a worker is killed in a call, ends by itself between two, is stopped (SIGSTOP): until its caller's error;
- Ctrl-C in a call of ten minutes: until KeyboardInterrupt, and until the next call's result;
- a program whose worker has died ends without closing anything: from its last statement until the process is gone;
- a program is killed: until its worker, idle or in a long call, and its broker are gone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from idle import parent_of

import gradwire as gw

HERE = pathlib.Path(__file__).parent
X = np.zeros(1, np.float32)
LONG_S = 600.0
TIMEOUT_S = 0.5
PROGRAM = """
import os, signal, sys, time
import numpy as np, gradwire as gw
bridge = gw.connect()
worker = bridge.worker("numpy", path=[{here!r}], threads=1)
x = np.zeros(1, np.float32)
identity, nap = worker.function("targets:identity"), worker.function("targets:nap")
identity(x)
print(worker.pid, flush=True)
"""
DIES = """
os.kill(worker.pid, signal.SIGKILL)
try: identity(x)
except gw.WorkerDiedError: pass
print(time.monotonic(), flush=True)
"""


def seconds_until(act: Callable[[], object], error: type[BaseException]) -> float:
    """Seconds that the call takes to raise it."""
    begun = time.monotonic()
    try:
        act()
    except error:
        return time.monotonic() - begun
    raise AssertionError(f"no {error.__name__}")


@contextlib.contextmanager
def numpy_worker() -> Iterator[gw.Worker]:
    with gw.connect() as bridge:
        yield bridge.worker("numpy", path=[HERE], threads=1)


def killed_in_a_call() -> float:
    with numpy_worker() as worker:
        future = worker.function("targets:nap").submit(X, LONG_S)
        time.sleep(0.2)
        os.kill(worker.pid, signal.SIGKILL)
        return seconds_until(future.result, gw.WorkerDiedError)


def ended_between_calls() -> float:
    with numpy_worker() as worker:
        identity = worker.function("targets:identity")
        identity(X)
        os.kill(worker.pid, signal.SIGTERM)
        return seconds_until(lambda: [identity(X) for _ in range(1 << 30)], gw.WorkerDiedError)


def stopped() -> float:
    """Seconds beyond the call's own timeout."""
    with numpy_worker() as worker:
        identity = worker.function("targets:identity")
        identity(X)
        os.kill(worker.pid, signal.SIGSTOP)
        late_s = seconds_until(lambda: identity.options(timeout=TIMEOUT_S)(X), gw.DeadlineError) - TIMEOUT_S
        os.kill(worker.pid, signal.SIGCONT)
        return late_s


def interrupted() -> float:
    with numpy_worker() as worker:
        identity, nap = worker.function("targets:identity"), worker.function("targets:nap")
        identity(X)
        sent: list[float] = []

        def interrupt() -> None:
            sent.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        timer = threading.Timer(0.3, interrupt)
        timer.start()
        with contextlib.suppress(KeyboardInterrupt):
            nap(X, LONG_S)
        identity(X)
        return time.monotonic() - sent[0]


@contextlib.contextmanager
def program(code: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program that has called its worker; the processes of both, and of their broker."""
    text = PROGRAM.format(here=str(HERE)) + code
    one = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    try:
        assert one.stdout is not None
        worker = int(one.stdout.readline())
        yield one, [worker, parent_of(worker)]
    finally:
        one.kill()
        one.wait()


def left_without_closing() -> float:
    with program(DIES) as (one, _):
        assert one.stdout is not None
        last = float(one.stdout.readline())
        assert one.wait() == 0
        return time.monotonic() - last


def orphaned(code: str) -> float:
    with program(code) as (one, others):
        time.sleep(0.3)
        one.kill()
        begun = time.monotonic()
        while any(map(is_there, others)):
            time.sleep(0.005)
        return time.monotonic() - begun


def is_there(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


ENDS: dict[str, tuple[Callable[[], float], float]] = {
    "a worker killed in a call is told": (killed_in_a_call, 2.0),
    "a worker ended between calls is told": (ended_between_calls, 2.0),
    "a stopped worker is told, after the call's timeout": (stopped, 2.0),
    "Ctrl-C in a call, until the next call's result": (interrupted, 1.0),
    "a program with a dead worker ends": (left_without_closing, 2.0),
    "a killed program's idle worker and broker are gone": (lambda: orphaned("time.sleep(600)"), 5.0),
    "a killed program's busy worker and broker are gone": (lambda: orphaned("nap(x, 600.0)"), 5.0),
}


def main() -> int:
    """Measure, print, compare with the limits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name, (act, limit_s) in ENDS.items():
        longest_s = max(act() for _ in range(arguments.rounds))
        found[name] = {"longest_s": longest_s, "limit_s": limit_s}
        print(f"{name:52} {longest_s:6.3f} s (limit {limit_s:.0f} s)", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    missed = [name for name, figures in found.items() if figures["longest_s"] > figures["limit_s"]]
    if missed:
        print("missed: " + "; ".join(missed))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
