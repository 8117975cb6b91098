"""Interrupting user code: the signal that came in a finalizer of ours hits the call at the next one, and no other call."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from gradwire_wire.interruption import postpone, postponed
from gradwire_workers.interrupts import Interrupts


class _Ledger:
    def __init__(self) -> None:
        self.cancelled = 0

    def is_cancelled(self, call_id: int) -> bool:
        return call_id == self.cancelled


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = signal.getsignal(signal.SIGINT)
    yield Interrupts()
    signal.signal(signal.SIGINT, before)


def _begin(interrupts: Interrupts, call_id: int) -> Any:
    ledger: Any = _Ledger()
    interrupts.begin(ledger, call_id)
    return ledger


def test_a_signal_hits_the_call_that_was_abandoned(interrupts: Interrupts) -> None:
    ledger = _begin(interrupts, 5)
    signal.raise_signal(signal.SIGINT)
    ledger.cancelled = 5
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # while the first one is on its way
    interrupts.end()
    _begin(interrupts, 6)
    signal.raise_signal(signal.SIGINT)


def test_one_that_a_finalizer_met_is_raised_by_the_next_signal(interrupts: Interrupts) -> None:
    _begin(interrupts, 5).cancelled = 5
    with pytest.raises(KeyboardInterrupt) as met:
        signal.raise_signal(signal.SIGINT)
    postpone(met.value)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    postpone(met.value)
    interrupts.end()
    assert not postponed
    _begin(interrupts, 6)
    signal.raise_signal(signal.SIGINT)
