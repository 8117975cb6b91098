"""Where user code begins and ends: it may be interrupted by SIGINT meanwhile, and a child that it has forked ends with it.

User code may set a handler of its own, or have SIGINT ignored, and leave it so: ours is set again before each call.

The client writes the id of the call it abandons into its ledger and asks the broker for `INTERRUPT`. Its handler here raises SIGINT only while that
very call is marked running: so a late signal, or one for a call that has not begun, hits nobody else's call, whatever that one does
with SIGINT. Nor does our handler of SIGINT, should it come from elsewhere.

A child that returns from user code, or leaves it by an exception (``sys.exit()``), would go on as a second worker at the same
sockets and answer the same call. It ends there, with the exit code that it would have as a script.
"""

from __future__ import annotations

import os
import signal
import sys
from _signal import getsignal  # type: ignore[import-not-found]  # (signal.getsignal takes 10 µs, for an enumeration)
from typing import TYPE_CHECKING, Any

from gradwire_wire.interruption import postponed
from gradwire_wire.process import INTERRUPT
from gradwire_wire.segments import Ledger
from gradwire_workers.faults import show

if TYPE_CHECKING:
    from gradwire_workers.recording import Recorder

__all__ = ["Interrupts", "leave"]

_SIGINT, _INTERRUPT = int(signal.SIGINT), int(INTERRUPT)
_forked: list[int] = []  # the process id of this process, where it is a child that was forked


def _note_child() -> None:
    _forked[:] = [os.getpid()]


os.register_at_fork(after_in_child=_note_child)


class Interrupts:
    """Which call is running, and the signal handlers that look there.

    recorder: is told when user code begins and ends; None while no client records.
    """

    recorder: Recorder | None

    def __init__(self) -> None:
        self.recorder = None
        self._running: tuple[Ledger, int] | None = None
        self._raised_for: tuple[Ledger, int] | None = None
        self._pid = os.getpid()
        self._handler = self._on_signal  # one object: a bound method is another one each time
        self._asked = self._on_request
        signal.signal(_SIGINT, self._handler)
        signal.signal(_INTERRUPT, self._asked)

    def begin(self, ledger: Ledger, call_id: int) -> None:
        """User code starts; KeyboardInterrupt may come from here on, or at once if it was abandoned already."""
        if self.recorder is not None:
            self.recorder.note_begun(call_id)
        self._running = (ledger, call_id)
        if getsignal(_SIGINT) is not self._handler:
            signal.signal(_SIGINT, self._handler)
        if getsignal(_INTERRUPT) is not self._asked:
            signal.signal(_INTERRUPT, self._asked)
        if ledger.is_cancelled(call_id):
            raise KeyboardInterrupt

    def end(self) -> None:
        """User code is over. A child that it has forked ends here, and does not return."""
        self._running = None
        postponed.clear()  # the call that it was meant for is over
        if _forked and _forked[0] != self._pid:
            leave(sys.exc_info()[1])
        if self.recorder is not None:
            self.recorder.note_computed()

    def _on_request(self, _signum: int, _frame: Any) -> None:
        """The broker asks: whatever handles SIGINT now hears of it, if it is the running call's concern."""
        running = self._raised_for if self._running is None and postponed else self._running
        if running is not None and running[0].is_cancelled(running[1]):
            signal.raise_signal(_SIGINT)

    def _on_signal(self, _signum: int, _frame: Any) -> None:
        running = self._running
        if (
            running is None and postponed
        ):  # the last signal came in a finalizer; it is sent again every second
            postponed.clear()
            running = self._raised_for
        if running is not None and running[0].is_cancelled(running[1]):
            self._running, self._raised_for = None, running
            raise KeyboardInterrupt("the caller has abandoned this call")


def leave(error: BaseException | None) -> None:
    """End this process as Python ends a script that has ended like that; nothing that belongs to the parent is touched."""
    code: Any = 0
    try:
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code
            if not isinstance(code, int):
                print(code, file=sys.stderr)
                code = 1
        elif error is not None:
            code = 1
            show(error)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code & 0xFF)
