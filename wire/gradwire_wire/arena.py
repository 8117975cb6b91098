"""Slots in segments: whole pages, size classes, reused rather than made anew. Pure but for `make_segment`.

A slot is free, or has users: the process that fills it and the loans on it. Small slots are carved
from chunks; a large one has a segment of its own. What lies idle above a cap is given back to the
system page by page (the address range stays and can be taken again).
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Callable

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
    """A range of an own segment. ``users`` says how many still need it."""

    __slots__ = ("nbytes", "offset", "resident", "segment", "users")

    def __init__(self, segment: Any, offset: int, nbytes: int) -> None:
        self.segment, self.offset, self.nbytes = segment, offset, nbytes
        self.users, self.resident = 0, True


class Arena:
    """The shared memory of one process. Not thread-safe: callers hold its ``lock``-like owner's lock.

    make_segment(number, nbytes, used): a new own segment; may raise MemoryExhaustedError.
    take_pages(slot, used): give a slot that was given back its pages again; may raise the same.
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
        self.segments: list[Any] = []
        self.resident_bytes = 0
        self.idle_bytes = 0

    def next_number(self) -> int:
        """A number for a segment that this process passes on (its own or another's)."""
        self._next_number += 1
        return self._next_number

    def take(self, nbytes: int) -> Slot:
        """A slot of at least ``nbytes`` with one user. MemoryExhaustedError where memory is short."""
        self._drain()
        size = size_class(nbytes)
        slot = self._find_free(size) or self._carve(size)
        if not slot.resident:
            self._take_pages(slot, self.resident_bytes)
            slot.resident = True
            self.resident_bytes += slot.nbytes
        slot.users = 1
        return slot

    def give_soon(self, slot: Slot) -> None:
        """One user less. Safe in finalizers and in any thread: takes effect at the next `take`."""
        self._returned.append(slot)

    def give(self, slot: Slot) -> None:
        """One user less; a slot without users is free."""
        slot.users -= 1
        if slot.users > 0:
            return
        self._free[slot.nbytes].append(slot)
        self.idle_bytes += slot.nbytes
        if self.idle_bytes > self._idle_cap:
            self._give_back()

    def _drain(self) -> None:
        while self._returned:
            self.give(self._returned.popleft())

    def _find_free(self, size: int) -> Slot | None:
        free = self._free.get(size)
        if not free:
            wider = (
                [s for s, slots in self._free.items() if slots and size < s <= 2 * size]
                if size > FIRST_CHUNK
                else []
            )
            free = self._free[min(wider)] if wider else None
        if not free:
            return None
        slot = free.pop()
        if slot.resident:
            self.idle_bytes -= slot.nbytes
        return slot

    def _carve(self, size: int) -> Slot:
        if size > LAST_CHUNK // 4:
            return Slot(self._new_segment(size), 0, size)
        if self._chunk is None or self._chunk_used + size > self._chunk.nbytes:
            largest = self._chunk.nbytes if self._chunk is not None else FIRST_CHUNK // 2
            chunk = self._new_segment(max(min(2 * largest, LAST_CHUNK), size_class(2 * size)))
            self._chunk, self._chunk_used = chunk, 0
        slot = Slot(self._chunk, self._chunk_used, size)
        self._chunk_used += size
        return slot

    def _new_segment(self, nbytes: int) -> Any:
        segment = self._make_segment(self.next_number(), nbytes, self.resident_bytes)
        self.segments.append(segment)
        self.resident_bytes += nbytes
        return segment

    def _give_back(self) -> None:
        for size in sorted(self._free, reverse=True):
            for slot in self._free[size]:
                if slot.resident and self.idle_bytes > self._idle_cap:
                    slot.segment.give_back(slot.offset, slot.nbytes)
                    slot.resident = False
                    self.idle_bytes -= slot.nbytes
                    self.resident_bytes -= slot.nbytes
