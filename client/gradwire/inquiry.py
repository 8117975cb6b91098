"""Whether a worker that lives, and answers others, still has a call that it does not answer.

A call can wait for as long as it works; so silence says nothing. But a worker takes a message from each line that has any before
it looks at a line again. Who has answered many Pings by another line, one after the other, has looked at this one as often:
what it has not answered by then was lost on its way, and whoever waits for it would wait for ever. That would be a fault of
ours, or of a network; it ends with an error.

By ZeroMQ a message may be under way for a minute (a large one, over tcp), and a Ping by another line would overtake it. So there
the Ping goes behind the call by the same line, on which nothing overtakes anything: if it is answered first, the call, or its answer, was lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from gradwire.lines import Line, Lines
from gradwire_wire import messages, sockets
from gradwire_wire.errors import MemoryExhaustedError
from gradwire_wire.sockets import Dealer

__all__ = ["Inquiry", "InquiryBehind", "InquiryBeside", "inquiry_about"]

AFTER = 20
"""So many moments nothing is asked."""
ENOUGH = 50
"""Pings answered by another line, at most one a moment: far more than there are packets that are no calls before the call on
its line (a Release a second, where the worker is busy with others)."""


class Inquiry(Protocol):
    """About one call."""

    def is_lost(self) -> bool:
        """Whether the call will certainly never be answered: asked whenever one has waited in vain for a moment.

        Never waits, nor raises.
        """

    def end(self) -> None:
        """The call is over, or nobody waits for it any more."""


def inquiry_about(line: Line, lines: Lines, call_ids: Iterator[int], pings: list[int]) -> Inquiry:
    """About the call on that line. pings: see `InquiryBehind`."""
    if isinstance(line, Dealer):
        return InquiryBehind(line, call_ids, pings)
    return InquiryBeside(lines, call_ids)


class InquiryBeside:
    """About a call on a lane: Pings go by another line."""

    def __init__(self, lines: Lines, call_ids: Iterator[int]) -> None:
        self._lines, self._call_ids = lines, call_ids
        self._moments = self._answered = 0
        self._line: Line | None = None
        self._is_asked = False

    def is_lost(self) -> bool:
        """See `Inquiry`."""
        if self._answered >= ENOUGH:  # and one has looked for the call's answer since
            return True
        self._moments += 1
        if self._moments > AFTER:
            self._go_on()
        return False

    def _go_on(self) -> None:
        # the worker has ended, as is told elsewhere; or no descriptor is left
        with contextlib.suppress(sockets.Unreachable, MemoryExhaustedError):
            line = self._line = self._line or self._lines.check_out_dealer()
            if self._is_asked:
                if line.receive_nowait() is None:
                    return
                self._is_asked, self._answered = False, self._answered + 1
            line.send_nowait([messages.pack(messages.Ping(next(self._call_ids)))])
            self._is_asked = True

    def end(self) -> None:
        """See `Inquiry`. A Ping that is not answered yet will be."""
        line, self._line = self._line, None
        if line is not None and self._is_asked:
            self._lines.set_aside(line)
        elif line is not None:
            self._lines.check_in(line)


class InquiryBehind:
    """About a call by ZeroMQ. ``pings``: call ids of the Pings that were sent behind it, ever more rarely."""

    def __init__(self, line: Line, call_ids: Iterator[int], pings: list[int]) -> None:
        self._line, self._call_ids, self._pings = line, call_ids, pings
        self._moments, self._next = 0, AFTER

    def is_lost(self) -> bool:
        """Never: what comes on the line tells, where that is the answer to one of the Pings."""
        self._moments += 1
        if self._moments > self._next:
            self._next *= 2
            ping = next(self._call_ids)
            with contextlib.suppress(sockets.Unreachable):
                self._line.send_nowait([messages.pack(messages.Ping(ping))])
                self._pings.append(ping)
        return False

    def end(self) -> None:
        """What is answered later is nobody's, as any late answer."""
