"""What a handler of signals raises where the system is asked for something is no answer of the system's.

Many write the handler of an alarm with TimeoutError, which is an OSError. Python runs it between two steps of its own, and so also
within the call that is guarded against errors of the system; here that call is a handler itself.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gradwire.lines import Lines
from gradwire_wire import machine, process, sockets
from gradwire_wire.interruption import postponed
from gradwire_wire.lane import lane_pair
from gradwire_wire.messages import Segment
from gradwire_wire.page import page_lane_pair
from gradwire_wire.segments import own, private_copies
from gradwire_wire.segments.borrowed import Lease
from gradwire_wire.tether import Tether

Patch = pytest.MonkeyPatch


class Alarm(BlockingIOError, TimeoutError):
    """By its kind and number it could be "not now"."""


def ring(*_: object, **__: object) -> Any:
    raise Alarm(11, "by the handler")


def lane(patch: Patch, act: Callable[[Any], object]) -> None:
    ours, theirs = lane_pair(20)
    with theirs:
        send_by_ring(patch, ours, act)


def page(patch: Patch) -> None:
    ours, theirs, segment = page_lane_pair(20)
    segment.close()
    with theirs:
        send_by_ring(patch, ours, lambda end: end._ring())


def told(patch: Patch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        send_by_ring(patch, Tether(ours), lambda end: end.send_nowait(Segment(1, 1)))


def send_by_ring(patch: Patch, end: Any, act: Callable[[Any], object]) -> None:
    """The handler stands in for the socket's calls."""
    real = end._socket
    patch.setattr(end, "_socket", SimpleNamespace(send=ring, sendmsg=ring, settimeout=int, close=real.close))
    try:
        act(end)
    finally:
        real.close()


def asked(patch: Patch) -> None:
    patch.setattr(machine, "open", ring, raising=False)
    machine.read_memory()


def looked(patch: Patch, name: str) -> None:
    patch.setattr(private_copies, "_pagemap", {} if name == "open" else {os.getpid(): 0})
    patch.setattr(os, name, ring)
    private_copies._read_pagemap(0, 1)


def opened(patch: Patch, module: Any, name: str, wanted: str) -> None:
    """Whoever opens a lane goes on without one if the system has none; that is decided further out."""
    patch.setattr(module, name, ring)
    lines = Lines("", b"", cast("Any", None), 20, lanes=True, pages=True)
    getattr(lines, wanted)()


def counted(patch: Patch) -> None:
    patch.setattr(os, "open", ring)
    process.check_descriptors(1)


ACTS: dict[str, Callable[[Patch], object]] = {
    "a frame is sent": lambda patch: lane(patch, lambda end: end.send_nowait([b"\x91"])),
    "a bell is rung": page,
    "a packet is sent and noted": lambda patch: lane(patch, lambda end: end.send_and_note(b"\x91", int, 1)),
    "a segment is announced": told,
    "free memory is asked for": asked,
    "pagemap is opened": lambda patch: looked(patch, "open"),
    "pagemap is read": lambda patch: looked(patch, "pread"),
    "descriptors are tried": counted,
    "a lane is opened": lambda patch: opened(patch, socket, "socketpair", "_open_lane"),
    "a page is opened": lambda patch: opened(patch, socket, "socketpair", "_open_page_lane"),
    "memory is opened": lambda patch: opened(patch, os, "ftruncate", "_open_page_lane"),
    "memory is mapped": lambda patch: opened(patch, own, "Mapping", "_open_page_lane"),
}


@pytest.mark.parametrize("where", ACTS)
def test_it_comes_out_as_it_is(where: str, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Alarm, match="by the handler"):
        ACTS[where](patch)


def test_a_lease_that_was_interrupted_while_it_was_made_goes_without_a_word() -> None:
    Lease.__new__(Lease)
    assert not postponed, "an error of the next call"


@pytest.mark.parametrize("way", ["lane", "page", "ZeroMQ"])
def test_r69_signals_that_are_handled_do_not_prolong_a_wait(way: str) -> None:
    """A timer of the program's, or a profiler, sends one every few milliseconds; the wait is longer than that."""
    address = f"ipc://@gradwire-test-{way}-{os.getpid()}"
    router = sockets.bind_router(address)
    line: Any = sockets.Dealer(address, b"me", 50)
    line.send_nowait([b"\x91"])
    end, rest = partial(sockets.send_nowait, router, sockets.receive(router)), []
    if way != "ZeroMQ":
        line.close()
        line, *rest = lane_pair(50) if way == "lane" else page_lane_pair(50)
        end = partial(rest[0].send, b"\x91")
    ticks = iter([lambda: None] * 400 + [end] * 1000)
    before = signal.signal(signal.SIGALRM, lambda *_: next(ticks)())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
        with pytest.raises(sockets.Again):
            line.receive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for made in (line, router, *rest):
            made.close()
