"""Interrupting a running call by SIGINT, and nothing else.

The client writes the id of the call it abandons into its ledger and asks the broker for SIGINT. The
handler raises only while that very call is marked running, so a late signal hits nobody else's call.
"""

from __future__ import annotations

import signal
from typing import Any

from gradwire_wire.segments import Ledger

__all__ = ["Interrupts"]


class Interrupts:
    """Which call is running, and the signal handler that looks there."""

    def __init__(self) -> None:
        self._running: tuple[Ledger, int] | None = None
        signal.signal(signal.SIGINT, self._on_signal)

    def begin(self, ledger: Ledger, call_id: int) -> None:
        """User code starts; KeyboardInterrupt may come from here on, or at once if it was abandoned already."""
        self._running = (ledger, call_id)
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
