"""Times of what was done, a row each: the latest so many, and how many more there were. No I/O, no clock."""

from __future__ import annotations

from typing import Sequence

import numpy as np

__all__ = ["COLUMNS", "MAX_ROWS", "Ring"]

COLUMNS = ("call_id", "free", "received", "begun", "computed", "ready", "sent")
"""What a worker records of a message it answered (docs/protocol.md, Trace)."""
MAX_ROWS = 1 << 20


class Ring:
    """Rows of integers of 64 bits; a new one takes the place of the oldest where there is no more room."""

    def __init__(self, rows: int, columns: int = len(COLUMNS)) -> None:
        self._rows = np.zeros((rows, columns), np.int64)  # pages of memory come as they are written
        self._added = 0

    def add(self, row: Sequence[int]) -> None:
        """Note a row."""
        self._rows[self._added % len(self._rows)] = row
        self._added += 1

    @property
    def dropped(self) -> int:
        """How many rows were overwritten."""
        return max(0, self._added - len(self._rows))

    def taken(self) -> np.ndarray:
        """The rows, oldest first, (n, columns): a copy."""
        if not self.dropped:
            return self._rows[: self._added].copy()
        return np.roll(self._rows, -(self._added % len(self._rows)), axis=0)
