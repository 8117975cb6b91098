"""Ending what a killed broker's workers had started: processes that carry a worker's mark in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

__all__ = ["end_orphans"]


def end_orphans(incarnations: Iterable[bytes]) -> None:
    """Kill every process of these workers' sessions. Their own broker did that if it could."""
    marks = [b"GRADWIRE_INCARNATION=" + incarnation.hex().encode() for incarnation in incarnations]
    if not marks:
        return
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            variables = (folder / "environ").read_bytes().split(b"\0")
            if any(mark in variables for mark in marks):
                os.kill(int(folder.name), signal.SIGKILL)
