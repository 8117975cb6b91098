"""Slots: no two live ones overlap, nothing leaks, idle memory is given back. Against fake segments, without memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gradwire_wire.arena import FIRST_CHUNK, LAST_CHUNK, PAGE, Arena, Slot, size_class
from gradwire_wire.errors import MemoryExhaustedError

MIB = 1 << 20


class FakeSegment:
    """Knows which of its pages are resident."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number, self.nbytes = number, nbytes
        self.pages = set(range(nbytes // PAGE))
        self.is_closed = False

    def give_back(self, offset: int, nbytes: int) -> None:
        pages = set(range(offset // PAGE, (offset + nbytes) // PAGE))
        assert pages <= self.pages, "pages are given back once"
        self.pages -= pages

    def close(self) -> None:
        self.is_closed = True


class FakeSystem:
    """Memory with a limit. What it counts is compared with what the arena believes."""

    def __init__(self, limit: int = 1 << 40, idle_cap: int = 256 * MIB) -> None:
        self.limit = limit
        self.segments: list[FakeSegment] = []
        self.arena = Arena(self.make, self.take_pages, idle_cap)

    def resident(self) -> int:
        return sum(len(s.pages) for s in self.segments if not s.is_closed) * PAGE

    def make(self, number: int, nbytes: int, used: int) -> FakeSegment:
        assert used == self.resident() and nbytes % PAGE == 0
        self.check(nbytes)
        segment = FakeSegment(number, nbytes)
        self.segments.append(segment)
        return segment

    def take_pages(self, slot: Slot, used: int) -> None:
        assert used == self.resident()
        self.check(slot.nbytes)
        pages = set(range(slot.offset // PAGE, (slot.offset + slot.nbytes) // PAGE))
        assert not pages & slot.segment.pages
        slot.segment.pages |= pages

    def check(self, nbytes: int) -> None:
        if self.resident() + nbytes > self.limit:
            raise MemoryExhaustedError(f"{nbytes} needed")


@given(st.integers(1, 1 << 40))
def test_size_classes(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size % PAGE == 0 and nbytes <= size <= max(PAGE, nbytes + PAGE) + nbytes // 8
    assert size_class(size) == size


def test_there_are_few_size_classes() -> None:
    sizes = {size_class(n) for n in range(1, 64 * MIB, 4000)}
    assert len(sizes) < 130


class ArenaMachine(RuleBasedStateMachine):
    """Takes and gives at random; the invariants hold after each step."""

    @initialize(limit=st.sampled_from([1 << 40, 8 * MIB, 40 * MIB]), cap=st.sampled_from([0, MIB, 256 * MIB]))
    def begin(self, limit: int, cap: int) -> None:
        self.system = FakeSystem(limit, cap)
        self.arena, self.cap = self.system.arena, cap
        self.live: list[Slot] = []
        self.lost: list[Slot] = []

    @rule(which=st.integers(0, 10**6))
    def its_borrower_dies(self, which: int) -> None:
        if self.live:
            slot = self.live.pop(which % len(self.live))
            self.arena.retire(slot)
            self.lost.append(slot)

    @invariant()
    def what_is_lost_is_never_touched_again(self) -> None:
        for slot in getattr(self, "lost", ()):
            pages = range(slot.offset // PAGE, (slot.offset + slot.nbytes) // PAGE)
            assert slot.segment.pages.issuperset(pages), "somebody who still looks would see zeros"
            assert not any(
                live.segment is slot.segment
                and live.offset < slot.offset + slot.nbytes
                and slot.offset < live.offset + live.nbytes
                for live in self.live
            )
            in_use = any(live.segment is slot.segment for live in [*self.live, *self.arena._returned])
            assert slot.segment.is_closed is not in_use, (
                "let go as soon as nobody here uses it, and not before"
            )

    @rule(nbytes=st.one_of(st.integers(1, 20_000), st.integers(1, 30 * MIB)))
    def take(self, nbytes: int) -> None:
        free_before = sum(map(len, self.arena._free.values()))
        try:
            slot = self.arena.take(nbytes)
        except MemoryExhaustedError:
            assert sum(map(len, self.arena._free.values())) >= free_before, "a slot was lost"
            needed = size_class(nbytes)
            assert self.system.resident() + needed > self.system.limit, "there was room for that"
            return
        assert slot.nbytes >= nbytes and slot.offset % PAGE == 0
        self.live.append(slot)

    @rule(which=st.integers(0, 10**6), soon=st.booleans())
    def give(self, which: int, soon: bool) -> None:
        if self.live:
            slot = self.live.pop(which % len(self.live))
            (self.arena.give_soon if soon else self.arena.give)(slot)

    @rule()
    def memory_is_short(self) -> None:
        self.arena.give_back_idle()
        assert self.arena.idle_bytes == 0

    @invariant()
    def live_slots_are_apart_and_there(self) -> None:
        if not hasattr(self, "live"):
            return
        seen: set[tuple[int, int]] = set()
        for slot in self.live:
            assert slot.offset >= 0 and slot.offset + slot.nbytes <= slot.segment.nbytes
            pages = range(slot.offset // PAGE, (slot.offset + slot.nbytes) // PAGE)
            assert slot.segment.pages.issuperset(pages), "a live slot lost its pages"
            mine = {(slot.segment.number, page) for page in pages}
            assert not mine & seen, "two live slots overlap"
            seen |= mine

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "live"):
            return
        arena = self.arena
        assert arena.resident_bytes == self.system.resident() <= self.system.limit
        free = [slot for slots in arena._free.values() for slot in slots]
        assert arena.idle_bytes == sum(slot.nbytes for slot in free if slot.is_resident) <= self.cap
        known = len(free) + len(self.live) + len(arena._returned)
        assert known == len({id(slot) for slot in [*free, *self.live, *arena._returned]}), (
            "a slot is twice there"
        )


ArenaMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestArena = ArenaMachine.TestCase


def test_a_slot_is_reused() -> None:
    system = FakeSystem()
    first = system.arena.take(100_000)
    system.arena.give(first)
    assert system.arena.take(99_000) is first and len(system.segments) == 1


def test_ten_thousand_exchanges_need_no_more_memory_than_one() -> None:
    system = FakeSystem()
    for i in range(10_000):
        system.arena.give_soon(system.arena.take(5000 + i % 7))
    assert system.arena.resident_bytes == FIRST_CHUNK


def test_a_slot_given_twice_has_one_tenant() -> None:
    system = FakeSystem()
    slot = system.arena.take(PAGE)
    system.arena.give(slot)
    system.arena.give(slot)
    assert system.arena.take(PAGE) is not system.arena.take(PAGE)


def test_idle_memory_above_the_cap_is_given_back_and_can_be_taken_again() -> None:
    system = FakeSystem(idle_cap=20 * MIB)
    slots = [system.arena.take(16 * MIB + 1) for _ in range(4)]
    for slot in slots:
        system.arena.give(slot)
    assert system.arena.idle_bytes <= 20 * MIB and system.resident() == system.arena.idle_bytes
    again = [system.arena.take(16 * MIB + 1) for _ in range(4)]
    assert {id(s) for s in again} == {id(s) for s in slots} and len(system.segments) == 4


def test_large_slots_have_a_segment_of_their_own_and_serve_half_their_size() -> None:
    system = FakeSystem()
    large = system.arena.take(LAST_CHUNK)
    assert (large.offset, large.segment.nbytes) == (0, LAST_CHUNK)
    system.arena.give(large)
    assert system.arena.take(LAST_CHUNK // 2) is large


def test_where_a_chunk_is_too_much_the_slot_alone_is_taken() -> None:
    system = FakeSystem(limit=16 * MIB)
    slots = [system.arena.take(MIB) for _ in range(15)]
    assert len(slots) == 15 and system.resident() <= 16 * MIB
    with pytest.raises(MemoryExhaustedError):
        for _ in range(3):
            system.arena.take(MIB)


def test_R50_a_request_that_failed_costs_nothing() -> None:
    system = FakeSystem(limit=16 * MIB)
    with pytest.raises(MemoryExhaustedError):
        system.arena.take(32 * MIB)
    assert system.resident() == 0
    assert system.arena.take(MIB).nbytes == MIB


def test_a_slot_whose_pages_cannot_be_had_is_not_lost() -> None:
    system = FakeSystem(limit=22 * MIB, idle_cap=0)
    slot = system.arena.take(17 * MIB)
    system.arena.give(slot)
    other = system.arena.take(4 * MIB)
    with pytest.raises(MemoryExhaustedError):
        system.arena.take(17 * MIB)
    system.arena.give(other)
    assert system.arena.take(17 * MIB) is slot


def test_an_interrupt_while_pages_are_taken_loses_nothing() -> None:
    system = FakeSystem(idle_cap=0)
    slot = system.arena.take(17 * MIB)
    system.arena.give(slot)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    system.arena._take_pages = interrupted
    with pytest.raises(KeyboardInterrupt):
        system.arena.take(17 * MIB)
    system.arena._take_pages = system.take_pages
    assert system.arena.take(17 * MIB) is slot


def test_closed_it_holds_nothing_and_takes_nothing_back() -> None:
    system = FakeSystem()
    slots = [system.arena.take(n) for n in (PAGE, 20 * MIB)]
    system.arena.close()
    assert all(s.is_closed for s in system.segments) and system.arena.segments == []
    for slot in slots:
        system.arena.give_soon(slot)
    system.arena.drain()
    assert not any(system.arena._free.values())
