"""One call that is submitted, and what goes for it over the lane: its frame, and what the answer says.

Who submits encodes the call in its own thread, so that small arguments are taken at once; the pipeline's lock is held then. Answers are
decoded by the one thread that reads them, without it. As on any line a call that comes again is a plan (`gradwire_wire.plans`),
but not before the call that makes the plan has been answered: until then those like it are messages.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gradwire.answers import check_results
from gradwire.endings import error_of
from gradwire.plans import Plan, Template, signature_of
from gradwire.site import Outcome, Site
from gradwire.steps import together
from gradwire_wire import messages
from gradwire_wire.carriers import Carrier
from gradwire_wire.chain import serving
from gradwire_wire.errors import ProtocolError, UsageError
from gradwire_wire.exchange import NotShared
from gradwire_wire.lane import Lane
from gradwire_wire.messages import Done, Failed
from gradwire_wire.plans import MAX_PLANS
from gradwire_wire.sockets import PipelineDealer
from gradwire_wire.words import Word

if TYPE_CHECKING:
    from gradwire.connection import Connection
    from gradwire.handle import Handle

__all__ = ["Coder", "Elsewhere", "Strange", "Submission"]

SMALL = 64 << 10
"""Bytes of an argument that is copied where it waits here."""


class Elsewhere(Exception):
    """The call cannot go by the lane; nothing was sent or lent."""


class Strange(Exception):
    """Not the answer to the call whose turn it is."""


class Submission:
    """One call: what it needs to be encoded, and then to be told its answer.

    adopt: makes a tensor of a result's carrier. again: makes the call the ordinary way; None where it never waits here. is_elsewhere: whether no
    packet takes it. is_late: whether others wait before it. holds: what must not go before it is answered. may_gather: whether its answer may wait
    for those of the next ones, where they are quick.
    """

    __slots__ = (
        "adopt",
        "again",
        "call_id",
        "carriers",
        "chain",
        "frame",
        "future",
        "handle",
        "holds",
        "is_abandoned",
        "is_elsewhere",
        "is_fresh",
        "is_late",
        "is_new",
        "key",
        "may_gather",
        "nbytes",
        "number",
        "plan",
        "remote",
        "signature",
        "site",
        "word",
    )

    def __init__(
        self,
        handle: Handle,
        remote: int,
        site: Site,
        carriers: list[Carrier],
        adopt: Callable[[Carrier], Any],
        again: Callable[[], Any] | None,
        word: Word = (),
    ) -> None:
        self.handle, self.remote, self.site, self.carriers = handle, remote, site, carriers
        self.adopt, self.again, self.word = adopt, again, word
        self.chain = chain = serving()
        self.signature = signature = signature_of(carriers)
        self.key = (remote, site.number, word, tuple(chain) if chain else (), signature)
        self.nbytes = sum([c.array.nbytes for c in carriers])
        self.is_abandoned = self.is_elsewhere = self.is_late = self.is_new = self.is_fresh = False
        self.may_gather = False
        self.call_id = self.number = 0
        self.frame = b""
        self.plan: Plan | None = None
        self.future: Any = None
        self.holds: Any = None

    def hold(self) -> None:
        """It has to wait its turn: what is small is copied, for its caller may write it soon."""
        self.carriers = [
            Carrier(c.array.copy(order="K"), c.dtype) if c.array.nbytes <= SMALL else c for c in self.carriers
        ]
        self.is_fresh = False


class Coder:
    """Of one lane: its plans, and which calls there were before. lock: of the pipeline."""

    def __init__(self, connection: Connection, lane: Lane | PipelineDealer, lock: threading.RLock) -> None:
        self._connection, self._lane, self._lock = connection, lane, lock
        self._exchange = connection.exchange
        self._most = lane.largest_packet()
        self._plans: dict[Any, Plan] = {}
        self._numbered: dict[int, Any] = {}
        self._next_number = 0
        self._making: set[Any] = set()
        self._seen: set[Any] = set()

    # -- encoding (lock held) ----------------------------------------------------------------------

    def frame_of(self, call: Submission, under_way: int) -> bytes:
        """The call as it is sent; its tensors are lent. `Elsewhere`; raises what refuses the arguments.

        under_way: how many calls are, before this.
        """
        lane = self._lane
        call.call_id = next(self._connection.call_ids)
        plan = None if call.signature is None else self._plans.get(call.key)
        if plan is not None and plan.nbytes <= self._most:
            with contextlib.suppress(NotShared):
                answers = together(plan.took_ns, under_way) if call.may_gather else 0
                plan.put(call.carriers, call.call_id, 0, (), answers)
                call.plan = plan
                return bytes(lane.outgoing[: plan.nbytes])
        return self._long_frame(call)

    def _long_frame(self, call: Submission) -> bytes:
        """A message; a Plan where such a call was made before."""
        further: list[Any] = []
        headers = self._exchange.lend(call.carriers, further)
        try:
            if further:
                raise Elsewhere
            template = Template(call.remote, call.site, call.word, 0, 0, 0, call.chain)
            message = template.message(call.call_id, headers, [])
            frame = self._planned(call, message) if self._is_to_be_planned(call) else None
            frame = frame or messages.pack(message)
            if len(frame) > self._most:
                raise Elsewhere
        except BaseException:
            self._exchange.take_back(headers)
            if call.is_new:
                call.plan, call.is_new = None, False
                self._making.discard(call.key)
            raise
        return frame

    def _is_to_be_planned(self, call: Submission) -> bool:
        key = call.key
        if call.signature is None or key in self._making:
            return False
        was_seen = key in self._seen
        if len(self._seen) > 16 * MAX_PLANS:
            self._seen.clear()
        self._seen.add(key)
        return was_seen

    def _planned(self, call: Submission, message: messages.Call) -> bytes | None:
        number, lane = self._next_number, self._lane
        assert call.signature is not None
        try:
            plan = Plan(number, lane, call.signature, self._exchange)
            frame = messages.pack(messages.Plan(*message, number, lane.inlined, lane.room))
        except (ProtocolError, UsageError):
            return None
        if len(frame) > self._most:
            return None
        self._next_number = (number + 1) % MAX_PLANS
        self._plans.pop(self._numbered.pop(number, None), None)  # the worker forgets it now
        call.plan, call.is_new = plan, True
        self._making.add(call.key)
        return frame

    # -- decoding ------------------------------------------------------------------------------------

    def result_of(self, call: Submission, received: Any, reply: Any, frames: Sequence[bytes]) -> Any:
        """The result tree; None of a call that was abandoned. `Strange`; raises what the worker reports.

        received: as of `Lane.receive`. reply: what the message among it says, if it is one; frames: of that.
        """
        if reply is None:
            return self._short_result(call, received)
        if reply.call_id != call.call_id and not (type(reply) is Failed and reply.call_id == 0):
            raise Strange
        self._making.discard(call.key)
        if type(reply) is Failed:
            life = self._connection.life
            if (
                life.is_closed and reply.type_name == "KeyboardInterrupt"
            ):  # by `close`, which has cancelled it
                life.raise_closed(was_running=True)
            raise error_of(reply, life.facts.name)
        return self._long_result(call, reply, frames)

    def _short_result(self, call: Submission, nbytes: int) -> Any:
        connection, plan = self._connection, call.plan
        if plan is None:
            raise Strange
        head = plan.head(nbytes)
        if head.call_id != call.call_id:
            raise Strange
        connection.compute_ns += head.compute_ns
        plan.took_ns = head.compute_ns
        connection.released.give_back(head.token)
        if call.is_abandoned:
            plan.decline()
            return None
        return Outcome(plan.take(), plan.structure, 0).tree(call.adopt)

    def _long_result(self, call: Submission, reply: Done, frames: Sequence[bytes]) -> Any:
        connection, plan = self._connection, call.plan
        connection.compute_ns += reply.compute_ns
        connection.released.give_back(reply.token)
        if plan is not None:
            plan.note_done(reply, self._exchange)
            if call.is_new:
                with self._lock:
                    self._plans[call.key] = plan
                    self._numbered[plan.number] = call.key
        if call.is_abandoned:
            self._exchange.decline(reply.headers)
            return None
        check_results(call.word, reply.headers)
        carriers = self._exchange.borrow_all(reply.headers, frames[1:])
        return Outcome(carriers, reply.structure, 0).tree(call.adopt)
