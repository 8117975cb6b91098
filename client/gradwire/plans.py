"""The client's side of plans (`gradwire_wire.plans`): which calls have one on which line, and the frames of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from gradwire.site import Site
from gradwire_wire import messages
from gradwire_wire.carriers import Aval, Carrier, Columns, plain_avals
from gradwire_wire.errors import ProtocolError
from gradwire_wire.exchange import Exchange
from gradwire_wire.plans import (
    ANSWER,
    CALL,
    CALL_HEAD,
    MAX_AXES,
    MAX_PLANS,
    MAX_RELEASED,
    MIN_RUN,
    SHORT_ANSWER,
    SHORT_CALL,
    Frame,
    avals_of,
    layout_of,
)
from gradwire_wire.words import Word

__all__ = ["Plan", "Seen", "Short", "Template", "add", "next_number", "short_of", "signature_of"]

MAX_SEEN = 4096
_NONE_RELEASED = (0,) * MAX_RELEASED
_pack_call, _pack_head, _unpack_answer = CALL.pack_into, CALL_HEAD.pack_into, ANSWER.unpack_from


def signature_of(carriers: Sequence[Carrier | None]) -> tuple[Any, ...] | None:
    """What a plan is about the operands; None where they cannot be planned."""
    if len(carriers) == 1 and carriers[0] is not None:
        array, dtype, _ = carriers[0]
        shape = array.shape
        return ((shape, dtype),) if array.flags.c_contiguous and len(shape) <= MAX_AXES else None
    if len(carriers) >= MIN_RUN or type(carriers) is Columns:
        columns = plain_avals(carriers)
        if columns is not None and max(map(len, columns[0])) <= MAX_AXES:
            return _Wide(columns)
    found: list[Any] = []
    for carrier in carriers:
        if carrier is None:
            found.append(None)
            continue
        array, dtype, _ = carrier
        shape = array.shape
        if not array.flags.c_contiguous or len(shape) > MAX_AXES:
            return None
        found.append((shape, dtype))
    return tuple(found)


class _Wide(tuple[Any, ...]):
    """A signature of many operands: all shapes, all dtypes. It equals no other, whose items are pairs or None."""

    __slots__ = ()


def _each(signature: Sequence[Any]) -> Sequence[Any]:
    """(shape, dtype) of each operand, or None, however the signature has them."""
    return list(zip(*signature, strict=True)) if type(signature) is _Wide else signature


class Template(NamedTuple):
    """A call without its tensors: what a message, or the message that makes a plan, is made of.

    token: of a kept forward, or rows of (token, row). chain: of `gradwire_wire.chain`.
    """

    remote: int
    site: Site
    word: Word
    keep: int
    token: Any
    token_ops: int
    chain: list[bytes]

    def message(self, call_id: int, headers: list[Any], released: list[int]) -> messages.Call:
        """The call with what differs from one to the next. released: tokens that are not named again."""
        site = self.site
        return messages.Call(
            call_id,
            self.remote,
            site.structure,
            self.word,
            self.keep,
            self.token,
            self.token_ops,
            site.training,
            site.flags,
            site.seed,
            headers,
            released,
            self.chain,
        )


class Seen:
    """Keys of calls made before: the first call of a kind may well be the last, and is not planned."""

    def __init__(self) -> None:
        self._keys: set[Any] = set()

    def note(self, key: Any) -> bool:
        """Whether it was here before; now it was."""
        if key in self._keys:
            return True
        if len(self._keys) >= MAX_SEEN:
            self._keys.clear()
        self._keys.add(key)
        return False


class Short(NamedTuple):
    """The head of a short answer."""

    call_id: int
    token: int
    compute_ns: int


_short = partial(tuple.__new__, Short)


class Plan:
    """One plan on one line. ``structure``: of the results in short answers. ``nbytes``: of a short call. ``took_ns``: what the last took in the worker (0:
    unknown).
    """

    __slots__ = (
        "_answer",
        "_call",
        "_incoming",
        "_line",
        "_outgoing",
        "nbytes",
        "number",
        "structure",
        "took_ns",
    )

    def __init__(self, number: int, line: Any, signature: Sequence[Any], exchange: Exchange) -> None:
        """ProtocolError where such a call cannot be planned."""
        avals = [None if s is None else Aval(*s) for s in _each(signature)]
        layout = layout_of(avals, line.inlined, line.room)
        if layout is None:
            raise ProtocolError(f"no plan for a call of {len(avals)} operands")
        self.number, self._line, self.structure = number, line, b""
        self._outgoing, self._incoming = line.outgoing, line.incoming
        self._call = Frame(layout, line.outgoing, exchange)
        self.nbytes, self.took_ns = layout.nbytes, 0
        self._answer: Frame | None = None

    def note_done(self, done: messages.Done, exchange: Exchange) -> None:
        """A long answer came: short ones look like it from now on."""
        layout = layout_of(avals_of(done.headers), self._line.inlined, self._line.room)
        self._answer = None if layout is None else Frame(layout, self._line.incoming, exchange)
        self.structure = done.structure

    def put(
        self,
        carriers: Sequence[Carrier | None],
        call_id: int,
        token: int,
        released: Sequence[int],
        together: int = 0,
    ) -> Sequence[int]:
        """Write a short call into the line's buffer; the loans it makes. See `Frame.put`.

        together: how many answers may come together; where no tokens are released.
        """
        loans = self._call.put(carriers)
        if not released:
            _pack_head(self._outgoing, 0, SHORT_CALL, 0, self.number, together, call_id, token)
            return loans
        tokens = (*released, *_NONE_RELEASED[len(released) :])
        _pack_call(self._outgoing, 0, SHORT_CALL, len(released), self.number, 0, call_id, token, *tokens)
        return loans

    def head(self, nbytes: int) -> Short:
        """The head of a short answer that has been received. ProtocolError where it is none of this plan."""
        answer = self._answer
        if answer is not None and nbytes == answer.nbytes:
            kind, _, number, _, call_id, token, ns = _unpack_answer(self._incoming)
            if kind == SHORT_ANSWER and number == self.number:
                return _short((call_id, token, ns))
        raise ProtocolError(f"a short answer of {nbytes} bytes that plan {self.number} does not know")

    def take(self) -> Sequence[Carrier | None]:
        """The results of a short answer. See `Frame.take`."""
        assert self._answer is not None, "head() comes first"
        return self._answer.take()

    def decline(self) -> None:
        """The results of a short answer are not wanted."""
        assert self._answer is not None, "head() comes first"
        self._answer.decline()


def short_of(line: Any, nbytes: int) -> tuple[Short, Plan]:
    """The head of a short answer, and its plan, which nobody knows but the answer. ProtocolError where there is none."""
    number = ANSWER.unpack_from(line.incoming)[2] if nbytes >= ANSWER.size else -1
    for plan in line.plans.values():
        if plan.number == number:
            return plan.head(nbytes), plan
    raise ProtocolError(f"a short answer of plan {number}, which is unknown")


def add(line: Any, key: Any, plan: Plan) -> None:
    """From now on calls of this key are short on this line. Another plan of the same number ends."""
    for other, old in line.plans.items():
        if old.number == plan.number:
            del line.plans[other]
            break
    line.plans[key] = plan


def next_number(line: Any) -> int:
    """A number for a new plan: of the oldest one where all are in use."""
    plans = line.plans
    return len(plans) if len(plans) < MAX_PLANS else next(iter(plans.values())).number
