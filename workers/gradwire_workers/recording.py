"""When a client's messages were received, computed and answered here, for the client that asked for it by `messages.Trace`.

While somebody wants to know, there is a `Recorder`: the desk tells it of each message that comes and is done with, `interrupts` where
user code begins and ends, `answers` of each answer that is ready. Times are CLOCK_MONOTONIC's, which the processes of a machine share.
"""

from __future__ import annotations

import time

from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import ProtocolError
from gradwire_wire.messages import Trace
from gradwire_wire.recordings import COLUMNS, MAX_ROWS, Ring
from gradwire_wire.structures import flatten
from gradwire_workers.desk import Desk
from gradwire_workers.sessions import Session

__all__ = ["Recorder", "act"]

INT64 = BY_NAME["int64"]
now = time.monotonic_ns


def act(desk: Desk, session: Session, trace: Trace) -> tuple[bytes, list[Carrier]]:
    """Begin a client's recording, or end it: the structure and the tensors of the answer."""
    if trace.capacity > MAX_ROWS:
        raise ProtocolError(f"a recording of {trace.capacity} rows; at most {MAX_ROWS}")
    recorder = desk.recorder or Recorder(desk)
    if trace.capacity:
        if trace.call_id > session.not_recorded_until:  # else it comes late, by another line
            recorder.begin(session, trace.capacity)
        return flatten(None, callable)[0], []
    session.not_recorded_until = trace.call_id
    ring = recorder.end(session)
    facts = {"columns": list(COLUMNS), "dropped": ring.dropped}
    return flatten(facts, callable)[0], [Carrier(ring.taken(), INT64)]


class Recorder:
    """Of one desk, which serves one message at a time: notes its steps, if its client is one of those that are recorded."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._rings: dict[Session, Ring] = {}
        self._free = now()
        self._received = self._call_id = self._begun = self._computed = self._ready = 0

    def begin(self, session: Session, capacity: int) -> None:
        """Record this client's messages from the next one on."""
        self._rings[session] = Ring(capacity)
        self._be_told(self)

    def end(self, session: Session) -> Ring:
        """Do so no more. What was recorded: nothing of a client that was not."""
        ring = self._rings.pop(session, None)
        if not self._rings:
            self._be_told(None)
        return ring or Ring(1)

    def _be_told(self, recorder: Recorder | None) -> None:
        desk = self._desk
        desk.recorder = desk.answers.recorder = desk.users_code.interrupts.recorder = recorder

    def note_received(self) -> None:
        """A message has come."""
        self._call_id = self._begun = self._computed = self._ready = 0
        self._received = now()

    def note_begun(self, call_id: int) -> None:
        """User code begins, for the message of that number."""
        self._call_id, self._begun = call_id, now()

    def note_computed(self) -> None:
        """User code is over."""
        self._computed = now()

    def note_ready(self, call_id: int) -> None:
        """An answer is made, to the message of that number; 0: its number is not known."""
        self._ready, self._call_id = now(), call_id or self._call_id

    def note_sent(self, session: Session | None) -> None:
        """The message, which came from there, is done with."""
        sent = now()
        ring = None if session is None else self._rings.get(session)
        if ring is not None and self._call_id:  # a message without a number has no answer
            # (a column holds 63 bits; no honest client has counted so far)
            number, ready = self._call_id & (1 << 63) - 1, self._ready or sent
            ring.add((number, self._free, self._received, self._begun, self._computed, ready, sent))
        self._free = sent
