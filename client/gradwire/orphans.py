"""Ending what somebody who was killed had started: processes that carry a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable

__all__ = ["end_marked", "end_orphans"]

GRACE_S, LOOK_S = 0.3, 0.05


def end_orphans(incarnations: Iterable[bytes]) -> None:
    """End every process of these workers' sessions. Their own broker did that if it could."""
    end_marked(f"GRADWIRE_INCARNATION={incarnation.hex()}" for incarnation in incarnations)


def end_marked(marks: Iterable[str]) -> None:
    """End every process of this user that began with one of these variables (``NAME=value``) in its environment.

    They are terminated, and killed a moment later, for the reason that `gradwire_broker.remains` has.
    """
    wanted = {os.fsencode(mark) for mark in marks}
    if wanted and _signalled(wanted, signal.SIGTERM):
        until = time.monotonic() + GRACE_S
        while _signalled(wanted, 0) and time.monotonic() < until:
            time.sleep(LOOK_S)
        _signalled(wanted, signal.SIGKILL)


def _signalled(wanted: set[bytes], number: int) -> bool:
    """Send it to all who have one of these variables. Whether there was somebody."""
    found = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            with open(f"/proc/{pid}/environ", "rb") as environ:  # of a zombie: nothing
                variables = environ.read().split(b"\0")
            if not wanted.isdisjoint(variables):
                os.kill(int(pid), number)
                found = True
    return found
