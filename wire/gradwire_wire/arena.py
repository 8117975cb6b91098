"""Slots in segments: whole pages, size classes, reused rather than made anew. Pure but for `make_segment`.

A slot is free, or has one user: what fills it and then the loan on it. Small slots are carved from
chunks; a large one has a segment of its own. What lies idle above a cap is given back to the system
page by page (the address range stays and can be taken again).

A slot that was on loan when its borrower died may be looked at still, by somebody to whom the borrower had lent it on and of
whom nobody hears any more (by this process, too, where it came back as a result). So it is never written again: its
segment is *retired*. What else is in it goes back to the system as it comes free; then the segment is let go, and its
memory is free when the last who looks is done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Callable

from gradwire_wire.errors import MemoryExhaustedError

__all__ = ["Arena", "Slot", "size_class"]

PAGE = 4096
FIRST_CHUNK = 1 << 20
LAST_CHUNK = 64 << 20
IDLE_CAP = 256 << 20


def size_class(nbytes: int) -> int:
    """Bytes of the slot that serves a request: whole pages, at most an eighth more than asked."""
    pages = max(1, -(-nbytes // PAGE))
    step = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // step) * step * PAGE


class Slot:
    """A range of an own segment. ``is_resident``: whether it has its pages."""

    __slots__ = ("is_resident", "is_used", "nbytes", "offset", "segment")

    def __init__(self, segment: Any, offset: int, nbytes: int) -> None:
        self.segment, self.offset, self.nbytes = segment, offset, nbytes
        self.is_used, self.is_resident = True, True


class Arena:
    """The shared memory of one process. Not thread-safe: callers hold its ``lock``-like owner's lock.

    make_segment(number, nbytes, used): a new own segment; may raise MemoryExhaustedError.
    take_pages(slot, used): give a slot that was given back its pages again; may raise the same.
    resident_bytes: what all of it takes; idle_bytes: the part of it that waits in free slots.
    """

    def __init__(
        self,
        make_segment: Callable[[int, int, int], Any],
        take_pages: Callable[[Slot, int], None],
        idle_cap: int = IDLE_CAP,
    ) -> None:
        self._make_segment, self._take_pages, self._idle_cap = make_segment, take_pages, idle_cap
        self._free: defaultdict[int, list[Slot]] = defaultdict(list)
        self._returned: deque[Slot] = deque()
        self._chunk: Any = None
        self._chunk_used = 0
        self._next_number = 0
        self._is_closed = False
        self.segments: list[Any] = []
        self._carved: defaultdict[Any, int] = defaultdict(int)  # slots in use, by segment
        self._retired: defaultdict[Any, int] = defaultdict(int)  # bytes that are lost with it, by segment
        self.resident_bytes = 0
        self.idle_bytes = 0

    def next_number(self) -> int:
        """A number for a segment that this process passes on (its own or another's)."""
        self._next_number += 1
        return self._next_number

    def take(self, nbytes: int) -> Slot:
        """A slot of at least ``nbytes`` for one user. MemoryExhaustedError where memory is short."""
        self.drain()
        size = size_class(nbytes)
        slot = self._find_free(size) or self._carve(size)
        if not slot.is_resident:
            try:
                self._take_pages(slot, self.resident_bytes)
            except BaseException:
                self._free[slot.nbytes].append(slot)
                raise
            slot.is_resident = True
            self.resident_bytes += slot.nbytes
        slot.is_used = True
        self._carved[slot.segment] += 1
        return slot

    def give_soon(self, slot: Slot) -> None:
        """It is free. Safe in finalizers and in any thread: takes effect at the next `take`."""
        if not self._is_closed:
            self._returned.append(slot)

    def give(self, slot: Slot) -> None:
        """It is free: its user is gone."""
        if not slot.is_used or self._is_closed:
            return
        slot.is_used = False
        self._carved[slot.segment] -= 1
        if slot.segment in self._retired:
            slot.segment.give_back(slot.offset, slot.nbytes)
            self.resident_bytes -= slot.nbytes
            self._let_go(slot.segment)
            return
        self._free[slot.nbytes].append(slot)
        self.idle_bytes += slot.nbytes
        self._give_back(self._idle_cap)

    def retire(self, slot: Slot) -> None:
        """Its borrower died: nothing of this slot is written again, nor given to anybody."""
        if not slot.is_used or self._is_closed:
            return
        slot.is_used = False
        segment = slot.segment
        if segment not in self._retired:
            self._withdraw(segment)
        self._carved[segment] -= 1
        self._retired[segment] += slot.nbytes
        self._let_go(segment)

    def _withdraw(self, segment: Any) -> None:
        """No slot of this segment is free any more, and none is carved from it."""
        for size, slots in self._free.items():
            for slot in slots:
                if slot.segment is segment and slot.is_resident:
                    segment.give_back(slot.offset, slot.nbytes)
                    self.idle_bytes -= slot.nbytes
                    self.resident_bytes -= slot.nbytes
            self._free[size] = [slot for slot in slots if slot.segment is not segment]
        if self._chunk is segment:
            self._give_back_rest()
            self._chunk = None

    def _let_go(self, segment: Any) -> None:
        """The last slot of a retired segment that was in use here has come back: what is left of it is others'."""
        if not self._carved[segment]:
            self.resident_bytes -= self._retired.pop(segment)
            del self._carved[segment]
            self.segments.remove(segment)
            segment.close()

    def give_back_idle(self) -> None:
        """Memory is short: whatever lies idle goes back to the system."""
        self.drain()
        self._give_back(0)

    def drain(self) -> None:
        """Take note of what finalizers have given."""
        while self._returned:
            self.give(self._returned.popleft())

    def close(self) -> None:
        """Let go of everything. Memory goes with its last view; slots that are given later go nowhere."""
        self._is_closed = True
        for segment in self.segments:
            segment.close()
        self.segments.clear()
        self._free.clear()
        self._returned.clear()
        self._carved.clear()
        self._retired.clear()
        self._chunk = None
        self.resident_bytes = self.idle_bytes = 0

    def _find_free(self, size: int) -> Slot | None:
        free = self._free.get(size)
        if not free and size > FIRST_CHUNK:
            wider = [s for s, slots in self._free.items() if slots and size < s <= 2 * size]
            free = self._free[min(wider)] if wider else None
        if not free:
            return None
        slot = free.pop()
        if slot.is_resident:
            self.idle_bytes -= slot.nbytes
        return slot

    def _carve(self, size: int) -> Slot:
        if size > LAST_CHUNK // 4:
            return Slot(self._new_segment(size), 0, size)
        if self._chunk is None or self._chunk_used + size > self._chunk.nbytes:
            chunk = self._new_chunk(size)
            self._give_back_rest()
            self._chunk, self._chunk_used = chunk, 0
        slot = Slot(self._chunk, self._chunk_used, size)
        self._chunk_used += size
        return slot

    def _new_chunk(self, size: int) -> Any:
        """Twice as large as the last, or where memory is too short for that, just enough."""
        last = self._chunk.nbytes if self._chunk is not None else FIRST_CHUNK // 2
        try:
            return self._new_segment(max(min(2 * last, LAST_CHUNK), size_class(2 * size)))
        except MemoryExhaustedError:
            return self._new_segment(size)

    def _new_segment(self, nbytes: int) -> Any:
        segment = self._make_segment(self.next_number(), nbytes, self.resident_bytes)
        self.segments.append(segment)
        self.resident_bytes += nbytes
        return segment

    def _give_back_rest(self) -> None:
        """The end of a chunk that was too short for the request is never carved."""
        if self._chunk is not None and self._chunk_used < self._chunk.nbytes:
            rest = self._chunk.nbytes - self._chunk_used
            self._chunk.give_back(self._chunk_used, rest)
            self.resident_bytes -= rest

    def _give_back(self, cap: int) -> None:
        if self.idle_bytes <= cap:
            return
        for size in sorted(self._free, reverse=True):
            for slot in self._free[size]:
                if slot.is_resident and self.idle_bytes > cap:
                    slot.segment.give_back(slot.offset, slot.nbytes)
                    slot.is_resident = False
                    self.idle_bytes -= slot.nbytes
                    self.resident_bytes -= slot.nbytes
