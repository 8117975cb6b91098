"""Ending what somebody who was killed had started: processes that carry a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

__all__ = ["end_marked", "end_orphans"]


def end_orphans(incarnations: Iterable[bytes]) -> None:
    """Kill every process of these workers' sessions. Their own broker did that if it could."""
    end_marked(f"GRADWIRE_INCARNATION={incarnation.hex()}" for incarnation in incarnations)


def end_marked(marks: Iterable[str]) -> None:
    """Kill every process of this user that began with one of these variables (``NAME=value``) in its environment."""
    wanted = {os.fsencode(mark) for mark in marks}
    if not wanted:
        return
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            with open(f"/proc/{pid}/environ", "rb") as environ:
                variables = environ.read().split(b"\0")
            if not wanted.isdisjoint(variables):
                os.kill(int(pid), signal.SIGKILL)
