"""The way to a worker on another machine: no tether, no shared memory; all tensors travel in frames, encrypted.

Its death is told by the broker alone. A call that is abandoned is dropped here and runs on there, since nothing is
shared by which the worker could be told which call to interrupt.
"""

from __future__ import annotations

from typing import Any

from gradwire.connection import LOOK_MS, Connection
from gradwire.lines import Lines
from gradwire_wire import messages, sockets
from gradwire_wire.errors import ConnectError, DeadlineError, ProtocolError, class_named
from gradwire_wire.exchange import Exchange
from gradwire_wire.segments import Ledger

__all__ = ["FarConnection"]


class FarConnection(Connection):
    """A `Connection` at ``tcp://``."""

    def _open(self, timeout_s: float) -> None:
        self._ours = Ledger.received([])  # shared with nobody
        self.exchange = Exchange(self._memory, None, Ledger.received([]), self._ours)
        self._lines = Lines(
            self.facts.endpoint, self._client_id, self.exchange, LOOK_MS, lanes=False, keys=self._link.keys
        )
        hello = messages.Hello(messages.PROTOCOL, self.facts.token, self._client_id, self._pid)
        line = self._lines.check_out_dealer()
        try:
            line.send_nowait([messages.pack(hello)])
            answer = self._answer(line, timeout_s)
        except BaseException:
            line.close()
            self.exchange.end()
            raise
        self._lines.check_in(line)
        if type(answer) is messages.Refused:
            raise class_named(answer.kind, ProtocolError)(answer.message)
        if type(answer) is not messages.Welcome or answer.incarnation != self.facts.incarnation:
            raise ProtocolError(f"unexpected answer to Hello: {answer!r:.80}")

    def _answer(self, line: sockets.Dealer, timeout_s: float) -> Any:
        for _ in range(max(1, int(1000 * timeout_s / LOOK_MS))):
            try:
                received = line.receive()
                return messages.unpack(b"" if type(received) is int else received[0])  # type: ignore[index]
            except sockets.Again:
                if self._is_gone():
                    raise ConnectError(f"worker {self.facts.name!r} ended during the handshake") from None
        raise DeadlineError(
            f"worker {self.facts.name!r} at {self.facts.endpoint} did not answer within {timeout_s} s; it may be in a "
            "long call, or a firewall lets only the broker's port through"
        )

    def _is_gone(self) -> bool:
        if not self._gone.is_set():
            is_dead = self._link.death_of(self.facts.incarnation) is not None
            if is_dead or not self._link.broker_alive:
                self._gone.set()
        return self._gone.is_set()

    @property
    def is_alive(self) -> bool:
        """Whether the worker was there when the broker was last heard of."""
        return not self._is_gone() and not self._closed

    def _check_usable(self) -> None:
        self._is_gone()
        super()._check_usable()

    def _look_around(self, deadline: float | None) -> None:
        self._is_gone()
        super()._look_around(deadline)

    def close(self) -> None:
        """Stop using the worker. Idempotent."""
        if not self._closed:
            self._closed = True
            self._lines.close()
            self.exchange.end()
