"""The worker's side of plans (`gradwire_wire.plans`): what is fixed about a call that comes again and again."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from gradwire_wire import messages
from gradwire_wire.carriers import Carrier, Columns, plain_avals
from gradwire_wire.dtypes import DType
from gradwire_wire.errors import ProtocolError
from gradwire_wire.exchange import Exchange, NotShared
from gradwire_wire.lane import TooLong
from gradwire_wire.plans import (
    ANSWER,
    CALL,
    CALL_HEAD,
    MAX_PLANS,
    MAX_RELEASED,
    MIN_RUN,
    SHORT_ANSWER,
    SHORT_CALL,
    Frame,
    Layout,
    avals_of,
    layout_of,
)
from gradwire_wire.sockets import Unreachable
from gradwire_workers.held import Held
from gradwire_workers.program import Program, WorkerSite

__all__ = ["Plan", "checked_layout", "number_of", "short_of"]

_pack_answer, _unpack_call, _unpack_head = ANSWER.pack_into, CALL.unpack_from, CALL_HEAD.unpack_from


class Plan:
    """A call without its tensors, at the line it comes by. ``call``: the message that made it, without its tensors.

    chain: incarnations of the workers it comes through, ours the last. ``nbytes``: of a short call.
    """

    __slots__ = (
        "_answer",
        "_answer_nbytes",
        "_exchange",
        "_frame",
        "_number",
        "_outgoing",
        "_structure",
        "adopters",
        "call",
        "chain",
        "nbytes",
        "program",
        "run",
        "site",
        "word",
    )

    def __init__(
        self,
        call: messages.Plan,
        program: Program,
        site: WorkerSite,
        word: Any,
        chain: list[bytes],
        layout: Layout,
        line: Any,
        exchange: Exchange,
    ) -> None:
        self.call = call._replace(headers=[], released=[])
        self.program, self.site, self.word, self.chain = program, site, word, chain
        self._exchange, self._structure = exchange, b""
        self._outgoing, self._number, self._answer_nbytes = line.outgoing, call.plan, 0
        self._frame = Frame(layout, line.incoming, exchange)
        self.nbytes = layout.nbytes
        self._answer: Frame | None = None
        self.run = None if word or call.keep else program.runner(site)
        self.adopters: list[Any] | None = None

    def expect_arrays(self, adopter: Callable[[DType], Any]) -> None:
        """Where all operands lie in the frame: how fresh arrays become tensors of the engine."""
        dtypes = self._frame.dtypes
        found = None if dtypes is None else [_left_out if d is None else adopter(d) for d in dtypes]
        self.adopters = None if found is None or None in found else found

    def take_tensors(self) -> list[Any]:
        """The operands as tensors (None: one that is left out), after `expect_arrays` has found ``adopters``."""
        adopters, arrays = self.adopters, self._frame.take_arrays()
        if len(arrays) == 1:
            return [adopters[0](arrays[0])]  # type: ignore[index]
        return [adopt(x) for adopt, x in zip(adopters, arrays)]  # type: ignore[arg-type]

    def take(self) -> list[Carrier | None]:
        """The operands of the short call in the line's buffer. See `Frame.take`."""
        return list(self._frame.take())

    def note_done(self, done: messages.Done) -> None:
        """A long answer goes out: short ones look like it from now on."""
        layout = layout_of(avals_of(done.headers), self.call.inlined, self.call.room)
        self._answer = None if layout is None else Frame(layout, self._outgoing, self._exchange)
        self._answer_nbytes = 0 if layout is None else layout.nbytes
        self._structure = done.structure

    def answer(
        self,
        line: Any,
        call_id: int,
        carriers: Sequence[Carrier | None],
        structure: bytes,
        token: int,
        ns: int,
        held: Held,
        together: int,
    ) -> bool:
        """Answer by a short frame; False where these results need a long one.

        together: where it may wait in ``held`` for others, for how many. (It does not where it lends something, which must come back if nobody gets it.)
        Raises MemoryExhaustedError, and Unreachable where the client is gone; nothing is lent then.
        """
        answer = self._answer
        if answer is None or structure != self._structure or not _is_alike(carriers, answer):
            return False
        try:
            loans = answer.put(carriers)
        except NotShared:
            return False
        _pack_answer(self._outgoing, 0, SHORT_ANSWER, 0, self._number, 0, call_id, token, ns)
        if together > 1 and not loans and self._answer_nbytes <= line.most_held:
            held.put(line, self._number, bytes(self._outgoing[: self._answer_nbytes]), together)
            return True
        try:
            if held:
                held.release()
            line.send_short_nowait(self._answer_nbytes)
        except TooLong:
            self._exchange.take_back_loans(loans)
            return False
        except Unreachable:
            self._exchange.take_back_loans(loans)
            raise
        return True


def _left_out(_: None) -> None:
    """What stands for an operand that is not in the frame."""


def _is_alike(carriers: Sequence[Carrier | None], answer: Frame) -> bool:
    """Whether results have exactly the answer's shapes and dtypes, and no gaps."""
    avals: Sequence[Any] = answer.avals
    if len(carriers) != len(avals):
        return False
    if len(avals) == 1 and carriers[0] is not None and avals[0] is not None:
        array, dtype, _ = carriers[0]
        shape, expected = avals[0]
        return (dtype is expected or dtype == expected) and array.shape == shape and array.flags.c_contiguous
    if answer.columns is not None and (len(avals) >= MIN_RUN or type(carriers) is Columns):
        return plain_avals(carriers) == answer.columns
    for carrier, aval in zip(carriers, avals):
        if carrier is None or aval is None:
            if carrier is not aval:
                return False
            continue
        array, dtype, _ = carrier
        shape, expected = aval
        if dtype is not expected and dtype != expected:
            return False
        if array.shape != shape or not array.flags.c_contiguous:
            return False
    return True


def number_of(line: Any, nbytes: int) -> int:
    """Of the plan that the short call in the line's buffer names; -1 where it is none."""
    return int(_unpack_head(line.incoming)[2]) if nbytes >= CALL.size else -1


def checked_layout(call: messages.Plan, line: Any) -> Layout:
    """The layout of a plan's short calls; ProtocolError where the plan cannot be."""
    if call.plan >= MAX_PLANS or call.room > line.room:
        raise ProtocolError(
            f"plan {call.plan} of frames of {call.room} bytes: at most {MAX_PLANS} and {line.room}"
        )
    is_plain = type(call.token) is int and not call.flags & messages.SEEDED
    layout = layout_of(avals_of(call.headers), call.inlined, call.room) if is_plain else None
    if layout is None:
        raise ProtocolError("a call that cannot be planned came as a plan")
    return layout


def short_of(line: Any, nbytes: int) -> tuple[int, int, Sequence[int], int, Plan | None]:
    """The head of the short call in the line's buffer: call id, token, released tokens, how many answers may come together; and its plan.

    None where there is none of that number, or of another length.
    """
    if nbytes < CALL.size:
        return 0, 0, (), 0, None
    incoming = line.incoming
    kind, count, number, together, call_id, token = _unpack_head(incoming)
    plan = line.plans.get(number)
    if plan is None or plan.nbytes != nbytes or kind != SHORT_CALL or count > MAX_RELEASED:
        return call_id, token, (), 0, None
    return call_id, token, _unpack_call(incoming)[6 : 6 + count] if count else (), together, plan
