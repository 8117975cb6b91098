"""How a message gets on its way; and what becomes of its line, and of what it lends, where it does not.

A line on which a message was perhaps sent, or in part, is dropped, and the loans stay: the worker may have them. Otherwise
they are taken back, and the line is good for the next call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from gradwire.life import Life
from gradwire.lines import Line, Lines, fits
from gradwire.plans import Plan, next_number
from gradwire_wire import messages, sockets
from gradwire_wire.errors import MemoryExhaustedError, ProtocolError, UsageError
from gradwire_wire.exchange import Exchange
from gradwire_wire.lane import MAX_PACKET, TooLong
from gradwire_wire.messages import Call

__all__ = ["Sender"]


class Sender:
    """Of one connection. Any thread may send. Nothing here waits, but to know why a worker cannot be reached."""

    def __init__(self, lines: Lines, exchange: Exchange, life: Life) -> None:
        self._lines, self._exchange, self._life = lines, exchange, life

    def send(self, message: Any, headers: Sequence[Any], further: Sequence[Any]) -> Line:
        """Send a message; the line that its reply will come on."""
        try:
            frame = messages.pack(message)
            line = self.check_out(len(frame), len(further))
        except BaseException:  # certainly not sent
            self._exchange.take_back(headers)
            raise
        try:
            self._send_by(line, [frame, *further], headers)
        except TooLong:
            self._lines.check_in(line)
            try:
                line = self.check_out(MAX_PACKET + 1, 0)
            except BaseException:
                self._exchange.take_back(headers)
                raise
            self._send_by(line, [frame, *further], headers)
        return line

    def check_out(self, nbytes: int, frames: int) -> Line:
        """See `Lines.check_out`. Raises why the worker cannot be reached, if it cannot."""
        try:
            return self._lines.check_out(nbytes, frames)
        except sockets.Unreachable as error:
            self._life.raise_doorless(str(error))

    def _send_by(self, line: Line, frames: Sequence[Any], headers: Sequence[Any]) -> None:
        """Send frames. TooLong: it must go by another line, and nothing was sent."""
        try:
            line.send_nowait(frames)
        except TooLong:
            raise
        except sockets.Unreachable:
            self._exchange.take_back(headers)
            self._lines.drop(line)
            self._life.raise_unreachable()
        except Exception:  # certainly not sent
            self._exchange.take_back(headers)
            self._lines.drop(line)
            raise
        except BaseException:  # perhaps sent, perhaps in part
            self._lines.drop(line)
            raise

    def send_plan(
        self, call: Call, signature: tuple[Any, ...], headers: Sequence[Any]
    ) -> tuple[Line, Plan | None]:
        """Send a call as a Plan, by a line that carries such; the plan is None where that cannot be, and nothing sent."""
        line = self.check_out(0, 0)
        number = next_number(line)
        try:
            plan = Plan(number, line, signature, self._exchange)
            frame = messages.pack(messages.Plan(*call, number, line.inlined, line.room))
        except (ProtocolError, UsageError):
            plan = None
        if plan is not None and fits(line, len(frame)):
            with contextlib.suppress(TooLong):
                self._send_by(line, [frame], headers)
                return line, plan
        self._lines.check_in(line)
        return line, None

    def unsent(self, error: BaseException, line: Line, loans: Sequence[int] | None) -> None:
        """A short call was not sent, or perhaps not, for that reason. Raises why the worker cannot be reached, if it cannot.

        loans: None where the call was not even written into the line's buffer: then there are none.
        """
        is_unreachable, is_too_long = isinstance(error, sockets.Unreachable), isinstance(error, TooLong)
        if loans is not None and (is_unreachable or is_too_long):
            self._exchange.take_back_loans(loans)
        if loans is None or is_too_long:
            self._lines.check_in(line)
        else:
            self._lines.drop(line)
        if is_unreachable:
            self._life.raise_unreachable()

    def tell(self, message: Any) -> bool:
        """Send a message that has no reply. Whether it was sent: not where the worker is gone, or has not read enough. Never waits."""
        frame = messages.pack(message)
        try:
            line = self._lines.check_out(len(frame), 0)
        except (MemoryExhaustedError, sockets.Unreachable):
            return False
        try:
            line.tell_nowait([frame])
        except sockets.Unreachable:
            self._lines.drop(line)
            return False
        except TooLong:
            self._lines.check_in(line)
            return False
        self._lines.check_in(line)
        return True
