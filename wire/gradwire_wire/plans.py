"""Plans: what does not change from call to call is said once, and then a call and its answer are short.

Theory of operation. A client that makes the same call again (same remote, word, shapes, dtypes) sends it once as
`messages.Plan`, which is a Call with a number. Both ends then know the *layout* of the short frames that
follow on this line: a fixed head, an entry for each tensor that is lent, and the bytes of the others, each at
a place that is computed here from shapes and dtypes alone::

    short call    head │ entries of lent operands │ bytes of the others
    short answer  head │ entries of lent results  │ bytes of the others

The answers follow the layout of the last Done that the line has carried for this plan. So each end has numpy
views of its buffer ready: a tensor is one copy into the frame, and one out of it. A plan belongs to its line, where
one message follows the other: so both ends always mean the same by a number, and it ends with the line.

Nothing is trusted more than in a long message: length, numbers and places are checked, and what the frame's
memory holds is copied before it is looked at, since a peer may still write there (see lane.py).
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, Sequence

import numpy as np

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BY_NAME, DType, checked_dtype
from gradwire_wire.errors import MemoryExhaustedError
from gradwire_wire.exchange import Exchange

__all__ = [
    "ANSWER",
    "CALL",
    "HEAD",
    "MAX_AXES",
    "MAX_PLANS",
    "MAX_RELEASED",
    "SHORT_ANSWER",
    "SHORT_CALL",
    "Frame",
    "Layout",
    "avals_of",
    "layout_of",
]

SHORT_CALL, SHORT_ANSWER = 1, 2
"""The first byte of a short frame. A message's is 0x90 or more: msgpack's arrays."""
MAX_PLANS = 256
MAX_RELEASED = 8
MAX_AXES = 32
HEAD = 64
CALL = struct.Struct("<BBHIQQ8I")
"""kind, how many tokens are released, plan, 0, call_id, token, the released tokens."""
ANSWER = struct.Struct("<BBHIQQQ")
"""kind, 0, plan, 0, call_id, token, compute_ns."""
ENTRY = struct.Struct("<QQII")
"""segment, byte offset, loan, flags."""
ALIGNMENT = 64
_NUMPY = {dtype: np.dtype(dtype.carrier) for dtype in BY_NAME.values()}


class Place(NamedTuple):
    """Where a frame has one tensor: its bytes, or (``nbytes`` 0 and ``is_lent``) its entry."""

    offset: int
    aval: Aval
    is_lent: bool


class Layout(NamedTuple):
    """A short frame's length, and the place of each tensor; None for one that is left out."""

    nbytes: int
    places: tuple[Place | None, ...]


def layout_of(avals: Sequence[Aval | None] | None, inlined: int, room: int) -> Layout | None:
    """Lent are tensors of more than ``inlined`` bytes, and those for which no room is left in ``room`` bytes.

    None where there is no layout: of tensors that are not plain (`avals_of`), or where not even the entries have room.
    """
    if avals is None:
        return None
    sizes = [0 if a is None else _nbytes(a) for a in avals]
    lent = [n > inlined for n in sizes]
    end = HEAD + ENTRY.size * len(avals)  # room for all entries, whoever is lent in the end
    for i, n in enumerate(sizes):
        if not lent[i]:
            start = _aligned(end)
            lent[i] = start + n > room and n > 0
            end = end if lent[i] else start + n
    return _placed(avals, sizes, lent, room)


def _placed(avals: Sequence[Aval | None], sizes: list[int], lent: list[bool], room: int) -> Layout | None:
    entry, end = HEAD, HEAD + ENTRY.size * sum(lent)
    places: list[Place | None] = []
    for aval, nbytes, is_lent in zip(avals, sizes, lent):
        if aval is None:
            places.append(None)
        elif is_lent:
            places.append(Place(entry, aval, True))
            entry += ENTRY.size
        else:
            places.append(Place(_aligned(end), aval, False))
            end = _aligned(end) + nbytes
    return Layout(end, tuple(places)) if end <= room else None


