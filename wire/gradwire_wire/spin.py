"""Whether to look again and again before going to sleep: learned from what looking has brought. Pure.

A sleeper costs its waker a system call and itself a wake-up, 10 to 40 µs on an idle machine. Whoever looks gets by
without either if what it waits for comes soon, and if both processes have a processor: otherwise it takes the time
that the other one needs. So a wait is spent looking only where the last ones were short, and each one in vain doubles the
number of waits until the next attempt.
"""

from __future__ import annotations

__all__ = ["Spin"]

MAX_PAUSE = 1023


class Spin:
    """looks: how often to look at most. near_s: waits up to so many seconds, slept through, count as short.

    One waits in turn for `looks`, and then says how that went: `found`, or `missed` and after the sleep `slept`.
    """

    __slots__ = ("_is_near", "_looks", "_misses", "_near_s", "_pause")

    def __init__(self, looks: int, near_s: float) -> None:
        self._looks, self._near_s = looks, near_s
        self._is_near = False
        self._pause = self._misses = 0

    def looks(self) -> int:
        """How often to look before this wait becomes a sleep."""
        if not self._is_near:
            return 0
        if self._pause:
            self._pause -= 1
            return 0
        return self._looks

    def found(self) -> None:
        """What was waited for came while looking."""
        self._misses >>= 1

    def missed(self) -> None:
        """It did not come while looking."""
        self._misses = min(2 * self._misses + 1, MAX_PAUSE)
        self._pause = self._misses

    def slept(self, seconds: float) -> None:
        """A wait without looking took so long."""
        self._is_near = seconds <= self._near_s
