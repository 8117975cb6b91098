"""Frames of calls under way: each is sent once, in order, whatever the lane takes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire.packets import BATCH, BATCH_NBYTES, SOON, Packets, of_one_packet
from gradwire_wire import sockets
from gradwire_wire.batches import BATCH as HEAD
from gradwire_wire.batches import MAX_BATCH, SHORT_BATCH, frames_in
from gradwire_wire.lane import TooLong
from gradwire_wire.sockets import Unreachable


class Lane:
    """Takes so many packets; ``refusal``: what it raises for one of several frames. sent: the frames that it took."""

    def __init__(self, room: int = 1000, refusal: type[Exception] | None = None) -> None:
        self.room, self.refusal, self.sent = room, refusal, []
        self.meanwhile: Callable[[], None] = lambda: None

    takes_batches = True

    def may_send(self) -> bool:
        return True

    def send_and_note(self, packet: bytes, note: Callable[[Any], Any], value: int) -> bool:
        is_batch = packet[0] == SHORT_BATCH and len(packet) > HEAD.size
        if is_batch and self.refusal is not None:
            raise self.refusal("no")
        if self.room <= 0:
            return False
        self.room -= 1
        self.sent += frames_in(packet) if is_batch else [packet]
        self.meanwhile()
        note(value)
        return True


def pipeline(lane: Any) -> tuple[Packets, deque[Any], Callable[[int], None]]:
    """Packets, the calls under way, and how so many more get there."""
    under_way: deque[Any] = deque()
    packets = Packets(lane, under_way)

    def put(count: int) -> None:
        for _ in range(count):
            packets.latest += 1
            under_way.append(SimpleNamespace(number=packets.latest, frame=b"\x90%d" % packets.latest))

    return packets, under_way, put


def frames(count: int) -> list[bytes]:
    return [b"\x90%d" % number for number in range(1, count + 1)]


def test_a_packet_is_the_first_frames_that_fit() -> None:
    given = [bytes(10)] * (MAX_BATCH + 5)
    assert of_one_packet(given) == given[:MAX_BATCH]
    assert of_one_packet([]) == []
    long = bytes(BATCH_NBYTES)
    assert of_one_packet([long, b"x"]) == [long]
    assert of_one_packet([b"x", long]) == [b"x"]


def test_a_lone_call_goes_at_once_and_others_wait_for_each_other() -> None:
    lane = Lane()
    packets, _, put = pipeline(lane)
    put(1)
    packets.send_soon(0)
    assert lane.sent == frames(1)
    for _ in range(BATCH - 1):
        put(1)
        packets.send_soon(0)
    assert lane.sent == frames(1), "the worker has something to do"
    put(1)
    packets.send_soon(0)
    assert lane.sent == frames(BATCH + 1)
    put(1)
    packets.send_soon(SOON + 1)
    assert lane.sent == frames(BATCH + 2), "large arguments do not wait"


def test_what_the_lane_does_not_take_goes_later() -> None:
    lane = Lane(room=1)
    packets, under_way, put = pipeline(lane)
    put(MAX_BATCH + 10)
    packets.flush()
    assert lane.sent == frames(MAX_BATCH)
    for _ in range(MAX_BATCH):
        under_way.popleft()  # answered
    put(5)
    lane.room = 10
    packets.flush()
    packets.flush()
    assert lane.sent == frames(MAX_BATCH + 15)


def test_where_packets_of_several_are_too_long_they_go_one_by_one() -> None:
    lane = Lane(refusal=TooLong)
    packets, _, put = pipeline(lane)
    put(5)
    packets.flush()
    assert lane.sent == frames(5)


def test_an_answer_may_come_before_its_call_is_noted_as_sent() -> None:
    lane = Lane()
    packets, under_way, put = pipeline(lane)

    def answered_and_another() -> None:
        lane.meanwhile = lambda: None
        under_way.popleft()
        put(1)
        packets.send_soon(0)  # of another thread, which finds somebody sending

    lane.meanwhile = answered_and_another
    put(1)
    packets.send_soon(0)
    assert lane.sent == frames(2)


@pytest.mark.parametrize("end", [Unreachable("gone"), None])
def test_at_the_end_nothing_is_sent(end: Exception | None) -> None:
    lane = Lane(refusal=None if end is None else type(end))
    packets, under_way, put = pipeline(lane)
    put(3)
    if end is None:
        under_way.clear()
    packets.flush()
    assert lane.sent == [] and not packets.are_sent_here


def test_by_zeromq_its_reader_alone_sends(tmp_path: Path) -> None:
    """Frame by frame. Whoever else has something to send wakes it, and a bell that rings often is no news, nor one after the end."""
    address = f"ipc://{tmp_path}/router"
    router = sockets.bind_router(address)
    dealer = sockets.PipelineDealer(address, b"reader", 10_000, waits=True)
    assert dealer.is_connected(60_000)
    packets, _, put = pipeline(dealer)
    put(3)
    packets.flush()
    assert sockets.receive_nowait(router) is None
    dealer.begin()
    packets.flush()
    assert [sockets.receive(router)[1] for _ in range(3)] == [b"\x901", b"\x902", b"\x903"]
    put(1)
    in_thread(lambda: [packets.flush() for _ in range(100_000)])
    with pytest.raises(sockets.Again):
        dealer.receive()
    packets.flush()
    sockets.send_nowait(router, sockets.receive(router))
    while True:
        try:
            assert dealer.receive() == [b"\x904"]
            break
        except sockets.Again:  # rung once more
            pass
    put(1)
    dealer.close()
    in_thread(packets.flush)
    router.close()


def in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
