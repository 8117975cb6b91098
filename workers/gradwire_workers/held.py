"""Answers that wait for the next ones of their line, so that its client is woken once for several.

To wake somebody costs the worker more than to send: some 25 µs for the signal to another processor, and twice as much
since what runs after it finds colder caches. A client that has many calls under way, and waits for none of them alone, therefore says in
each how many answers may come together (`gradwire_wire.plans`). Nothing is held while there is nothing to do: an answer waits only
for a call that is already here, comes by the same line and is of the same plan, which is likely to take as long as the one before. Nor does
anybody else wait for that call: when a turn is over (`turns`) and others are there, answers are sent.

A signal handler that user code has left may raise between any two steps. So an answer is here until it is sent.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable

from gradwire_wire.lane import TooLong
from gradwire_wire.sockets import Unreachable

__all__ = ["Held"]

MOST = 16
"""Answers that are held at most, whatever a client says."""


class Held:
    """Of one desk: short answers of one line and plan at a time. They lend nothing, and are no longer than the line's ``most_held``."""

    def __init__(self, on_sent: Callable[[Any], None]) -> None:
        """on_sent: is called with a line by which they were sent. (A lane may have kept some.)"""
        self._on_sent = on_sent
        self._line: Any = None
        self._plan = 0
        self._frames: deque[bytes] = deque()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._frames)

    def put(self, line: Any, plan: int, frame: bytes, together: int) -> None:
        """An answer, which goes with others: at the latest when there are so many."""
        if self._line is not line or self._plan != plan:
            self.release()
            self._line, self._plan = line, plan
        self._frames.append(frame)
        if len(self._frames) >= min(together, MOST):
            self.release()

    def go_on(self, line: Any, plan: int) -> bool:
        """Whether a call of this line and plan (-1: none) may be served before what is held is sent."""
        return self._line is line and self._plan == plan

    def release(self) -> None:
        """Send them, if there are any. A client that is gone loses them."""
        line, frames = self._line, self._frames
        if not frames:
            return
        try:
            while frames:
                try:
                    line.send_nowait([frames[0]])
                except TooLong:  # not now: the system is short of buffers
                    line.keep(frames[0])
                frames.popleft()
        except Unreachable:
            frames.clear()
        else:
            self._on_sent(line)
        self._line = None
