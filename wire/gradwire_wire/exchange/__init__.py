"""Tensors between this process and one peer: carriers become headers, headers become leased views.

    lend    carrier ─► small: bytes in the header
                       in an own slot or another worker's memory already: by reference, no copy
                       else: one copy into a slot of this process's arena
    borrow  header  ─► bytes in the message: a copy;  in a segment: a leased view, no copy

A lock guards the arena, the loans and the tether; nobody waits while holding it. Our own finalizers
never take it: they mark a ledger or append to a deque (see `segments`). A handler of signals, or a finalizer of
the user's, may come while its own thread has the lock: it must neither wait for it nor find half of a step done. To
lend is refused then, and what else it may do (close a worker or the bridge) is postponed, or harmless. Nothing
here is specific to client or worker.

*Two live loans to one peer never share a page*: its private copies of a page end with the loan that made
them, and what one view wrote another must not see. So memory that is lent by reference already is copied
when it is lent again.

`memory` is what this process owns, one for all peers; with each peer it has an `Exchange`, which is one end of a tether (`tethered`:
what both tell each other), a lender (`lending`), and, here, a borrower.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BY_NAME, DType
from gradwire_wire.errors import (
    GradwireError,
    MemoryExhaustedError,
    ProtocolError,
    UnsupportedTensorError,
)
from gradwire_wire.exchange.dense import dense_strides
from gradwire_wire.exchange.lending import INLINE_BYTES, Lender, NotShared
from gradwire_wire.exchange.memory import Memory, SlotHolder
from gradwire_wire.exchange.tethered import Ended, close_all
from gradwire_wire.headers import IS_COPIED, Header, check_place, checked_header, small_layout
from gradwire_wire.segments import ForeignSegment, Lease, Ledger
from gradwire_wire.tether import Tether

__all__ = [
    "INLINE_BYTES",
    "Ended",
    "Exchange",
    "Memory",
    "NotShared",
    "SlotHolder",
    "close_all",
    "dense_strides",
    "is_not_of_header",
]

_NUMPY = {dtype: np.dtype(dtype.carrier) for dtype in BY_NAME.values()}


class Exchange(Lender):
    """What this process has lent to one peer and borrowed from it.

    marks: the ledger the peer marks (its returns). ``ours``: the ledger this process marks. Without a tether (and
    with ledgers that are not shared) all tensors travel in messages.
    """

    def __init__(self, memory: Memory, tether: Tether | None, marks: Ledger, ours: Ledger) -> None:
        super().__init__(memory, tether, marks)
        self.ours = ours
        memory.join(self)

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        """See `Memory.empty`."""
        return self._memory.empty(shape, dtype)

    # -- borrowing -------------------------------------------------------------------------------

    def borrow_all(self, headers: Sequence[Any], frames: Sequence[bytes]) -> list[Carrier | None]:
        """`borrow` for all tensors of a message: where one is refused, the others are returned."""
        carriers: list[Carrier | None] = []
        try:
            for raw in headers:
                carriers.append(None if raw is None else self.borrow(raw, frames))
        except BaseException as error:
            self.decline(headers[len(carriers) + 1 :])
            if is_not_of_header(error) and len(carriers) < len(headers):
                self._decline_unleased(headers[len(carriers)])
            raise
        return carriers

    def _decline_unleased(self, raw: Any) -> None:
        if type(raw) is list and len(raw) == 8 and type(raw[0]) is int and type(raw[2]) is int:
            self.decline_unleased(raw[0], raw[2])

    def decline_unleased(self, number: int, loan: int) -> None:
        """Ctrl-C came while this was borrowed, or it cannot be seen: a lease that was made by then ends the loan itself."""
        segment = self._theirs.get(number)
        if segment is None or loan not in segment.leases:
            self.decline_loans([loan])

    def borrow(self, raw: Any, frames: Sequence[bytes]) -> Carrier:
        """A leased view of what a received header describes, or a copy if the bytes came along.

        Always writable: what is written stays in this process. ProtocolError where the header is wrong,
        MemoryExhaustedError where this process has no room to see it.
        """
        small = small_layout(raw)
        if small is not None:
            shape, dtype = small
            try:
                return Carrier(np.ndarray(shape, _NUMPY[dtype], bytearray(raw[0])), dtype, True)
            except ValueError:
                pass  # more dimensions than this numpy has: told below
        h = checked_header(raw, self._nbytes_of, len(frames))
        place = h.place
        if type(place) is int:
            return self._leased(place, h.nbytes, h.byte_offset, h.loan, h.flags, h.shape, h.dtype, _steps(h))
        data = place if type(place) is bytes else frames[place[0]]  # type: ignore[index]
        if len(data) != h.nbytes:
            raise ProtocolError(f"{len(data)} bytes in a frame whose header describes {h.nbytes}")
        try:
            array = np.ndarray(h.shape, _NUMPY[h.dtype], bytearray(data), strides=_steps(h))
        except ValueError as error:
            raise _not_here(h.shape, error) from error
        return Carrier(array, h.dtype, True)

    def _leased(
        self,
        number: int,
        nbytes: int,
        offset: int,
        loan: int,
        flags: int,
        shape: tuple[int, ...],
        dtype: DType,
        steps: tuple[int, ...] | None = None,
    ) -> Carrier:
        segment = self._theirs.get(number)
        if segment is None:
            raise Ended
        if not 0 < loan < Ledger.LOANS:
            raise ProtocolError(f"a header in a segment, with loan {loan}")
        if not segment.is_mapped:
            self._map(segment)
        lease = Lease(segment, offset, nbytes, loan, self.ours, bool(flags & IS_COPIED))
        try:
            view = segment.view(shape, _NUMPY[dtype], steps, lease)
            return Carrier(view, dtype, lease.owned or not segment.is_sealed)
        except ValueError as error:
            raise _not_here(shape, error) from error

    def borrow_shared(
        self, aval: Aval, nbytes: int, number: int, offset: int, loan: int, flags: int
    ) -> Carrier:
        """`borrow` for a C-contiguous tensor whose shape and dtype are known: everything else is checked here."""
        check_place(aval, nbytes, number, offset, loan, flags, self._nbytes_of)
        return self._leased(number, nbytes, offset, loan, flags, *aval)

    def _map(self, segment: ForeignSegment) -> None:
        with self._memory.lock:
            if not segment.is_mapped:
                segment.map()

    def decline(self, headers: Sequence[Any]) -> None:
        """Return what a message lends without looking at it: nobody wants it any more."""
        for raw in headers:
            if type(raw) is list and len(raw) == 8 and type(raw[0]) is int:
                loan = raw[2]
                if type(loan) is int and 0 < loan < Ledger.LOANS:
                    self.ours.mark(loan)

    def decline_loans(self, loans: Sequence[int]) -> None:
        """`decline` for loans alone."""
        for loan in loans:
            if 0 < loan < Ledger.LOANS:
                self.ours.mark(loan)

    # -- what can be shared ----------------------------------------------------------------------

    @property
    def can_share(self) -> bool:
        """Whether memory is shared in both directions."""
        return self._can_lend and self.ours.is_shared and self._memory.is_shared

    @property
    def carried_by(self) -> str:
        """How tensors cross: "shared memory", or "files" or "messages" if that is all that one of the two can."""
        both = {"shared memory"} if self._memory.is_shared else {"messages"}
        both |= {self._marks.carrier, self.ours.carrier}
        return next(way for way in ("messages", "files", "shared memory") if way in both)

    @property
    def why_not_shared(self) -> str:
        """The reason, as far as this process knows it."""
        return self.ours.why or "the other process has no other memory to share"

    # -- the end ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """This process is done with a peer that may live on.

        Our end of the tether stays open until the last view of the peer's memory is gone, since its end would
        tell the peer that nobody looks there any more. What the peer has borrowed stays lent until `end`.
        """
        with self._memory.lock:
            for segment in self._theirs.values():
                segment.until_unused = self._tether
            self._theirs.clear()
            self._tether = None

    def end(self) -> None:
        """The peer is gone. Views of its memory stay valid; what it had borrowed is free again."""
        self._memory.leave(self)

    def forget(self) -> None:
        """The last of `end`: nothing of what was exchanged is held here any more (lock held)."""
        self._announced.clear()
        self._theirs.clear()
        self._tether = None
        self._passed.clear()
        for descriptors in self.take_lanes():
            close_all(descriptors)
        for ledger in (self._marks, self.ours):  # whoever still knows this exchange holds no memory by it
            ledger.detach()


def is_not_of_header(error: BaseException) -> bool:
    """Whether a borrow failed though the header is right: for want of memory, or by a handler of signals."""
    return isinstance(error, MemoryExhaustedError) or not isinstance(error, GradwireError)


def _steps(h: Header) -> tuple[int, ...] | None:
    """A header's strides in bytes, as numpy has them."""
    return None if h.strides is None else tuple(s * h.dtype.itemsize for s in h.strides)


def _not_here(shape: tuple[int, ...], error: Exception) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"numpy {np.__version__} here cannot have an array of shape {shape}: {error}"
    )
