"""Whether to look again and again before going to sleep: learned from how long either took. Pure: times are told.

A sleeper costs its waker a system call and itself a wake-up, 10 to 40 µs on an idle machine. Whoever looks gets by
without either if what it waits for comes soon, and if both processes have a processor: otherwise it takes the time
that the other one needs. Neither can be known beforehand. So both ways are taken: mostly the one that took less on
average, now and then the other, the more rarely the longer it has not paid.
"""

from __future__ import annotations

__all__ = ["Spin"]

GAIN = 0.94
"""Looking must take this much less of the time: it costs a processor besides."""
WEIGHT = 1 / 16
TRIAL, WARM_UP, FIRST_REST, MAX_REST = 32, 8, 128, 4096
"""Waits that a trial of looking takes, how many of them do not count, and waits between two trials."""
CHECK = 128
"""Every so many waits spent looking, one is slept through."""
OUTLIER = 3
"""A wait counts as at most so many times what sleeping takes: what else the machine does decides nothing."""


class Spin:
    """looks: how often to look at most. near_s: looking is tried where a wait took at most so many seconds, slept through.

    One waits in turn for `looks`, and then says how that went: `took`.
    """

    __slots__ = ("_is_near", "_left", "_looks", "_near_s", "_rest", "_since", "looking_s", "sleeping_s")

    def __init__(self, looks: int, near_s: float) -> None:
        self._looks, self._near_s = looks, near_s
        self._is_near = False
        self._rest, self._left, self._since = FIRST_REST, TRIAL, 0
        self.looking_s = self.sleeping_s = 0.0

    def looks(self) -> int:
        """How often to look before this wait becomes a sleep."""
        if not self._is_near:
            return 0
        self._left -= 1
        if self._left >= 0:
            self._since += 1
            return self._looks if self._since % CHECK else 0
        if self._left > -self._rest:
            return 0
        self._left = TRIAL
        return 0

    def took(self, seconds: float, was_looking: bool) -> None:
        """A wait is over: how long it took, and whether any of it was spent looking."""
        if self.sleeping_s:
            seconds = min(seconds, OUTLIER * self.sleeping_s)
        if was_looking:
            if not self.looking_s and self._left > TRIAL - WARM_UP:
                return
            self.looking_s += (seconds - self.looking_s) * (WEIGHT if self.looking_s else 1)
        else:
            self.sleeping_s += (seconds - self.sleeping_s) * (WEIGHT if self.sleeping_s else 1)
            self._is_near = self.sleeping_s <= self._near_s
        if self._left == 0:
            self._judge()

    def _judge(self) -> None:
        """The end of a trial: go on as long as it pays, or let it rest."""
        if self.looking_s < GAIN * self.sleeping_s:
            self._left, self._rest = TRIAL, FIRST_REST
        else:
            self._rest, self.looking_s = min(2 * self._rest, MAX_REST), 0.0
