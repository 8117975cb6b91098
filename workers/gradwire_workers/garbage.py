"""When a worker looks for what was let go of and is part of a cycle, as modules and optimizers are.

A look takes as long as the process has objects: 30 ms and more, for a framework has some 200,000. Where one small module follows the other that would
be most of the time. So it takes a fifth of the time at most, and what is put off is done when that time has come; but at once where the
process has grown since the last look, for then it is memory that is wanted.
"""

from __future__ import annotations

import gc
import math
import os
import time
from typing import Any, Callable

__all__ = ["Garbage", "resident_nbytes"]

PAUSE = 4
"""So many times as long as the last look took, at least, until the next."""
GROWN = 32 << 20
"""Bytes more than after the last look, with which the next is at once."""


def resident_nbytes() -> int:
    """What this process has in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Garbage:
    """is_due: whether a look was put off."""

    def __init__(
        self,
        collect: Callable[[], Any] = gc.collect,
        clock: Callable[[], float] = time.monotonic,
        resident: Callable[[], int] = resident_nbytes,
    ) -> None:
        self._collect, self._clock, self._resident = collect, clock, resident
        self._next, self._nbytes = 0.0, 0
        self.is_due = False

    def note(self, is_module: bool = True) -> None:
        """Something was let go of that is perhaps a part of a cycle. (An optimizer's module may be there, which is what has grown.)"""
        self.is_due = True
        if is_module and self._resident() > self._nbytes + GROWN:
            self._look()
            self._nbytes = self._resident()
        else:
            self.look()

    def look(self) -> None:
        """If it is due, and its time has come."""
        if self.is_due and self._clock() >= self._next:
            self._look()
            # what has come meanwhile is not to be overlooked when it goes
            self._nbytes = min(self._nbytes, self._resident())

    def wait_ms(self) -> int | None:
        """How long until something is to be done here; None: nothing is."""
        return max(0, math.ceil((self._next - self._clock()) * 1000)) if self.is_due else None

    def _look(self) -> None:
        self.is_due = False
        begin = self._clock()
        self._collect()
        end = self._clock()
        self._next = end + PAUSE * (end - begin)
