"""How a connection begins: a Hello and a Welcome, and what both ends share from then on (docs/protocol.md, Handshake)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from gradwire.worker_records import WorkerFacts
from gradwire_wire import messages
from gradwire_wire.errors import ConnectError, DeadlineError, ProtocolError, class_named
from gradwire_wire.exchange import Exchange, Memory, close_all
from gradwire_wire.segments import Ledger
from gradwire_wire.tether import Tether, TetherClosedError

__all__ = ["Ask", "Shared", "checked_welcome", "hello_of", "shake_hands", "with_grace"]


Ask = Callable[[], bool]
"""Whether a worker that does not answer is busy with somebody's call, as it may be for hours."""


class Shared(NamedTuple):
    """What a worker and this process have in common. ours: the ledger that this end writes."""

    exchange: Exchange
    ours: Ledger
    welcome: messages.Welcome


def hello_of(facts: WorkerFacts, client_id: bytes) -> messages.Hello:
    """What this process says to a worker first."""
    return messages.Hello(messages.PROTOCOL, facts.token, client_id, os.getpid())


def with_grace(is_busy: Ask) -> Ask:
    """Whether it is busy, or was when that was asked last: its turn has come in between, and its answer is on the way."""
    was_busy = False

    def is_waited_for() -> bool:
        nonlocal was_busy
        before, was_busy = was_busy, is_busy()
        return before or was_busy

    return is_waited_for


def shake_hands(
    tether: Tether, facts: WorkerFacts, client_id: bytes, memory: Memory, timeout_s: float, is_busy: Ask
) -> Shared:
    """Greet the worker at the other end of a tether. Waits at most ``timeout_s``, and again for as long as it is busy.

    ConnectError, VersionMismatchError, DeadlineError, ProtocolError.
    """
    ours, is_waited_for = Ledger(memory.folder), with_grace(is_busy)
    try:
        tether.send(hello_of(facts, client_id), ours.descriptors, timeout_s)
        ours.close()
        while (received := tether.receive(timeout_s)) is None:
            if not is_waited_for():
                raise DeadlineError(f"worker {facts.name!r} did not answer within {timeout_s} s")
    except TetherClosedError as error:
        raise ConnectError(f"worker {facts.name!r} hung up during the handshake") from error
    answer, descriptors = received
    try:
        welcome = checked_welcome(answer, facts, is_whole=len(descriptors) <= 1)
    except BaseException:
        close_all(descriptors)
        raise
    return Shared(Exchange(memory, tether, Ledger.received(descriptors), ours), ours, welcome)


def checked_welcome(answer: Any, facts: WorkerFacts, is_whole: bool = True) -> messages.Welcome:
    """The answer to a Hello, if it welcomes us. Raises what a Refused says; ProtocolError.

    is_whole: whether it came with as many descriptors as a Welcome does.
    """
    if type(answer) is messages.Refused:
        raise class_named(answer.kind, ProtocolError)(answer.message)
    if type(answer) is not messages.Welcome or not is_whole or answer.incarnation != facts.incarnation:
        raise ProtocolError(f"unexpected answer to Hello: {answer!r:.80}")
    return answer
