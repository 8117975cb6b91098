"""Whether a worker that lives, and answers others, still has a call that it does not answer.

A call can wait for as long as it works; so silence says nothing. But a worker takes a message from each line that has any before
it looks at a line again. Who has answered many Pings by another line, one after the other, has looked at this one as often:
what it has not answered by then was lost on its way, and whoever waits for it would wait for ever. That would be a fault of
ours, or of a network; it ends with an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gradwire.lines import Line, Lines
from gradwire_wire import messages, sockets
from gradwire_wire.errors import MemoryExhaustedError

__all__ = ["Inquiry"]


class Inquiry:
    """About one call. `is_lost` is asked whenever one has waited in vain for a moment; `end` at the end.

    AFTER: so many moments nothing is asked. ENOUGH: Pings answered, at most one a moment: far more than there are packets that
    are no calls before it on the line (a Release a second, where the worker is busy with others).
    """

    AFTER, ENOUGH = 20, 50

    def __init__(self, lines: Lines, call_ids: Iterator[int]) -> None:
        self._lines, self._call_ids = lines, call_ids
        self._moments = self._answered = 0
        self._line: Line | None = None
        self._is_asked = False

    def is_lost(self) -> bool:
        """Whether the call will certainly never be answered. Never waits, nor raises."""
        if self._answered >= self.ENOUGH:  # and one has looked for the call's answer since
            return True
        self._moments += 1
        if self._moments > self.AFTER:
            self._go_on()
        return False

    def _go_on(self) -> None:
        with contextlib.suppress(
            sockets.Unreachable, MemoryExhaustedError
        ):  # it has ended; or no descriptor is left
            line = self._line = self._line or self._lines.check_out_dealer()
            if self._is_asked:
                if line.receive_nowait() is None:
                    return
                self._is_asked, self._answered = False, self._answered + 1
            line.send_nowait([messages.pack(messages.Ping(next(self._call_ids)))])
            self._is_asked = True

    def end(self) -> None:
        """The call is over, or nobody waits for it any more."""
        line, self._line = self._line, None
        if line is not None and self._is_asked:
            self._lines.set_aside(line)
        elif line is not None:
            self._lines.check_in(line)
