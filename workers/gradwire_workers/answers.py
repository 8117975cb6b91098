"""Answers on their way out: results become headers, long answers go by memory, and what cannot be sent is taken back.

No answer can block: a client that is gone or does not read loses its answer, and what that would have lent comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import numpy as np

from gradwire_wire import messages, sockets
from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import DtypeError, GradwireError, MemoryExhaustedError, UnsupportedTensorError
from gradwire_wire.lane import MAX_PACKET, Lane, TooLong
from gradwire_wire.messages import Done, Failed, Long
from gradwire_wire.structures import naming
from gradwire_workers import faults, plans
from gradwire_workers.held import Held
from gradwire_workers.program import Engine
from gradwire_workers.residuals import Residuals
from gradwire_workers.sessions import Line, Session

if TYPE_CHECKING:
    from gradwire_workers.recording import Recorder

__all__ = ["Answers", "Reply"]

BYTES = BY_NAME["uint8"]
_ARRAYS_ALONE = {np.ndarray}


class Reply(NamedTuple):
    """What goes back: the message, tensors that could not be shared, and the plan that the call made."""

    message: Done | Failed
    frames: Sequence[bytes] = ()
    plan: plans.Plan | None = None


class Answers:
    """Makes replies of results, and sends them, after those that are held.

    recorder: is told when one is ready; None while no client records.
    """

    recorder: Recorder | None

    def __init__(self, engine: Engine, residuals: Residuals, held: Held) -> None:
        self.recorder, self._held = None, held
        self._export, self._export_all, self._residuals = engine.export, engine.export_all, residuals

    def exported(self, result: Sequence[Any], structure: bytes) -> Sequence[Carrier | None]:
        """The framework's tensors, None, or carriers (which stay what they are) as carriers.

        What cannot be sent is refused by its place in the result.
        """
        export = self._export
        try:
            if self._export_all is not None and _ARRAYS_ALONE.issuperset(map(type, result)):
                return self._export_all(result)
            return [None if x is None else x if type(x) is Carrier else export(x) for x in result]
        except (UnsupportedTensorError, DtypeError) as error:
            refused = naming(error, result, structure, export, argument_names=False)
        raise refused

    def done(
        self,
        session: Session,
        call_id: int,
        result: Sequence[Any],
        structure: bytes,
        token: int = 0,
        ns: int = 0,
    ) -> Reply:
        """The reply that lends these results."""
        frames: list[bytes] = []
        headers = session.exchange.lend(self.exported(result, structure), frames)
        return Reply(Done(call_id, structure, headers, token, ns), frames)

    def send(self, session: Session | None, reply: Reply, line: Line) -> bool:
        """Send a reply, or why it cannot be sent. Whether a Done was sent."""
        if self.recorder is not None:
            self.recorder.note_ready(reply.message.call_id)
        is_done = type(reply.message) is Done
        if self._held:
            self._held.release()
        try:
            frames = _packed(session, reply, line)
        except Exception as error:  # longer than the client would read, or text that is none
            self._take_back(session, reply)
            frames, is_done = [messages.pack(faults.failed(reply.message.call_id, error))], False
        try:
            try:
                line.send_nowait(frames)
            except TooLong:
                self._send_shortened(session, reply, frames, line)
        except sockets.Unreachable:
            self._take_back(session, reply)
            return False
        return is_done

    def _send_shortened(self, session: Session | None, reply: Reply, frames: list[bytes], line: Line) -> None:
        """Send, or keep until it can be sent, what stands for a packet that the system did not take."""
        assert isinstance(line, Lane)  # no other says so
        shortened = self._shortened(session, reply, frames)
        try:
            line.send_nowait([shortened])
        except TooLong:
            line.keep(shortened)

    def _shortened(self, session: Session | None, reply: Reply, frames: list[bytes]) -> bytes:
        """What stands for a packet that the system did not take, however short of buffers it is."""
        assert session is not None
        try:
            return _by_memory(session, reply.message.call_id, frames)
        except GradwireError as error:
            self._take_back(session, reply)
            return messages.pack(faults.failed(reply.message.call_id, error))

    def _take_back(self, session: Session | None, reply: Reply) -> None:
        """The reply was not sent: what it would have lent comes back, and nobody knows its token."""
        if session is not None and type(reply.message) is Done:
            session.exchange.take_back(reply.message.headers)
            self._residuals.release([reply.message.token], session.client_id)


def _packed(session: Session | None, reply: Reply, line: Line) -> list[bytes]:
    """The frames of a reply; by a lane, which takes one packet, what stands for them where they are more than that."""
    frames = [messages.pack(reply.message), *reply.frames]
    if session is not None and isinstance(line, Lane) and (len(frames) > 1 or len(frames[0]) > MAX_PACKET):
        return [_by_memory(session, reply.message.call_id, frames)]
    return frames


def _by_memory(session: Session, call_id: int, frames: Sequence[bytes]) -> bytes:
    """A message that stands for frames too long for a lane's packet: they lie in shared memory."""
    further: list[Any] = []
    carriers = [Carrier(np.frombuffer(frame, np.uint8), BYTES) for frame in frames]
    headers = session.exchange.lend(carriers, further)
    if further:
        session.exchange.take_back(headers)
        raise MemoryExhaustedError(
            f"{sum(map(len, frames))} bytes of reply cannot be shared: too many results are held at once. Drop some"
        )
    return messages.pack(Long(call_id, headers))
