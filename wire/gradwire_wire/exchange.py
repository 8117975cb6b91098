"""Tensors between this process and one peer: carriers become headers, headers become leased views.

    lend    carrier ─► small: bytes in the header
                       in an own slot or another worker's memory already: by reference, no copy
                       else: one copy into a slot of this process's arena
    borrow  header  ─► bytes in the message: a copy;  in a segment: a leased view, no copy

A lock guards the arena, the loans and the tether. Finalizers never take it: they mark a ledger or
append to a deque (see segments.py). Nothing here is specific to client or worker.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Sequence

import numpy as np

from gradwire_wire import messages
from gradwire_wire.arena import Arena, Slot
from gradwire_wire.carriers import Carrier
from gradwire_wire.errors import ProtocolError
from gradwire_wire.headers import IS_COPIED, Header, checked_header, packed
from gradwire_wire.leases import Loans
from gradwire_wire.segments import (
    ForeignSegment,
    Ledger,
    OwnSegment,
    SharingUnavailableError,
    holder_of,
    take_memory,
)
from gradwire_wire.tether import Tether

__all__ = ["Exchange", "Memory", "SlotHolder"]

INLINE_BYTES = 4096
"""Tensors up to a page travel inside the message: copying them twice is cheaper than a lease."""


class Memory:
    """The shared memory that this process owns: one arena, one lock, one limit."""

    def __init__(self, limit: int | None = None) -> None:
        self.lock = threading.Lock()
        self.limit = limit
        self.arena = Arena(self._make_segment, self._take_pages)
        self.is_shared = True
        self._peers: list[Exchange] = []

    def _make_segment(self, number: int, nbytes: int, used: int) -> OwnSegment:
        return OwnSegment(number, nbytes, limit=self.limit, used=used)

    def _take_pages(self, slot: Slot, used: int) -> None:
        take_memory(slot.segment.fd, slot.offset, slot.nbytes, self.limit, used)

    def join(self, peer: Exchange) -> None:
        """From now on this peer may hold slots."""
        with self.lock:
            self._peers.append(peer)

    def leave(self, peer: Exchange) -> None:
        """The peer is gone: its loans end."""
        with self.lock:
            if peer in self._peers:
                self._peers.remove(peer)
            for thing in peer.loans.end():
                self.release(thing)

    def take(self, nbytes: int) -> Slot:
        """A slot (lock held). Looks for returned loans of every peer before it asks the system for more."""
        for peer in self._peers:
            peer.settle()
        return self.arena.take(nbytes)

    def release(self, thing: Any) -> None:
        """One loan less (lock held): of a slot, or of memory that was passed on."""
        if type(thing) is Slot:
            self.arena.give(thing)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A numpy array that lies in shared memory already; its slot is free when its last view is gone."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        with self.lock:
            slot = self.take(max(nbytes, 1))
        return slot.segment.held_array(shape, dtype, slot.offset, SlotHolder(self.arena, slot))


class SlotHolder:
    """Held by arrays of `Memory.empty`: the slot is theirs until the last alias is gone."""

    __slots__ = ("arena", "slot")

    def __init__(self, arena: Arena, slot: Slot) -> None:
        self.arena, self.slot = arena, slot

    def __del__(self) -> None:
        self.arena.give_soon(self.slot)


class Exchange:
    """What this process has lent to one peer and borrowed from it.

    marks: the ledger the peer marks (its returns). ``ours``: the ledger this process marks.
    """

    def __init__(self, memory: Memory, tether: Tether, marks: Ledger, ours: Ledger) -> None:
        self._memory, self._tether, self._ours = memory, tether, ours
        self.loans = Loans(marks)
        self._announced: dict[Any, int] = {}  # segment (own or foreign) -> the number the peer knows it by
        self._theirs: dict[int, ForeignSegment] = {}
        self.copied_bytes = 0
        memory.join(self)

    # -- lending ---------------------------------------------------------------------------------

    def lend(self, carriers: Sequence[Carrier | None], frames: list[Any]) -> list[Any]:
        """Headers for a message; bytes that cannot be shared are appended to ``frames``.

        MemoryExhaustedError where a slot cannot be had: nothing is lent then.
        """
        headers: list[Any] = []
        try:
            for carrier in carriers:
                headers.append(None if carrier is None else packed(self._header(carrier, frames)))
        except BaseException:
            self.take_back(headers)
            raise
        return headers

    def _header(self, carrier: Carrier, frames: list[Any]) -> Header:
        array, dtype, _ = carrier
        if array.nbytes <= INLINE_BYTES:
            return Header(array.tobytes(), 0, 0, array.shape, None, dtype)
        if self._memory.is_shared:
            header = self._by_reference(carrier) or self._copied(carrier)
            if header is not None:
                return header
        frames.append(array.tobytes())
        self.copied_bytes += array.nbytes
        return Header((len(frames) - 1,), 0, 0, array.shape, None, dtype)

    def _copied(self, carrier: Carrier) -> Header | None:
        array, dtype, _ = carrier
        strides = dense_strides(array)
        try:
            with self._memory.lock:
                slot = self._memory.take(array.nbytes)
                loan = self.loans.lend(slot)
                if not loan:
                    self._memory.release(slot)
                    return None
                number = self._announce(slot.segment)
        except SharingUnavailableError:
            self._memory.is_shared = False
            return None
        steps = None if strides is None else tuple(s * array.itemsize for s in strides)
        np.copyto(slot.segment.array(array.shape, array.dtype, slot.offset, steps), array)
        self.copied_bytes += array.nbytes
        return Header(number, slot.offset, loan, array.shape, strides, dtype)

    def _by_reference(self, carrier: Carrier) -> Header | None:
        """A header for memory that can be mapped by the peer already, if this is such memory."""
        array, dtype, _ = carrier
        holder = holder_of(array)
        if holder is None or any(s < 0 or s % array.itemsize for s in array.strides):
            return None
        if type(holder) is SlotHolder:
            segment, flags = holder.slot.segment, 0
        else:  # a lease on another process's slot: passed on, unless it was written here
            segment, flags = holder.segment, IS_COPIED
            if segment.is_changed(holder.offset, holder.nbytes):
                return None
        offset = array.__array_interface__["data"][0] - segment.address
        with self._memory.lock:
            loan = self.loans.lend(array)
            if not loan:
                return None
            number = self._announce(segment)
        strides = None if array.flags.c_contiguous else tuple(s // array.itemsize for s in array.strides)
        return Header(number, offset, loan, array.shape, strides, dtype, flags=flags)

    def _announce(self, segment: Any) -> int:
        """The number the peer knows a segment by; its descriptor is sent along the first time (lock held)."""
        number = self._announced.get(segment)
        if number is None:
            number = segment.number if type(segment) is OwnSegment else self._memory.arena.next_number()
            self._tether.send(messages.Segment(number, segment.nbytes), [segment.fd])
            self._announced[segment] = number
        return number

    def settle(self) -> None:
        """Take note of what the peer has returned (lock held)."""
        for thing in self.loans.settle():
            self._memory.release(thing)

    def take_back(self, headers: Sequence[Any]) -> None:
        """These headers were never sent: their loans end as if the peer had returned them."""
        for header in headers:
            if header is not None and header[2]:
                self.loans.mark_returned(header[2])

    # -- borrowing -------------------------------------------------------------------------------

    def borrow(self, raw: Any, frames: Sequence[bytes]) -> Carrier:
        """A leased view of what a received header describes, or a copy if the bytes came along.

        Always writable: what is written stays in this process. ProtocolError where the header is wrong.
        """
        h = checked_header(raw, self._nbytes_of, len(frames))
        if type(h.place) is int:
            segment = self._theirs[h.place]
            nbytes = h.nbytes
            steps = None if h.strides is None else tuple(s * h.dtype.itemsize for s in h.strides)
            if nbytes == 0 or not 0 < h.loan < Ledger.ENTRIES - 8:
                raise ProtocolError(f"a header with {nbytes} bytes in a segment and loan {h.loan}")
            view = segment.view(h.shape, h.dtype.carrier, h.byte_offset, steps, h.loan, nbytes, self._ours)
            return Carrier(view, h.dtype, bool(h.flags & IS_COPIED))
        data = h.place if type(h.place) is bytes else frames[h.place[0]]
        if len(data) != h.nbytes:
            raise ProtocolError(f"{len(data)} bytes in a frame whose header describes {h.nbytes}")
        return Carrier(np.frombuffer(bytearray(data), h.dtype.carrier).reshape(h.shape), h.dtype, True)

    def decline(self, headers: Sequence[Any], frames: Sequence[bytes]) -> None:
        """Return what a message lends without looking at it: nobody waits for it any more."""
        for raw in headers:
            if raw is not None:
                self.borrow(raw, frames)

    def _nbytes_of(self, number: int) -> int:
        segment = self._theirs.get(number)
        if segment is None:
            with self._memory.lock:
                self.receive_segments()
            segment = self._theirs.get(number)
            if segment is None:
                raise ProtocolError(f"segment {number} was never announced")
        return segment.nbytes

    def receive_segments(self) -> None:
        """Read all that lies in the tether (lock held). TetherClosedError at its end."""
        while True:
            received = self._tether.receive(0)
            if received is None:
                return
            message, descriptors = received
            if (
                type(message) is not messages.Segment
                or len(descriptors) != 1
                or message.number in self._theirs
            ):
                close_all(descriptors)
                raise ProtocolError(f"unexpected on the tether: {message!r:.80}")
            self._theirs[message.number] = ForeignSegment(descriptors[0], message.nbytes)

    def end(self) -> None:
        """The peer is gone. Views of its memory stay valid; what it had borrowed is free again."""
        self._memory.leave(self)
        self._announced.clear()
        self._theirs.clear()


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
