"""Batches: what goes in comes out in order, and nothing else is taken for one; a worker's end that serves them."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire_wire.batches import BATCH, MAX_BATCH, SHORT_BATCH, batch_of, frames_in
from gradwire_wire.errors import ProtocolError
from gradwire_wire.lane import MAX_BACKLOG, Lane, WorkerLane, lane_pair, received_lane
from gradwire_wire.sockets import Unreachable


@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=MAX_BATCH))
def test_there_and_back(frames: list[bytes]) -> None:
    assert frames_in(batch_of(frames)) == frames


@given(st.binary(max_size=100))
def test_what_is_none_is_refused(packet: bytes) -> None:
    """Any bytes: either they are exactly a batch, or they are refused."""
    for candidate in (packet, bytes([SHORT_BATCH]) + packet, BATCH.pack(SHORT_BATCH, 0, 2, 0) + packet):
        try:
            frames = frames_in(candidate)
        except ProtocolError:
            continue
        assert batch_of(frames)[8:] == candidate[8:]


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        BATCH.pack(SHORT_BATCH, 0, 0, 0),
        BATCH.pack(SHORT_BATCH, 0, MAX_BATCH + 1, 0) + (MAX_BATCH + 1) * b"\1\0\0\0x",
        BATCH.pack(SHORT_BATCH, 0, 1, 0) + struct.pack("<I", 0),
        BATCH.pack(SHORT_BATCH, 0, 1, 0) + struct.pack("<I", 1 << 31) + b"x",
        batch_of([b"abc"])[:-1],
        batch_of([b"abc"]) + b"x",
        batch_of([b"abc", b"de"])[:-5],
    ],
)
def test_cut_short_or_too_long(packet: bytes) -> None:
    with pytest.raises(ProtocolError):
        frames_in(packet)


@pytest.fixture
def ends() -> Iterator[tuple[Lane, WorkerLane]]:
    ours, theirs = lane_pair(200)
    other = received_lane(theirs.detach())
    assert other is not None
    yield ours, other
    ours.close()
    other.close()


def test_one_by_one(ends: tuple[Lane, WorkerLane]) -> None:
    client, worker = ends
    assert not worker.is_pipelined
    assert client.send_if_room(batch_of([b"\1abc", b"\x91long", b"\1de"])) and client.send_if_room(b"\x92")
    assert worker.receive_nowait() == 4 and worker.incoming[:4] == b"\1abc" and worker.has_more
    assert worker.receive_nowait() == [b"\x91long"] and worker.has_more
    assert worker.receive_nowait() == 3 and worker.incoming[:3] == b"\1de" and not worker.has_more
    assert worker.receive_nowait() == [b"\x92"] and worker.receive_nowait() is None and worker.is_pipelined


def test_no_batch_ends_the_lane(ends: tuple[Lane, WorkerLane]) -> None:
    assert ends[0].send_if_room(batch_of([b"\1abc"])[:-1])
    with pytest.raises(Unreachable, match="batch"):
        ends[1].receive_nowait()


def test_answers_wait_for_a_client_that_reads_late(ends: tuple[Lane, WorkerLane]) -> None:
    """All of them come, in order; a client that never reads costs so many and no more."""
    client, worker = ends
    answers = [bytes([0x91, i]) + os.urandom(8000) for i in range(200)]
    for answer in answers:
        worker.send_nowait([answer])
    assert 0 < len(worker.backlog) < 200
    for answer in answers:
        assert client.receive() == [answer]
        worker.flush()
    assert not worker.backlog
    with pytest.raises(Unreachable, match="does not read"):
        for _ in range(MAX_BACKLOG + 200):
            worker.send_nowait([answers[0]])
    assert len(worker.backlog) == MAX_BACKLOG
    client.close()
    with pytest.raises(Unreachable):
        worker.flush()


def test_a_client_finds_no_room(ends: tuple[Lane, WorkerLane]) -> None:
    client, worker = ends
    sent = 0
    while client.send_if_room(b"\x91" + bytes(4000)):
        sent += 1
    assert 10 < sent < 200 and worker.receive_nowait() == [b"\x91" + bytes(4000)]
    worker.close()
    with pytest.raises(Unreachable):
        client.send_if_room(b"\x91")
