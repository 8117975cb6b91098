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
"""

from __future__ import annotations

import gc
import math
import os
import threading
import time
import weakref
from collections import deque
from typing import Any, Sequence, Union

import numpy as np

from gradwire_wire import messages
from gradwire_wire.arena import Arena, Slot
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BY_NAME, DType
from gradwire_wire.errors import (
    ClosedError,
    GradwireError,
    MemoryExhaustedError,
    ProtocolError,
    UnsupportedTensorError,
    UsageError,
)
from gradwire_wire.headers import (
    IS_COPIED,
    Header,
    check_place,
    checked_header,
    inline,
    packed,
    small_layout,
)
from gradwire_wire.leases import Loans
from gradwire_wire.segments import (
    ForeignSegment,
    Lease,
    Ledger,
    OwnSegment,
    SharingUnavailableError,
    holder_of,
    take_memory,
)
from gradwire_wire.tether import Tether, TetherClosedError

__all__ = ["Exchange", "Memory", "NotShared", "SlotHolder", "close_all", "is_not_of_header"]

INLINE_BYTES = 4096
"""Tensors up to a page travel inside the message: copying them twice is cheaper than a lease."""
COLLECT_S = 0.25
"""How long peers may take to collect their garbage when memory is short."""


class NotShared(Exception):
    """A tensor cannot be lent to this peer; it may travel in a message."""


class Memory:
    """The shared memory that this process owns: one arena, one lock, one limit."""

    def __init__(self, limit: int | None = None, folder: str | None = None) -> None:
        """limit: bytes. ``folder``: of mode 0700, for files where there is no memfd."""
        self.lock = threading.RLock()
        self.limit, self.folder = limit, folder
        self.arena = Arena(self._make_segment, self._take_pages)
        self.is_shared = True
        self._peers: list[Exchange] = []
        self._leaving: deque[Exchange] = deque()
        self._orphans: list[Lease] = []  # what we had lent on to peers that died: it may be looked at still
        self._held: weakref.WeakValueDictionary[int, SlotHolder] = weakref.WeakValueDictionary()

    def _make_segment(self, number: int, nbytes: int, used: int) -> OwnSegment:
        return OwnSegment(number, nbytes, limit=self.limit, used=used, folder=self.folder)

    def _take_pages(self, slot: Slot, used: int) -> None:
        take_memory(slot.segment.fd, slot.offset, slot.nbytes, self.limit, used)

    def join(self, peer: Exchange) -> None:
        """From now on this peer may hold slots."""
        with self.lock:
            self._peers.append(peer)

    def check_free(self) -> None:
        """Raises UsageError in whoever has interrupted this thread while it changes what the lock guards."""
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise UsageError(
                "a handler of signals, or a finalizer, makes a call while this very thread is about to lend or take memory for "
                "another one. Have it set a flag, or make its call in a thread of its own"
            )

    def leave(self, peer: Exchange) -> None:
        """The peer is gone: its loans end. What it had not returned others may look at still, and is retired."""
        self._leaving.append(peer)
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            with self.lock:
                self._see_off()

    def _see_off(self) -> None:
        """Take leave of peers that are gone (lock held)."""
        while self._leaving:
            peer = self._leaving.popleft()
            if peer in self._peers:
                self._peers.remove(peer)
            peer.settle()
            self._orphans = [lease for lease in self._orphans if lease.ledger is not peer._ours]
            for thing in peer.loans.end():
                if type(thing) is Slot:
                    self.arena.retire(thing)
                elif type(thing) is Lease:
                    self._orphans.append(thing)
            peer.forget()

    def take(self, nbytes: int) -> Slot:
        """A slot; takes the lock. Where memory is short, what garbage holds here and at the peers is freed first.

        Raises MemoryExhaustedError, or SharingUnavailableError where no memory can be shared at all.
        """
        self.check_free()
        try:
            return self._take(nbytes)
        except MemoryExhaustedError:
            pass
        gc.collect()
        with self.lock:
            asked = [peer for peer in self._peers if peer.ask_to_collect()]
        deadline = time.monotonic() + (COLLECT_S if asked else 0)
        while True:
            try:
                return self._take(nbytes, is_short=True)
            except MemoryExhaustedError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.005)

    def _take(self, nbytes: int, is_short: bool = False) -> Slot:
        """Looks for returned loans of every peer before it asks the system for more."""
        with self.lock:
            self._see_off()
            for peer in self._peers:
                peer.settle()
            if is_short:
                self.arena.give_back_idle()
            return self.arena.take(nbytes)

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        """A numpy array that lies in shared memory already; its slot is free when its last view is gone.

        An ordinary array where memory cannot be shared. Like all shared memory it stays shared after ``fork``.
        """
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise UnsupportedTensorError(f"Python objects (dtype {dtype}) cannot lie in shared memory")
        shape = tuple(shape) if np.iterable(shape) else (shape,)
        nbytes = math.prod(shape) * dtype.itemsize
        if not self.is_shared or nbytes <= 0:
            return np.empty(shape, dtype)
        try:
            slot = self.take(nbytes)
        except SharingUnavailableError:
            self.is_shared = False
            return np.empty(shape, dtype)
        holder = SlotHolder(self.arena, slot)
        array = slot.segment.held_array(shape, dtype, slot.offset, holder)
        self._held[array.__array_interface__["data"][0]] = holder
        return array

    def held_at(self, array: np.ndarray) -> SlotHolder | None:
        """What keeps the memory at an array's beginning, where that is the beginning of an array of `empty`.

        A framework that took such an array shows its memory as its own.
        """
        if not self._held:
            return None
        holder = self._held.get(array.__array_interface__["data"][0])
        fits = holder is not None and array.nbytes <= holder.slot.nbytes and array.flags.c_contiguous
        return holder if fits else None

    def close(self) -> None:
        """Nothing is lent any more. Memory goes with its last view, here and at the peers."""
        with self.lock:
            self.is_shared = False
            self.arena.close()
            orphans, self._orphans = self._orphans, []
        del orphans


class SlotHolder:
    """Held by arrays of `Memory.empty`: the slot is theirs until the last alias is gone."""

    __slots__ = ("__weakref__", "arena", "slot")

    def __init__(self, arena: Arena, slot: Slot) -> None:
        self.arena, self.slot = arena, slot

    def __del__(self) -> None:
        self.arena.give_soon(self.slot)


_NUMPY = {dtype: np.dtype(dtype.carrier) for dtype in BY_NAME.values()}
Holder = Union[SlotHolder, Lease]


class Exchange:
    """What this process has lent to one peer and borrowed from it.

    marks: the ledger the peer marks (its returns). ``ours``: the ledger this process marks. Without a tether (and
    with ledgers that are not shared) all tensors travel in messages.
    """

    def __init__(self, memory: Memory, tether: Tether | None, marks: Ledger, ours: Ledger) -> None:
        self._memory, self._marks, self._ours = memory, marks, ours
        self._tether: Tether | None = tether
        self._can_lend = marks.is_shared
        self.loans = Loans(marks)
        self._announced: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._passed: set[Holder] = set()  # lent by reference
        self._theirs: dict[int, ForeignSegment] = {}
        self._lanes: list[list[int]] | None = None
        self.copied_bytes = 0
        memory.join(self)

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        """See `Memory.empty`."""
        return self._memory.empty(shape, dtype)

    # -- lending ---------------------------------------------------------------------------------

    def lend(self, carriers: Sequence[Carrier | None], frames: list[Any]) -> list[Any]:
        """Headers for a message; bytes that cannot be shared are appended to ``frames``.

        MemoryExhaustedError where a slot cannot be had: nothing is lent then.
        """
        self._memory.check_free()
        if len(self.loans):
            with self._memory.lock:
                self.settle()
        headers: list[Any] = []
        try:
            for carrier in carriers:
                if carrier is None:
                    headers.append(None)
                elif carrier.array.nbytes <= INLINE_BYTES:
                    array = carrier.array
                    if array.flags.c_contiguous:
                        headers.append(inline(array.tobytes(), array.shape, carrier.dtype))
                    else:
                        data, strides = _dense_bytes(array)
                        headers.append(inline(data, array.shape, carrier.dtype, strides))
                else:
                    headers.append(packed(self._header(carrier, frames)))
        except BaseException:
            self.take_back(headers)
            raise
        return headers

    def _header(self, carrier: Carrier, frames: list[Any]) -> Header:
        array, dtype, _ = carrier
        nbytes = array.nbytes
        if self._memory.is_shared and self._can_lend:
            header = self._by_reference(carrier) or self._copied(carrier)
            if header is not None:
                return header
        if nbytes > messages.MAX_FRAME:
            raise MemoryExhaustedError(
                f"{nbytes} bytes cannot travel in a message ({messages.MAX_FRAME} free), and memory cannot be shared "
                "with this peer. Send smaller pieces"
            )
        data, strides = _dense_bytes(array)
        frames.append(data)
        self.copied_bytes += nbytes
        return Header((len(frames) - 1,), 0, 0, array.shape, strides, dtype)

    def lend_shared(self, carrier: Carrier) -> tuple[int, int, int, int]:
        """Lend a C-contiguous tensor: segment, byte offset, loan and flags. `NotShared`, or as `lend` raises."""
        self._memory.check_free()
        if len(self.loans):
            with self._memory.lock:
                self.settle()
        header = None
        if self._memory.is_shared and self._can_lend:
            header = self._by_reference(carrier) or self._copied(carrier)
        if header is None:
            raise NotShared
        return header.place, header.byte_offset, header.loan, header.flags  # type: ignore[return-value]

    def _copied(self, carrier: Carrier) -> Header | None:
        """A header for a copy in a slot of ours; None where it must travel in the message."""
        array, dtype, _ = carrier
        try:
            slot = self._memory.take(array.nbytes)
        except SharingUnavailableError:
            self._memory.is_shared = False
            return None
        number = loan = 0
        strides = dense_strides(array)
        steps = None if strides is None else tuple(s * array.itemsize for s in strides)
        try:
            np.copyto(slot.segment.array(array.shape, array.dtype, slot.offset, steps), array)
            with self._memory.lock:
                number = self._announce(slot.segment)
                loan = self.loans.lend(slot) if number else 0
        finally:
            if not loan:
                self._memory.arena.give_soon(slot)
        self.copied_bytes += array.nbytes
        return Header(number, slot.offset, loan, array.shape, strides, dtype) if loan else None

    def _by_reference(self, carrier: Carrier) -> Header | None:
        """A header for memory that can be mapped by the peer already, if this is such memory."""
        array, dtype, _ = carrier
        holder: Any = holder_of(array) or self._memory.held_at(array)
        if holder is None:
            return None
        if type(holder) is SlotHolder:
            segment, flags = holder.slot.segment, 0
        else:  # a lease on another process's slot: passed on, unless it was or may yet be written
            segment, flags = holder.segment, IS_COPIED
            if not holder.owned or holder.is_changed():
                return None
        offset = array.__array_interface__["data"][0] - segment.address
        if any(s < 0 or s % array.itemsize for s in array.strides) or offset % array.itemsize:
            return None
        with self._memory.lock:
            number = 0 if holder in self._passed else self._announce(segment)
            loan = self.loans.lend(holder) if number else 0
            if not loan:
                return None
            self._passed.add(holder)
        strides = None if array.flags.c_contiguous else tuple(s // array.itemsize for s in array.strides)
        return Header(number, offset, loan, array.shape, strides, dtype, flags=flags)

    def _announce(self, segment: Any) -> int:
        """The number the peer knows a segment by; its descriptor is sent along the first time (lock held).

        0 where that cannot be done at once: the peer does not read its tether, or is gone.
        """
        number = self._announced.get(segment, 0)
        if not number and segment.fd >= 0 and self._tether is not None:
            # (a new number each time: an interrupt after it was sent and before it was noted harms nobody)
            number = self._memory.arena.next_number()
            if not self._tether.send_nowait(messages.Segment(number, segment.nbytes), [segment.fd]):
                return 0
            self._announced[segment] = number
        return number

    def settle(self) -> None:
        """Take note of what the peer has returned (lock held)."""
        self.release(self.loans.settle())

    def release(self, things: Sequence[Any]) -> None:
        """These are not lent to this peer any more (lock held)."""
        for thing in things:
            if type(thing) is Slot:
                self._memory.arena.give(thing)
            else:
                self._passed.discard(thing)

    def take_back(self, headers: Sequence[Any]) -> None:
        """These headers were never sent: their loans end as if the peer had returned them."""
        for header in headers:
            if header is not None and header[2]:
                self.loans.mark_returned(header[2])

    def take_back_loans(self, loans: Sequence[int]) -> None:
        """These loans were never sent."""
        for loan in loans:
            self.loans.mark_returned(loan)

    def ask_to_collect(self) -> bool:
        """Where the peer has loans: have it collect its garbage, for that may hold them (lock held)."""
        tether = self._tether
        return len(self.loans) > 0 and tether is not None and tether.send_nowait(messages.Collect())

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
            raise ClosedError("the connection was closed while its reply was read")
        if not 0 < loan < Ledger.LOANS:
            raise ProtocolError(f"a header in a segment, with loan {loan}")
        if not segment.is_mapped:
            self._map(segment)
        lease = Lease(segment, offset, nbytes, loan, self._ours, bool(flags & IS_COPIED))
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
                    self._ours.mark(loan)

    def decline_loans(self, loans: Sequence[int]) -> None:
        """`decline` for loans alone."""
        for loan in loans:
            if 0 < loan < Ledger.LOANS:
                self._ours.mark(loan)

    def _nbytes_of(self, number: int) -> int:
        segment = self._theirs.get(number)
        if segment is None:
            try:
                self.receive_segments()
            except TetherClosedError:  # what it had said before it ended has been read all the same
                pass
            segment = self._theirs.get(number)
            if segment is None and self._tether is None:
                raise ClosedError("the connection was closed while its reply was read")
            if segment is None:
                raise ProtocolError(f"segment {number} was never announced")
        return segment.nbytes

    @property
    def can_share(self) -> bool:
        """Whether memory is shared in both directions."""
        return self._can_lend and self._ours.is_shared and self._memory.is_shared

    @property
    def carried_by(self) -> str:
        """How tensors cross: "shared memory", or "files" or "messages" if that is all that one of the two can."""
        both = {"shared memory"} if self._memory.is_shared else {"messages"}
        both |= {self._marks.carrier, self._ours.carrier}
        return next(way for way in ("messages", "files", "shared memory") if way in both)

    @property
    def why_not_shared(self) -> str:
        """The reason, as far as this process knows it."""
        return self._ours.why or "the other process has no other memory to share"

    def pass_lane(self, *descriptors: int) -> bool:
        """Client: give the worker its end of a lane, and the page if it has one. False where that cannot be done at once."""
        with self._memory.lock:
            return self._tether is not None and self._tether.send_nowait(messages.NewLane(), descriptors)

    def expect_lanes(self) -> None:
        """Worker: the client may pass lanes from now on."""
        self._lanes = []

    @property
    def has_lanes(self) -> bool:
        """Worker: whether `take_lanes` would give any."""
        return bool(self._lanes)

    def take_lanes(self) -> list[list[int]]:
        """Worker: the descriptors of lanes that have come since the last look; the caller owns them."""
        taken = self._lanes or []
        if taken:
            self._lanes = []
        return taken

    def receive_segments(self) -> None:
        """Read all that lies in the tether, and do what it asks; takes the lock. TetherClosedError at its end."""
        is_short = False
        with self._memory.lock:
            while self._tether is not None:
                received = self._tether.receive(0)
                if received is None:
                    break
                message, descriptors = received
                if type(message) is messages.Collect and not descriptors:
                    is_short = True
                elif (
                    type(message) is messages.Segment
                    and len(descriptors) == 1
                    and message.number not in self._theirs
                ):
                    self._theirs[message.number] = ForeignSegment(descriptors[0], message.nbytes)
                elif (
                    type(message) is messages.NewLane
                    and len(descriptors) in (1, 2)
                    and self._lanes is not None
                ):
                    self._lanes.append(descriptors)
                else:
                    close_all(descriptors)
                    raise ProtocolError(f"unexpected on the tether: {message!r:.80}")
        if is_short:
            gc.collect()
            with self._memory.lock:
                self.settle()

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
        self._passed.clear()
        for descriptors in self.take_lanes():
            close_all(descriptors)
        for ledger in (self._marks, self._ours):  # whoever still knows this exchange holds no memory by it
            ledger.detach()


def is_not_of_header(error: BaseException) -> bool:
    """Whether a borrow failed though the header is right: for want of memory, or by a handler of signals."""
    return isinstance(error, MemoryExhaustedError) or not isinstance(error, GradwireError)


def _steps(h: Header) -> tuple[int, ...] | None:
    """A header's strides in bytes, as numpy has them."""
    return None if h.strides is None else tuple(s * h.dtype.itemsize for s in h.strides)


