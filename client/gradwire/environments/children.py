"""Running an installer: it dies with this process, what it says is seen as it comes, Ctrl-C ends it with all of its own.

The command runs in a session of its own, so that the terminal's Ctrl-C reaches this process alone, which ends the
whole group. Should this process be killed, the kernel kills the command; children of that are found by whoever
takes over, by a mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["MARK", "Ended", "run"]

MARK = "GRADWIRE_BUILD"
TAIL = 40  # lines
LOOK_MS = 200
GRACE_S = 1.0

# As in `process.die_with_parent`; then it becomes the command. The parent may have been gone before.
_DIE_WITH_PARENT = """\
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Ended(NamedTuple):
    """How a command ended (negative: by a signal), and its last lines."""

    code: int
    tail: list[str]


def run(
    command: list[str],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    mark: str,
    on_line: Callable[[str], None],
) -> Ended:
    """Run it to its end.

    mark: the value of the variable `MARK` in its environment. on_line: called with each line as it comes, and with ""
    several times a second.
    Raises OSError where it cannot be started; whatever is raised meanwhile ends it first.
    """
    boot = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
    process = subprocess.Popen(
        boot,
        env={**environment, MARK: mark},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            return _follow(process, on_line)
        except BaseException:
            _end(process)
            raise


def _follow(process: subprocess.Popen[bytes], on_line: Callable[[str], None]) -> Ended:
    """Its lines until it ends. (A grandchild may hold the pipe open for ever, so its end is not waited for.)"""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    os.set_blocking(fd, False)
    tail: deque[str] = deque(maxlen=TAIL)
    unfinished, ended = "", False
    while not ended:
        ended = process.poll() is not None
        unfinished += _piece(fd, 0 if ended else LOOK_MS)
        *lines, unfinished = unfinished.replace("\r", "\n").split("\n")
        for line in lines:
            tail.append(line.rstrip())
            on_line(line)
        on_line("")
    if unfinished.strip():
        tail.append(unfinished.rstrip())
    return Ended(process.returncode, [line for line in tail if line])


def _piece(fd: int, wait_ms: int) -> str:
    """All that is there; at the pipe's end, nothing after a short wait."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    read = b""
    if poller.poll(wait_ms):
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(fd, 1 << 16):
                read += piece
            time.sleep(0.02)  # the pipe has ended, and so will the process
    return read.decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and its group: asked, then killed. It is reaped last, so that its group's number stays its own."""
    _signal_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and not _has_ended(process.pid):
        time.sleep(0.02)
    _signal_group(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:
        return True