def _nbytes(aval: Aval) -> int:
    nbytes = aval.dtype.itemsize
    for n in aval.shape:
        nbytes *= n
    return nbytes


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def avals_of(headers: Sequence[Any]) -> list[Aval | None] | None:
    """Shapes and dtypes of a message's tensors, from headers that were checked.

    None where a tensor is not plain: not C-contiguous, or of more axes than every numpy has.
    """
    found: list[Aval | None] = []
    for header in headers:
        if header is None:
            found.append(None)
            continue
        _, _, _, shape, strides, dtype, _, _ = header
        if strides is not None or len(shape) > MAX_AXES:
            return None
        found.append(Aval(tuple(shape), dtype if type(dtype) is DType else checked_dtype(*dtype)))
    return found


class Frame:
    """A layout in one end's buffer: puts carriers into the frame, and takes them out of it.

    memory: the buffer, at least as long as the layout. Used by one thread at a time, as its line is.
    """

    __slots__ = ("_exchange", "_lent", "_memory", "_views", "avals", "nbytes")

    def __init__(self, layout: Layout, memory: Any, exchange: Exchange) -> None:
        self.nbytes, self._memory, self._exchange = layout.nbytes, memory, exchange
        self.avals = tuple(None if p is None else p.aval for p in layout.places)
        self._lent = [(i, p) for i, p in enumerate(layout.places) if p is not None and p.is_lent]
        self._views = [
            None
            if p is None or p.is_lent
            else np.ndarray(p.aval.shape, _NUMPY[p.aval.dtype], memory, p.offset)
            for p in layout.places
        ]

    def put(self, carriers: Sequence[Carrier | None]) -> list[int]:
        """Copy or lend carriers of exactly the layout's avals, C-contiguous; the loans made, for `take_back`.

        MemoryExhaustedError where a slot cannot be had, `NotShared` where a tensor cannot be lent: nothing is lent then.
        """
        for view, carrier in zip(self._views, carriers):
            if view is not None:
                view[...] = carrier.array  # type: ignore[union-attr]
        return self._lend(carriers) if self._lent else []

    def _lend(self, carriers: Sequence[Any]) -> list[int]:
        exchange, loans = self._exchange, []
        try:
            for i, place in self._lent:
                number, offset, loan, flags = exchange.lend_shared(carriers[i])
                loans.append(loan)
                ENTRY.pack_into(self._memory, place.offset, number, offset, loan, flags)
        except BaseException:
            exchange.take_back_loans(loans)
            raise
        return loans

    @property
    def dtypes(self) -> list[DType] | None:
        """Of the tensors, where all of them lie in the frame; then `take_arrays` will do."""
        if self._lent or None in self.avals:
            return None
        return [aval.dtype for aval in self.avals]  # type: ignore[union-attr]

    def take_arrays(self) -> list[np.ndarray]:
        """Copies of the tensors, in C order."""
        return [view.copy() for view in self._views]  # type: ignore[union-attr]

    def take(self) -> list[Carrier | None]:
        """The tensors as copies and leased views. ProtocolError where an entry is wrong: all are returned then."""
        carriers = [
            None if view is None else Carrier(view.copy(), aval.dtype, True)  # type: ignore[union-attr]
            for view, aval in zip(self._views, self.avals)
        ]
        if self._lent:
            self._borrow(carriers)
        return carriers

    def _borrow(self, carriers: list[Carrier | None]) -> None:
        entries = [ENTRY.unpack_from(self._memory, place.offset) for _, place in self._lent]
        for at, (i, place) in enumerate(self._lent):
            try:
                carriers[i] = self._exchange.borrow_shared(place.aval, *entries[at])
            except BaseException as error:
                self._exchange.decline_loans([loan for _, _, loan, _ in entries[at + 1 :]])
                if isinstance(error, (KeyboardInterrupt, MemoryExhaustedError)):
                    self._exchange.decline_unleased(entries[at][0], entries[at][2])
                raise

    def decline(self) -> None:
        """Return what the frame lends without looking at it."""
        self._exchange.decline_loans([ENTRY.unpack_from(self._memory, p.offset)[2] for _, p in self._lent])