def _dense_bytes(array: np.ndarray) -> tuple[bytes, tuple[int, ...] | None]:
    """The elements without gaps, with the axes in memory as the array has them; and the strides of that."""
    strides = dense_strides(array)
    if strides is None:
        return array.tobytes(), None
    data = bytearray(array.nbytes)
    steps = tuple(s * array.itemsize for s in strides)
    np.copyto(np.ndarray(array.shape, array.dtype, data, strides=steps), array)
    return bytes(data), strides


def _not_here(shape: tuple[int, ...], error: Exception) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"numpy {np.__version__} here cannot have an array of shape {shape}: {error}"
    )


def close_all(descriptors: Sequence[int]) -> None:
    """Close received descriptors that nobody wants."""
    for fd in descriptors:
        os.close(fd)


def dense_strides(array: np.ndarray) -> tuple[int, ...] | None:
    """Strides in elements of a dense copy that keeps the order of axes in memory; None for C order."""
    if array.flags.c_contiguous or any(n > 1 and s == 0 for n, s in zip(array.shape, array.strides)):
        return None
    order = sorted(range(array.ndim), key=lambda i: -abs(array.strides[i]) if array.shape[i] > 1 else 0)
    strides = [0] * array.ndim
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= array.shape[axis]
    dense = tuple(strides)
    return None if dense == _c_strides(array.shape) else dense


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    step, strides = 1, []
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
