"""What brokers on this machine have in common: their end is that of a process, which a pidfd tells."""

from __future__ import annotations

import os
from typing import Any

from gradwire_wire.sockets import ClientKeys

__all__ = ["LAST_CHARACTERS", "LocalBroker"]

LAST_CHARACTERS = 4000  # of what a broker wrote to its stderr


class LocalBroker:
    """``pidfd``: readable when the broker has ended; ours to close. ``when_silent``: what to do where it does not answer.
    ``ending``: what has ended when there is no more news of it."""

    keys: ClientKeys | None = None
    when_silent = ""
    ending = "the broker ended"
    pidfd = -1

    def watch(self, dealer: Any) -> Any:
        """What a poller finds readable when it may have ended."""
        return self.pidfd

    def has_ended(self) -> bool:
        """Asked when that is readable."""
        return True

    def reachable(self, endpoint: str) -> str:
        """How its worker's endpoint is reached from here."""
        return endpoint

    def close(self) -> None:
        """Stop watching it. Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
