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

from gradwire_wire.carriers import Aval, Carrier, Columns, arrays_of
from gradwire_wire.dtypes import BY_NAME, DType, checked_dtype
from gradwire_wire.errors import ProtocolError
from gradwire_wire.exchange import Exchange, is_not_of_header
from gradwire_wire.headers import MAX_NBYTES

__all__ = [
    "ANSWER",
    "CALL",
    "CALL_HEAD",
    "HEAD",
    "MAX_AXES",
    "MAX_PLANS",
    "MAX_RELEASED",
    "MIN_RUN",
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
"""kind, how many tokens are released, plan, how many answers may come together (0: this alone), call_id, token, the released tokens."""
CALL_HEAD = struct.Struct("<BBHIQQ")
"""The same where none is released: what is there in their place means nothing."""
ANSWER = struct.Struct("<BBHIQQQ")
"""kind, 0, plan, 0, call_id, token, compute_ns."""
ENTRY = struct.Struct("<QQII")
"""segment, byte offset, loan, flags."""
ALIGNMENT = 64
MIN_RUN, MAX_IN_RUN = 16, 4096
"""So many tensors in a row that are alike, each of at most so many bytes, are copied out of a frame at once."""
_NUMPY = {dtype: np.dtype(dtype.carrier) for dtype in BY_NAME.values()}


_NO_LOANS: Sequence[int] = ()


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
    """Shapes and dtypes of a message's tensors. ProtocolError where there are none.

    None where a tensor is not plain: not C-contiguous, or of more axes than every numpy has.
    """
    found: list[Aval | None] = []
    for header in headers:
        if header is None:
            found.append(None)
            continue
        if type(header) not in (list, tuple) or len(header) != 8 or not _is_shape(header[3]):
            raise ProtocolError("a tensor header must be an array of 8, with a shape")
        _, _, _, shape, strides, dtype, _, _ = header
        if strides is not None or len(shape) > MAX_AXES:
            return None
        found.append(Aval(tuple(shape), dtype if type(dtype) is DType else _checked(dtype)))
    return found


def _checked(dtype: Any) -> DType:
    return checked_dtype(*dtype) if type(dtype) is list and len(dtype) == 3 else checked_dtype(dtype, 0, 0)


def _is_shape(x: Any) -> bool:
    return type(x) in (list, tuple) and all(type(n) is int and 0 <= n <= MAX_NBYTES for n in x)


def _runs_of(places: Sequence[Place | None], memory: Any) -> list[tuple[int, int, np.ndarray | None]]:
    """The tensors from start to stop in turn: as one array of those that are alike and evenly placed, or None."""
    found: list[tuple[int, int, np.ndarray | None]] = []
    at = 0
    while at < len(places):
        stop, run = _run_from(places, at, memory)
        if run is None and found and found[-1][2] is None:
            found[-1] = (found[-1][0], stop, None)
        else:
            found.append((at, stop, run))
        at = stop
    return found if any(run is not None for _, _, run in found) else []


def _run_from(places: Sequence[Place | None], start: int, memory: Any) -> tuple[int, np.ndarray | None]:
    first, stop = places[start], start + 1
    if first is None or first.is_lent or not 0 < _nbytes(first.aval) <= MAX_IN_RUN or not first.aval.shape:
        return stop, None
    step = _aligned(_nbytes(first.aval))
    while stop < len(places) and places[stop] == (first.offset + step * (stop - start), first.aval, False):
        stop += 1
    if stop - start < MIN_RUN or len(first.aval.shape) >= MAX_AXES:
        return stop, None
    one = np.ndarray(first.aval.shape, _NUMPY[first.aval.dtype], memory, first.offset)
    shape, strides = (stop - start, *one.shape), (step, *one.strides)
    return stop, np.ndarray(shape, one.dtype, memory, first.offset, strides)


class Frame:
    """A layout in one end's buffer: puts carriers into the frame, and takes them out of it.

    columns: all shapes and all dtypes, as `carriers.plain_avals` has them; None where a tensor is left out.
    memory: the buffer, at least as long as the layout. Used by one thread at a time, as its line is.
    """

    __slots__ = (
        "_exchange",
        "_lent",
        "_lone",
        "_memory",
        "_places",
        "_runs",
        "_sizes",
        "_views",
        "avals",
        "columns",
        "nbytes",
    )

    def __init__(self, layout: Layout, memory: Any, exchange: Exchange) -> None:
        self.nbytes, self._memory, self._exchange = layout.nbytes, memoryview(memory), exchange
        self._places = layout.places
        self.avals = tuple(None if p is None else p.aval for p in layout.places)
        self.columns = None if None in self.avals or not self.avals else tuple(zip(*self.avals))
        self._lent = [(i, p) for i, p in enumerate(layout.places) if p is not None and p.is_lent]
        self._sizes = [_nbytes(p.aval) for _, p in self._lent]
        self._views = [
            None
            if p is None or p.is_lent
            else np.ndarray(p.aval.shape, _NUMPY[p.aval.dtype], memory, p.offset)
            for p in layout.places
        ]
        self._runs = _runs_of(layout.places, memory) if len(layout.places) >= MIN_RUN else []
        self._lone = self._views[0] if len(self._views) == 1 else None

    def put(self, carriers: Sequence[Carrier | None]) -> Sequence[int]:
        """Copy or lend carriers of exactly the layout's avals, C-contiguous; the loans made, for `take_back`.

        MemoryExhaustedError where a slot cannot be had, `NotShared` where a tensor cannot be lent: nothing is lent then.
        """
        if self._lone is not None:
            self._lone[...] = carriers[0][0]  # type: ignore[index]
            return _NO_LOANS
        if self._runs:
            self._put_runs(carriers)
        else:
            self._put_each(self._views, carriers)
        return self._lend(carriers) if self._lent else _NO_LOANS

    def _put_each(self, views: Sequence[np.ndarray | None], carriers: Sequence[Carrier | None]) -> None:
        if type(carriers) is Columns:
            for view, array in zip(views, carriers.arrays):
                if view is not None:
                    view[...] = array
            return
        for view, carrier in zip(views, carriers):
            if view is not None:
                view[...] = carrier.array  # type: ignore[union-attr]

    def _put_runs(self, carriers: Sequence[Any]) -> None:
        for start, stop, run in self._runs:
            if run is None:
                self._put_each(self._views[start:stop], carriers[start:stop])
                continue
            padding = bytes(run.strides[0] - run[0].nbytes)
            at = self._places[start].offset  # type: ignore[union-attr]
            joined = padding.join(arrays_of(carriers[start:stop]))  # type: ignore[arg-type]
            self._memory[at : at + run.strides[0] * (stop - start) - len(padding)] = joined

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
    def dtypes(self) -> list[DType | None] | None:
        """Of the tensors (None: one that is left out), where all of them lie in the frame; then `take_arrays` will do."""
        return None if self._lent else [None if aval is None else aval.dtype for aval in self.avals]

    def take_arrays(self) -> list[np.ndarray | None]:
        """Copies of the tensors, in C order; None for one that is left out."""
        return self._copies() if self._lone is None else [self._lone.copy()]

    def _copies(self) -> list[Any]:
        """A private copy of each tensor that lies in the frame, None for the others. Those of a run share one memory."""
        if not self._runs:
            return [None if view is None else view.copy() for view in self._views]
        copies: list[Any] = []
        for start, stop, run in self._runs:
            if run is not None:
                copies.extend(run.copy())
            else:
                copies.extend([None if v is None else v.copy() for v in self._views[start:stop]])
        return copies

    def take(self) -> Sequence[Carrier | None]:
        """The tensors as copies and leased views. ProtocolError where an entry is wrong: all are returned then."""
        if self._lone is not None:
            return Columns([self._lone.copy()], self.columns[1])  # type: ignore[index]
        copies = self._copies()
        if self.columns is not None and not self._lent:
            return Columns(copies, self.columns[1])
        carriers = [
            None if copy is None else Carrier(copy, aval.dtype, True)  # type: ignore[union-attr]
            for copy, aval in zip(copies, self.avals)
        ]
        if self._lent:
            self._borrow(carriers)
        return carriers

    def _borrow(self, carriers: list[Carrier | None]) -> None:
        entries = [ENTRY.unpack_from(self._memory, place.offset) for _, place in self._lent]
        for at, (i, place) in enumerate(self._lent):
            try:
                carriers[i] = self._exchange.borrow_shared(place.aval, self._sizes[at], *entries[at])
            except BaseException as error:
                self._exchange.decline_loans([loan for _, _, loan, _ in entries[at + 1 :]])
                if is_not_of_header(error):
                    self._exchange.decline_unleased(entries[at][0], entries[at][2])
                raise

    def decline(self) -> None:
        """Return what the frame lends without looking at it."""
        self._exchange.decline_loans([ENTRY.unpack_from(self._memory, p.offset)[2] for _, p in self._lent])
