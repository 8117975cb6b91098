"""Interrupting a running call by SIGINT, and nothing else.

User code may set a handler of its own, or have SIGINT ignored, and leave it so: ours is set again before each call.

The client writes the id of the call it abandons into its ledger and asks the broker for SIGINT. The
handler raises only while that very call is marked running, so a late signal hits nobody else's call.
"""

from __future__ import annotations

import signal
from _signal import getsignal  # type: ignore[import-not-found]  # (signal.getsignal takes 10 µs, for an enumeration)
from typing import Any

from gradwire_wire.segments import Ledger

__all__ = ["Interrupts"]

_SIGINT = int(signal.SIGINT)


class Interrupts:
    """Which call is running, and the signal handler that looks there."""

    def __init__(self) -> None:
        self._running: tuple[Ledger, int] | None = None
        self._handler = self._on_signal  # one object: a bound method is another one each time
        signal.signal(signal.SIGINT, self._handler)

    def begin(self, ledger: Ledger, call_id: int) -> None:
        """User code starts; KeyboardInterrupt may come from here on, or at once if it was abandoned already."""
        self._running = (ledger, call_id)
        if getsignal(_SIGINT) is not self._handler:
            signal.signal(_SIGINT, self._handler)
        if ledger.is_cancelled(call_id):
            raise KeyboardInterrupt

    def end(self) -> None:
        """User code is over."""
        self._running = None

    def _on_signal(self, _signum: int, _frame: Any) -> None:
        running = self._running
        if running is not None and running[0].is_cancelled(running[1]):
            self._running = None
            raise KeyboardInterrupt("the caller has abandoned this call")
