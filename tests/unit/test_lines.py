"""The pool of lines: none is lost or kept for ever, whoever is interrupted and whatever comes late."""

from __future__ import annotations

import gc
import itertools
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gradwire import lines as pool
from gradwire.inquiry import ENOUGH, InquiryBehind
from gradwire.lines import Lines
from gradwire_wire import messages
from gradwire_wire.errors import ProtocolError
from gradwire_wire.lane import Lane
from gradwire_wire.sockets import Unreachable


class Passing:
    """Stands in for the exchange: takes lanes and keeps the worker's ends."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def pass_lane(self, *descriptors: int) -> bool:
        self.taken.append(Lane(socket.socket(fileno=os.dup(descriptors[0]))))
        return True


@pytest.fixture
def lines() -> Iterator[Lines]:
    made = Lines("", b"c" * 16, Passing(), 20, lanes=True)  # type: ignore[arg-type]
    yield made
    made.close()
    for theirs in made._exchange.taken:  # type: ignore[attr-defined]
        theirs.close()


def peer(lines: Lines) -> Lane:
    theirs: Lane = lines._exchange.taken[-1]  # type: ignore[attr-defined]
    return theirs


def test_r62_a_line_that_an_interrupt_has_lost_is_in_flight_no_more(lines: Lines) -> None:
    gc.collect()  # of lines that other tests of this process have lost
    before = len(pool._in_flight)
    line = lines.check_out(10, 0)
    assert line.is_alone == (before == 0) and len(pool._in_flight) == before + 1
    line.plans["key"] = line  # as plans know their line
    del line
    gc.collect()
    assert len(pool._in_flight) == before
    with pytest.raises(Unreachable):
        peer(lines).receive_nowait()


def test_r62_a_reply_that_does_not_come_is_not_waited_for_for_ever(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was interrupted just when it came has read it, and nobody knows."""
    late: list[Any] = []

    def collect() -> None:
        lines.collect(lambda line, received: late.append(received))

    line = lines.check_out(10, 0)
    lines.set_aside(line)
    collect()
    assert len(lines.aside) == 1 and not late
    peer(lines).send_nowait([b"\x90late"])
    collect()
    assert late.pop() == [b"\x90late"] and not lines.aside and list(lines._lanes) == [line]
    lines.set_aside(lines.check_out(10, 0))
    monkeypatch.setattr(pool, "MOST_ASIDE_S", 0.0)
    collect()
    assert not late and not lines.aside and not lines._lanes
    with pytest.raises(Unreachable):
        peer(lines).receive_nowait()


def test_r57_a_late_lie_harms_no_other_call(lines: Lines) -> None:
    lines.set_aside(lines.check_out(10, 0))
    peer(lines).send_nowait([b"\x90lie"])

    def refuse(line: Any, received: Any) -> None:
        raise ProtocolError("no answer at all")

    lines.collect(refuse)
    assert not lines.aside and not lines._lanes


class Slow:
    """A line by ZeroMQ on which a large message is under way: what comes behind it waits."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_nowait(self, frames: list[bytes]) -> None:
        self.sent.append(messages.unpack(frames[0]))


def test_r69_by_zeromq_nothing_overtakes_a_call_that_is_under_way_for_long() -> None:
    line, pings = Slow(), []  # type: ignore[var-annotated]
    inquiry = InquiryBehind(line, itertools.count(7), pings)  # type: ignore[arg-type]
    assert not any(inquiry.is_lost() for _ in range(100 * ENOUGH))
    inquiry.end()
    assert line.sent == [messages.Ping(n) for n in pings] and pings[0] == 7 and 5 < len(pings) < 10
