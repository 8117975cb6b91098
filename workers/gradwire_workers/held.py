"""Answers that wait for the next ones of their line, so that its client is woken once for several.

To wake somebody costs the worker more than to send: some 25 µs for the signal to another processor, and twice as much
since what runs after it finds colder caches. A client that has many calls under way, and waits for none of them alone, therefore says in
each how many answers may come together (`gradwire_wire.plans`). Nothing is held while there is nothing to do: an answer waits only
for a call that is already here, comes by the same line and is of the same plan, which is likely to take as long as the one before.
"""

from __future__ import annotations

import contextlib
from typing import Any

from gradwire_wire.lane import TooLong
from gradwire_wire.sockets import Unreachable

__all__ = ["Held"]

MOST = 16
"""Answers that are held at most, whatever a client says."""


class Held:
    """Of one desk: short answers of one line and plan at a time. They lend nothing."""

    def __init__(self) -> None:
        self._line: Any = None
        self._plan = 0
        self._frames: list[bytes] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._line is not None

    def put(self, line: Any, plan: int, frame: bytes, together: int) -> None:
        """An answer, which goes with others: at the latest when there are so many."""
        if self._line is not line or self._plan != plan:
            self.release()
            self._line, self._plan = line, plan
        self._frames.append(frame)
        if len(self._frames) >= min(together, MOST):
            self.release()

    def go_on(self, line: Any, plan: int) -> bool:
        """Whether answers are held, and a call of this line and plan (-1: none) may be served before they are sent."""
        return self._line is line and self._plan == plan

    def release(self) -> None:
        """Send them. A client that is gone loses them."""
        line, frames = self._line, self._frames
        self._line, self._frames = None, []
        with contextlib.suppress(Unreachable):
            for frame in frames:
                try:
                    line.send_nowait([frame])
                except TooLong:
                    line.keep(frame)
