"""Replies as they come on a line: read, or returned unread where nobody waits for them any more.

A call that is abandoned (deadline, Ctrl-C) leaves its line aside until the late reply has come in; that is returned unread, and
is never anybody else's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from gradwire.life import Life
from gradwire.lines import Line, Lines
from gradwire.plans import short_of
from gradwire_wire import messages
from gradwire_wire.errors import ProtocolError
from gradwire_wire.exchange import Exchange
from gradwire_wire.messages import Done, Failed, Long
from gradwire_wire.segments import Ledger

__all__ = ["Abandoned", "Released", "reply_in"]


def reply_in(frames: list[bytes], exchange: Exchange) -> tuple[list[bytes], Any]:
    """The reply in a message, and the frames it came in or stood for. ProtocolError where it is none."""
    reply = messages.unpack(frames[0])
    if type(reply) is Long:
        carriers = exchange.borrow_all(reply.headers, ())
        frames = [c.array.tobytes() for c in carriers if c is not None]
        reply = messages.unpack(frames[0]) if frames else None
    if type(reply) not in (Done, Failed):
        raise ProtocolError(f"a worker does not say {type(reply).__name__}")
    return frames, reply


class Released(deque[int]):
    """Numbers that nobody will name again, to be told soon: tokens with the next message. Appending is safe in finalizers and any thread."""

    __slots__ = ()

    def give_back(self, token: int) -> None:
        """A token that came with a reply; 0 is none."""
        if token:
            self.append(token)

    def take(self, most: int = 1 << 20) -> list[int]:
        """Those that came first, to be told now."""
        taken: list[int] = []
        while self and len(taken) < most:
            try:
                taken.append(self.popleft())
            except IndexError:
                break
        return taken


class Abandoned:
    """Of one connection: the calls that nobody waits for.

    ours: the ledger in which the worker sees what was cancelled. released: where tokens go that nobody will name.
    """

    def __init__(
        self, lines: Lines, exchange: Exchange, ours: Ledger, released: Released, life: Life
    ) -> None:
        self._lines, self._exchange, self._ours = lines, exchange, ours
        self._released, self._life = released, life

    def abandon(self, line: Line, call_id: int, seen: Sequence[Any]) -> None:
        """Nobody waits for this call any more. seen: what has come on the line, which nobody has looked at."""
        if seen:  # interrupted after the reply had come: nobody will look at it
            try:
                self._decline_seen(line, seen[-1])
            except ProtocolError:
                self._lines.drop(line)
            else:
                self._lines.check_in(line)
            return
        self._ours.cancel(call_id)
        self._lines.set_aside(line)
        self._life.interrupt()

    def collect(self) -> None:
        """Late replies are returned unread, and their lines are good again."""
        self._lines.collect(self._decline_late)

    def _decline_late(self, line: Line, received: list[bytes] | int) -> None:
        """The late answer on a line that was set aside."""
        if type(received) is not int:
            received = reply_in(received, self._exchange)[0]  # type: ignore[arg-type]
        self._decline_seen(line, received)

    def _decline_seen(self, line: Line, received: list[bytes] | int) -> None:
        """An answer that nobody wants. What it may have changed about plans nobody took note of.

        One that lies in shared memory was perhaps read, and that given back: then what it lends stays lent.
        """
        if type(received) is int:
            short, plan = short_of(line, received)
            plan.decline()
            self._released.give_back(short.token)
        else:
            self.decline(messages.unpack(received[0]))  # type: ignore[index]
        line.plans.clear()

    def decline(self, reply: Any) -> None:
        """What a reply brings is returned."""
        if type(reply) is Done:
            self._exchange.decline(reply.headers)
            self._released.give_back(reply.token)
