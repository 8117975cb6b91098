"""Lending: carriers become headers for a message, or places for a short one."""

from __future__ import annotations

from typing import Any, Sequence, Union

import numpy as np

from gradwire_wire import messages
from gradwire_wire.arena import Slot
from gradwire_wire.carriers import Carrier
from gradwire_wire.errors import MemoryExhaustedError
from gradwire_wire.exchange.dense import dense_bytes, dense_strides
from gradwire_wire.exchange.memory import Memory, SlotHolder
from gradwire_wire.exchange.tethered import Tethered
from gradwire_wire.headers import IS_COPIED, Header, inline, packed
from gradwire_wire.leases import Loans
from gradwire_wire.segments import Lease, Ledger, SharingUnavailableError, holder_of
from gradwire_wire.tether import Tether

__all__ = ["INLINE_BYTES", "Lender", "NotShared"]

INLINE_BYTES = 4096
"""Tensors up to a page travel inside the message: copying them twice is cheaper than a lease."""
Holder = Union[SlotHolder, Lease]


class NotShared(Exception):
    """A tensor cannot be lent to this peer; it may travel in a message."""


class Lender(Tethered):
    """What this process has lent to one peer. ``marks``: the ledger the peer marks."""

    def __init__(self, memory: Memory, tether: Tether | None, marks: Ledger) -> None:
        super().__init__(memory, tether)
        self._marks, self._can_lend = marks, marks.is_shared
        self.loans = Loans(marks)
        self._passed: set[Holder] = set()  # lent by reference
        self.copied_bytes = 0

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
                        data, strides = dense_bytes(array)
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
        data, strides = dense_bytes(array)
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
