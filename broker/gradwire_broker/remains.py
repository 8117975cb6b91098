"""The rest of a worker's process group, once the worker itself has ended: what its code started, and left.

It is terminated, and killed a moment later. Not at once: Python's resource trackers (of multiprocessing, of joblib) are among it, which ignore
SIGTERM, notice that the last of their users is gone, and then remove the named memory and the files that these left in
``/dev/shm``. Killed at once they would leave it there for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

__all__ = ["Remains", "signalled"]

GRACE_S = 0.3
LOOK_S = 0.02


class Remains:
    """Groups without their leaders. Their numbers cannot be others' as long as somebody is in them."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # when each is killed

    def __len__(self) -> int:
        return len(self._until)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._until))

    def end(self, group: int) -> None:
        """Its leader has been reaped. Nothing happens where nobody else is in it."""
        if signalled(group, signal.SIGTERM):
            self._until[group] = time.monotonic() + GRACE_S

    def due(self) -> float | None:
        """When `advance` must be called next."""
        return time.monotonic() + LOOK_S if self._until else None

    def advance(self, now: float) -> None:
        """Forget those in which nobody is any more; kill those whose time is over."""
        for group, until in list(self._until.items()):
            if now >= until:
                signalled(group, signal.SIGKILL)
            if now >= until or not signalled(group, 0):
                del self._until[group]


def signalled(group: int, number: int) -> bool:
    """Send it to all of a group. Whether somebody was there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False
