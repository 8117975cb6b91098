"""The way to a worker on another machine: no tether, no shared memory; all tensors travel in frames, encrypted.

Its death is told by the broker alone. A call that is abandoned is dropped here and runs on there, since nothing is
shared by which the worker could be told which call to interrupt.
"""

from __future__ import annotations

import time
from typing import Any

from gradwire.connection import LOOK_MS, Connection
from gradwire.handshake import Ask, checked_welcome, hello_of, with_grace
from gradwire.life import Life
from gradwire.lines import Lines
from gradwire_wire import messages, sockets
from gradwire_wire.errors import ConnectError, DeadlineError
from gradwire_wire.exchange import Exchange
from gradwire_wire.segments import Ledger

__all__ = ["FarConnection", "NoTether"]


class FarLife(Life):
    """Of an incarnation without a tether: the broker's news are looked at."""

    def _look(self) -> None:
        if not self.gone.is_set():
            is_dead = self._link.death_of(self.facts.incarnation) is not None
            if is_dead or not self._link.broker_alive:
                self.gone.set()

    @property
    def is_there(self) -> bool:
        """Whether the worker was there, and was ours to call, when the broker was last heard of."""
        self._look()
        return super().is_there

    def check_usable(self) -> list[bytes]:
        """See `Life`."""
        self._look()
        return super().check_usable()

    def look_around(self, deadline: float | None) -> None:
        """See `Life`."""
        self._look()
        super().look_around(deadline)


class NoTether:
    """In place of a `TetherWatch`, where there is no tether to be watched."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def stop(self) -> None:
        """Nothing was looked at."""

    def let_go(self) -> None:
        """Nothing is shared."""
        self._exchange.end()


class FarConnection(Connection):
    """A `Connection` at ``tcp://``."""

    life_class = FarLife

    def _open(self, timeout_s: float, is_busy: Ask) -> tuple[Lines, Exchange, Ledger]:
        ours = Ledger.received([])  # shared with nobody
        exchange = Exchange(self._memory, None, Ledger.received([]), ours)
        lines = Lines(
            self.facts.endpoint, self._client_id, exchange, LOOK_MS, lanes=False, keys=self.link.keys
        )
        line = lines.check_out_dealer()
        try:
            line.send_nowait([messages.pack(hello_of(self.facts, self._client_id))])
            checked_welcome(self._answer(line, timeout_s, is_busy), self.facts)
        except BaseException:
            lines.drop(line)
            exchange.end()
            raise
        lines.check_in(line)
        self._watch = NoTether(exchange)
        return lines, exchange, ours

    def _answer(self, line: sockets.Dealer, timeout_s: float, is_busy: Ask) -> Any:
        deadline, is_waited_for = time.monotonic() + timeout_s, with_grace(is_busy)
        while True:
            try:
                received = line.receive()
                return messages.unpack(b"" if type(received) is int else received[0])  # type: ignore[index]
            except sockets.Again:
                if not self.life.is_there:
                    raise ConnectError(f"worker {self.facts.name!r} ended during the handshake") from None
            if time.monotonic() > deadline:
                if not is_waited_for():
                    break
                deadline = time.monotonic() + timeout_s
        raise DeadlineError(
            f"worker {self.facts.name!r} at {self.facts.endpoint} did not answer within {timeout_s} s; perhaps a firewall lets "
            "only the broker's port through"
        )
