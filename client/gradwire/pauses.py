"""Whether the reader of answers lets them gather before it reads on: learned from how many calls are under way. Pure: no clock.

Answers that are read one by one cost more than the calls: reader and submitter hand the interpreter's lock to each other for
each of them, so that calls come to the worker one by one as well, and a call takes three times what it takes where a dozen
are sent, served and read together. Both ways keep themselves going. So now and then the reader pauses for less time than a
thread's switch of that kind costs for a few calls: if many are under way then, somebody submits faster than is
answered, and it goes on so; if not, nobody does, and it reads on at once for a long time.
"""

from __future__ import annotations

__all__ = ["PAUSE_S", "Pauses"]

PAUSE_S = 300e-6
MANY = 11
"""Calls under way after a pause that make it pay: more than there are steps of optimizers."""
REST, SHORT_REST = 256, 16
"""Answers between two trials: then a pause in vain is some microsecond an answer. After one that paid it may be chance."""


class Pauses:
    """One asks for `is_next` after answers have been read, and then says what the pause has brought: `took`."""

    __slots__ = ("_left", "_pays")

    def __init__(self) -> None:
        self._pays, self._left = False, REST

    def is_next(self, answers: int, under_way: int) -> bool:
        """Whether to pause now. answers: read since the last question. under_way: calls that have no answer yet."""
        if not under_way:
            return False
        self._left -= answers
        return self._pays or self._left <= 0

    def took(self, under_way: int) -> None:
        """A pause is over."""
        self._left = SHORT_REST if self._pays else REST
        self._pays = under_way >= MANY
