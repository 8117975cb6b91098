"""The worker's side of plans (`gradwire_wire.plans`): what is fixed about a call that comes again and again."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from gradwire_wire import messages
from gradwire_wire.carriers import Carrier
from gradwire_wire.errors import ProtocolError
from gradwire_wire.exchange import Exchange
from gradwire_wire.plans import (
    ANSWER,
    CALL,
    MAX_PLANS,
    MAX_RELEASED,
    SHORT_ANSWER,
    Frame,
    Layout,
    avals_of,
    layout_of,
)
from gradwire_workers.program import Program, WorkerSite

__all__ = ["Plan", "Short", "checked_layout", "short_of"]


class Short(NamedTuple):
    """The head of a short call."""

    call_id: int
    token: int
    released: tuple[int, ...]


class Plan:
    """A call without its tensors, at the line it comes by. ``call``: the message that made it, without its tensors.

    chain: incarnations of the workers it comes through, ours the last.
    """

    __slots__ = (
        "_answer",
        "_exchange",
        "_frame",
        "_line",
        "_structure",
        "call",
        "chain",
        "program",
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
        self._line, self._exchange, self._structure = line, exchange, b""
        self._frame = Frame(layout, line.incoming, exchange)
        self._answer: Frame | None = None

    def take(self) -> list[Carrier | None]:
        """The operands of the short call in the line's buffer. See `Frame.take`."""
        return self._frame.take()

    def note_done(self, done: messages.Done) -> None:
        """A long answer goes out: short ones look like it from now on."""
        layout = layout_of(avals_of(done.headers), self.call.inlined, self.call.room)
        self._answer = None if layout is None else Frame(layout, self._line.outgoing, self._exchange)
        self._structure = done.structure

    def put(
        self, call_id: int, carriers: Sequence[Carrier | None], structure: bytes, token: int, ns: int
    ) -> list[int] | None:
        """Write a short answer into the line's buffer; the loans it makes. None where these results need a long one.

        Raises `exchange.NotShared` where a tensor cannot be lent, and MemoryExhaustedError.
        """
        answer = self._answer
        if answer is None or structure != self._structure or not _is_alike(carriers, answer.avals):
            return None
        loans = answer.put(carriers)
        ANSWER.pack_into(self._line.outgoing, 0, SHORT_ANSWER, 0, self.call.plan, 0, call_id, token, ns)
        return loans

    @property
    def answer_nbytes(self) -> int:
        """Of a short answer, after `put`."""
        assert self._answer is not None, "put() comes first"
        return self._answer.nbytes

    @property
    def nbytes(self) -> int:
        """Of a short call."""
        return self._frame.nbytes


def _is_alike(carriers: Sequence[Carrier | None], avals: Sequence[Any]) -> bool:
    """Whether results have exactly these shapes and dtypes, and no gaps."""
    if len(carriers) != len(avals):
        return False
    for carrier, aval in zip(carriers, avals):
        if carrier is None or aval is None:
            if carrier is not aval:
                return False
        elif (
            carrier.dtype != aval.dtype
            or carrier.array.shape != aval.shape
            or not carrier.array.flags.c_contiguous
        ):
            return False
    return True


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


def short_of(line: Any, nbytes: int) -> tuple[Short, Plan | None]:
    """The head of the short call in the line's buffer, and its plan; None where it has none of that length."""
    if nbytes < CALL.size:
        return Short(0, 0, ()), None
    _, count, number, _, call_id, token, *released = CALL.unpack_from(line.incoming)
    plan = line.plans.get(number)
    if plan is None or plan.nbytes != nbytes or line.incoming[0] != 1 or count > MAX_RELEASED:
        plan = None
    return Short(call_id, token, tuple(released[:count])), plan
