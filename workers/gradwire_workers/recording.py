"""When a client's calls were received, computed and answered here, for the client that asked for it by `messages.Trace`.

A desk that records is a desk of another class, and only as long as somebody wants it: otherwise nothing here costs
anything, not even a test. Times are CLOCK_MONOTONIC's, which the processes of a machine share.
"""

from __future__ import annotations

import time
from typing import Any
from weakref import WeakSet

from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import ProtocolError
from gradwire_wire.messages import Trace
from gradwire_wire.recordings import COLUMNS, MAX_ROWS, Ring
from gradwire_wire.segments import Ledger
from gradwire_wire.structures import flatten
from gradwire_workers.answers import Answers, Reply
from gradwire_workers.desk import Desk
from gradwire_workers.interrupts import Interrupts
from gradwire_workers.sessions import Line, Session

__all__ = ["act"]

INT64 = BY_NAME["int64"]
now = time.monotonic_ns


def act(desk: Desk, session: Session, trace: Trace) -> tuple[bytes, list[Carrier]]:
    """Begin a client's recording, or end it: the structure and the tensors of the answer."""
    if trace.capacity > MAX_ROWS:
        raise ProtocolError(f"a recording of {trace.capacity} rows; at most {MAX_ROWS}")
    if trace.capacity:
        session.__dict__["ring"] = Ring(trace.capacity)
        _begin(desk, session)
        return flatten(None, callable)[0], []
    ring = session.__dict__.pop("ring", None) or Ring(1)
    _end(desk, session)
    facts = {"columns": list(COLUMNS), "dropped": ring.dropped}
    return flatten(facts, callable)[0], [Carrier(ring.taken(), INT64)]


def _begin(desk: Desk, session: Session) -> None:
    if type(desk) is Desk:
        desk.__dict__.update(free=now(), recorded=WeakSet())
        desk.answers.__dict__.update(call_id=0, ready=0)
        desk.users_code.interrupts.__dict__.update(call_id=0, begun=0, computed=0)
        desk.__class__ = RecordingDesk
        desk.answers.__class__ = RecordingAnswers
        desk.users_code.interrupts.__class__ = RecordingInterrupts
    desk.__dict__["recorded"].add(session)


def _end(desk: Desk, session: Session) -> None:
    if type(desk) is not Desk:
        recorded = desk.__dict__["recorded"]
        recorded.discard(session)
        if not recorded:
            desk.users_code.interrupts.__class__ = Interrupts
            desk.answers.__class__ = Answers
            desk.__class__ = Desk


class RecordingInterrupts(Interrupts):
    """Notes when user code begins and ends, and for which call."""

    call_id: int
    begun: int
    computed: int

    def begin(self, ledger: Ledger, call_id: int) -> None:
        """As of `Interrupts`."""
        self.call_id, self.begun = call_id, now()
        super().begin(ledger, call_id)

    def end(self) -> None:
        """As of `Interrupts`."""
        super().end()
        self.computed = now()


class RecordingAnswers(Answers):
    """Notes when an answer is ready, and to which call."""

    call_id: int
    ready: int

    def send(self, session: Session | None, reply: Reply, line: Line) -> bool:
        """As of `Answers`."""
        self.ready, self.call_id = now(), reply.message.call_id
        return super().send(session, reply, line)


class RecordingDesk(Desk):
    """Notes when each message of those clients came and was answered."""

    recorded: WeakSet[Session]
    free: int

    def _serve(self, session: Session | None, received: list[bytes] | int, line: Line) -> None:
        came = _begin_row(self)
        super()._serve(session, received, line)
        _end_row(self, session, came)

    def _forget(self, session: Session) -> None:
        super()._forget(session)
        _end(self, session)


# Not methods: the message that ends a recording changes the desk's class before its row would be made.


def _begin_row(desk: RecordingDesk) -> int:
    ran: Any = desk.users_code.interrupts
    answer: Any = desk.answers
    answer.call_id = answer.ready = ran.call_id = ran.begun = ran.computed = 0
    return now()


def _end_row(desk: RecordingDesk, session: Session | None, received: int) -> None:
    sent = now()
    ran: Any = desk.users_code.interrupts
    answer: Any = desk.answers
    ring = session.__dict__.get("ring") if session is not None else None
    call_id = answer.call_id or ran.call_id
    if ring is not None and call_id:  # a message without a number has no answer
        # (a column holds 63 bits; no honest client has counted so far)
        ring.add(
            (
                call_id & (1 << 63) - 1,
                desk.free,
                received,
                ran.begun,
                ran.computed,
                answer.ready or sent,
                sent,
            )
        )
    desk.free = sent
