"""When a worker looks for garbage: a fifth of the time at most, but at once where memory is wanted."""

from __future__ import annotations

import pytest

from gradwire_workers.garbage import GROWN, PAUSE, Garbage, resident_nbytes


class Process:
    """A look takes a second there."""

    def __init__(self) -> None:
        self.now, self.nbytes, self.looks = 100.0, 1 << 40, 0

    def collect(self) -> None:
        self.now += 1.0
        self.looks += 1


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def garbage(process: Process) -> Garbage:
    return Garbage(process.collect, lambda: process.now, lambda: process.nbytes)


def test_one_small_thing_after_the_other_is_looked_for_a_fifth_of_the_time(
    process: Process, garbage: Garbage
) -> None:
    for _ in range(1000):
        process.now += 0.1
        garbage.note()
        garbage.look()
    looks = process.looks
    assert looks == pytest.approx((process.now - 100) / (1 + PAUSE), rel=0.05)
    assert garbage.is_due or process.now < garbage._next


def test_what_was_put_off_is_done_when_its_time_has_come(process: Process, garbage: Garbage) -> None:
    assert garbage.wait_ms() is None
    garbage.note()
    assert (process.looks, garbage.wait_ms()) == (1, None)
    garbage.note()
    assert (process.looks, garbage.wait_ms()) == (1, PAUSE * 1000)
    garbage.look()
    assert process.looks == 1
    process.now += PAUSE
    assert garbage.wait_ms() == 0
    garbage.look()
    assert (process.looks, garbage.wait_ms()) == (2, None)


def test_a_process_that_has_grown_is_looked_through_at_once(process: Process, garbage: Garbage) -> None:
    garbage.note()
    process.nbytes += GROWN
    garbage.note()
    assert process.looks == 1
    process.nbytes += 1
    garbage.note()
    assert process.looks == 2
    garbage.note()
    assert process.looks == 2, "since then it has not"


def test_the_system_says_what_is_resident() -> None:
    assert resident_nbytes() > 1 << 20


def test_what_has_come_with_a_look_is_not_overlooked_when_it_goes(process: Process, garbage: Garbage) -> None:
    garbage.note()
    process.nbytes += 2 * GROWN
    garbage.note(is_module=False)  # its optimizer alone
    process.now += PAUSE
    garbage.look()
    looks = process.looks
    garbage.note()
    assert process.looks == looks + 1
