"""A handler of signals that comes in at an awkward moment."""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["Interrupted"]


class Interrupted(deque[Any]):
    """Who waits for a condition. A handler of signals comes in when one was woken and is still in here, as Python may let it."""

    times = 1

    def remove(self, value: Any) -> None:
        if self.times:
            self.times = 0
            raise TimeoutError("by the handler")
        super().remove(value)
