"""Interrupting user code: the signal that came in a finalizer of ours hits the call at the next one, and no other call."""

from __future__ import annotations

import _socket as _socket_c
import mmap
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradwire_wire.interruption import postpone, postponed, raise_postponed
from gradwire_wire.process import INTERRUPT
from gradwire_wire.segments import OwnSegment
from gradwire_wire.segments.system import Mapping
from gradwire_wire.tether import OwnedSocket
from gradwire_workers.interrupts import Interrupts


class _Ledger:
    def __init__(self) -> None:
        self.cancelled = 0

    def is_cancelled(self, call_id: int) -> bool:
        return call_id == self.cancelled


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, INTERRUPT)}
    yield Interrupts()
    for number, handler in before.items():
        signal.signal(number, handler)


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


def test_the_brokers_signal_is_one_for_the_call_that_was_abandoned_alone(interrupts: Interrupts) -> None:
    ledger, heard = _begin(interrupts, 5), []
    signal.signal(signal.SIGINT, lambda *_: heard.append("by user code"))
    signal.raise_signal(INTERRUPT)
    assert heard == []
    ledger.cancelled = 5
    signal.raise_signal(INTERRUPT)
    assert heard == ["by user code"]
    signal.signal(INTERRUPT, signal.SIG_IGN)
    interrupts.end()
    _begin(interrupts, 6).cancelled = 6
    with pytest.raises(KeyboardInterrupt) as met:
        signal.raise_signal(INTERRUPT)
    postpone(met.value)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(INTERRUPT)
    interrupts.end()


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


class _Interrupted(BaseException):
    pass


def _raise(*_: Any) -> None:
    raise _Interrupted


def _socket() -> OwnedSocket:
    ours, theirs = socket.socketpair()
    theirs.close()
    return OwnedSocket(fileno=ours.detach())


@pytest.mark.parametrize(
    ("make", "method"), [(lambda: OwnSegment(1, 4096), "close"), (_socket, "close"), (_socket, "_real_close")]
)
def test_r62_what_a_handler_raises_while_a_finalizer_closes_something_is_not_lost(
    make: Callable[[], Any], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    thing = make()
    with monkeypatch.context() as patched:
        patched.setattr(type(thing), method, _raise)
        type(thing).__del__(thing)
    with pytest.raises(_Interrupted):
        raise_postponed()
    assert not postponed
    thing.close()


def test_r62_what_a_handler_raises_while_memory_is_unmapped_is_not_lost() -> None:
    mapping = Mapping(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.__del__(munmap=_raise)
    with pytest.raises(_Interrupted):
        raise_postponed()


def test_a_socket_that_was_interrupted_in_its_making_is_closed() -> None:
    half_made = OwnedSocket.__new__(OwnedSocket, socket.AF_UNIX, socket.SOCK_STREAM)
    _socket_c.socket.__init__(half_made, socket.AF_UNIX, socket.SOCK_STREAM)
    fd = half_made.fileno()
    del half_made
    with pytest.raises(OSError):
        os.fstat(fd)
