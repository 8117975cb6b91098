"""The restart policy, without a process or a clock."""

from __future__ import annotations

import pytest

from gradwire.restarts import HEALTHY_S, LONGEST_DELAY_S, MOST_EARLY_ENDS, Restarts
from gradwire_wire.errors import UsageError


@pytest.mark.parametrize(
    ("mode", "exit_code", "wanted"),
    [
        ("never", None, False),
        ("never", 0, False),
        ("on-failure", None, True),
        ("on-failure", 1, True),
        ("on-failure", 0, False),
        ("always", None, True),
        ("always", 0, True),
    ],
)
def test_which_ends_are_followed_by_a_start(mode: str, exit_code: int | None, wanted: bool) -> None:
    assert Restarts(mode).wants(exit_code) is wanted
    assert ("next call" in Restarts(mode).advice(exit_code)) is wanted


def test_waits_double_up_to_a_cap_and_begin_anew_after_a_healthy_time() -> None:
    restarts = Restarts("always")
    delays = []
    for _ in range(12):
        restarts.note_end(1.0, has_answered=True)
        delays.append(restarts.delay_s)
    assert delays[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert delays == sorted(delays) and delays[-1] == LONGEST_DELAY_S
    assert not restarts.is_given_up, "it did answer in between"
    restarts.note_end(HEALTHY_S, has_answered=True)
    assert restarts.delay_s == 0.0


def test_ends_at_the_start_are_given_up_until_somebody_starts_it_by_hand() -> None:
    restarts = Restarts("always")
    for _ in range(MOST_EARLY_ENDS - 1):
        restarts.note_end(0.0, has_answered=False)
    assert not restarts.is_given_up
    restarts.note_end(100.0, has_answered=False)
    assert restarts.is_given_up and "given up" in restarts.advice(None)
    restarts.forget()
    assert not restarts.is_given_up and restarts.delay_s == 0.0


def test_an_answered_call_ends_the_count() -> None:
    restarts = Restarts("on-failure")
    for _ in range(MOST_EARLY_ENDS - 1):
        restarts.note_end(0.0, has_answered=False)
    restarts.note_end(0.0, has_answered=True)
    restarts.note_end(0.0, has_answered=False)
    assert not restarts.is_given_up


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match="on-failure"):
        Restarts("sometimes")
