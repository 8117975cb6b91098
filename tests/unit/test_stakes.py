"""What a restart takes from a module, and who has been told: every order of events."""

from __future__ import annotations

import pytest

from gradwire.stakes import Stake, Stakes


@pytest.mark.parametrize("stake", [Stake.BUFFERS, Stake.ALL])
def test_what_had_moved_is_lost_once(stake: Stake) -> None:
    stakes = Stakes()
    stakes.raise_to(stake)
    stakes.begin(discarded=False)
    assert stakes.is_lost and stakes.stake == Stake.NOTHING
    stakes.settle()
    stakes.begin(discarded=False)
    assert not stakes.is_lost


def test_what_has_not_moved_is_not_lost() -> None:
    stakes = Stakes()
    stakes.begin(discarded=False)
    assert not stakes.is_lost
    stakes.raise_to(Stake.ALL)
    stakes.raise_to(Stake.BUFFERS)
    assert stakes.stake == Stake.ALL


def test_who_knows_is_not_told() -> None:
    met, discarded = Stakes(), Stakes()
    for stakes in (met, discarded):
        stakes.raise_to(Stake.ALL)
    met.note_death()
    met.begin(discarded=False)
    discarded.begin(discarded=True)
    assert not met.is_lost and not discarded.is_lost
    met.raise_to(Stake.ALL)
    met.begin(discarded=False)
    assert met.is_lost, "the next death is another matter"


def test_two_lives_without_a_use_between_are_told_of() -> None:
    stakes = Stakes()
    stakes.raise_to(Stake.BUFFERS)
    stakes.begin(discarded=False)
    stakes.begin(discarded=False)
    assert stakes.is_lost
