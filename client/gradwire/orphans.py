"""Ending what a killed broker's workers had started: processes that carry a worker's mark in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

__all__ = ["end_orphans"]


def end_orphans(incarnations: Iterable[bytes]) -> None:
    """Kill every process of these workers' sessions. Their own broker did that if it could."""
    marks = [b"GRADWIRE_INCARNATION=" + incarnation.hex().encode() for incarnation in incarnations]
    if not marks:
        return
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            with open(f"/proc/{pid}/environ", "rb") as environ:
                variables = environ.read().split(b"\0")
            if any(mark in variables for mark in marks):
                os.kill(int(pid), signal.SIGKILL)
