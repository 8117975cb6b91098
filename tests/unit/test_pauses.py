"""Pauses of the reader of answers: where somebody submits faster than is answered, and nowhere else."""

from __future__ import annotations

from gradwire.pauses import MANY, REST, SHORT_REST, Pauses


def test_a_call_at_a_time_never_pauses() -> None:
    pauses = Pauses()
    assert not any(pauses.is_next(1, 0) for _ in range(10 * REST))


def test_few_at_once_pause_once_in_a_while() -> None:
    pauses, count = Pauses(), 0
    for _ in range(10 * REST):
        if pauses.is_next(1, MANY - 1):
            count += 1
            pauses.took(MANY - 1)
    assert count == 10


def test_many_at_once_go_on_pausing_until_they_are_few() -> None:
    pauses = Pauses()
    assert not any(pauses.is_next(1, 2) for _ in range(REST - 1)) and pauses.is_next(1, 2)
    pauses.took(MANY)
    for _ in range(5):
        assert pauses.is_next(32, 100)
        pauses.took(100)
    assert not pauses.is_next(32, 0), "nobody waits in vain for what nobody has submitted"
    assert pauses.is_next(1, 3)
    for rest in (SHORT_REST, REST):
        pauses.took(3)
        assert not any(pauses.is_next(1, 3) for _ in range(rest - 1)) and pauses.is_next(1, 3)
