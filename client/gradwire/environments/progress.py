"""What is said to people while an environment is built or waited for. Pure: clock and screen are given."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

__all__ = ["Progress", "say", "seconds_between_lines"]

TERMINAL_S, FILE_S = 2.0, 5.0
LONGEST = 100


class Progress:
    """Says at once what it is about, and then how far it is, once every ``interval_s`` at most."""

    def __init__(
        self,
        what: str,
        say: Callable[[str], None],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._say, self._interval_s, self._clock = what, say, interval_s, clock
        self._start = self._last = clock()
        self._doing = ""

    def begin(self, sentence: str) -> None:
        """Say it now."""
        self._say(sentence)
        self._last = self._clock()

    def doing(self, what: str) -> None:
        """What it is at; said when it is time."""
        self._doing = what.strip() or self._doing
        self.tick()

    def tick(self) -> None:
        """Called again and again: says something when it is time."""
        now = self._clock()
        if now - self._last >= self._interval_s:
            self._last = now
            doing = self._doing if len(self._doing) <= LONGEST else f"{self._doing[:LONGEST]}…"
            self._say(f"{self._what}: {doing} ({now - self._start:.0f} s)")

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._start


def say(sentence: str) -> None:
    """A line on whatever `sys.stderr` is now; a notebook and a test runner see it."""
    try:
        print(f"gradwire: {sentence}", file=sys.stderr, flush=True)
    except Exception:  # closed, broken or none: no reason to build nothing
        pass


def seconds_between_lines() -> float:
    """Someone who watches a terminal is told more often than a file."""
    try:
        return TERMINAL_S if sys.stderr.isatty() else FILE_S
    except Exception:  # none, or closed
        return FILE_S
