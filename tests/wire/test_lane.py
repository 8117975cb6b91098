"""Lanes: whole packets or nothing, ends that are news, and what a peer may pass that is no lane."""

from __future__ import annotations

import array
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gradwire_wire.lane import MAX_PACKET, Lane, TooLong, lane_pair, received_lane
from gradwire_wire.sockets import Again, Unreachable
from gradwire_wire.tether import Tether


def make_ends(timeout_ms: int = 50) -> tuple[Lane, Lane]:
    ours, theirs = lane_pair(timeout_ms)
    other = received_lane(theirs.detach())
    assert other is not None
    return ours, other


@pytest.fixture
def ends() -> Iterator[tuple[Lane, Lane]]:
    ours, other = make_ends()
    yield ours, other
    ours.close()
    other.close()


@pytest.mark.parametrize("nbytes", [1, 100, MAX_PACKET - 1, MAX_PACKET])
def test_there_and_back(nbytes: int, ends: tuple[Lane, Lane]) -> None:
    client, worker = ends
    frame = b"\x91" + os.urandom(nbytes - 1)
    client.send_nowait([frame])
    assert worker.receive_nowait() == [frame] and worker.receive_nowait() is None
    worker.send_nowait([frame])
    assert client.receive() == [frame]


def test_what_was_received_is_not_changed_by_the_next(ends: tuple[Lane, Lane]) -> None:
    client, worker = ends
    for frame in (b"\x91", b"\x92", b"\x93"):
        client.send_nowait([frame])
    received = [worker.receive_nowait() for _ in range(3)]
    assert received == [[b"\x91"], [b"\x92"], [b"\x93"]]


def test_waiting_has_an_end(ends: tuple[Lane, Lane]) -> None:
    start = time.monotonic()
    with pytest.raises(Again):
        ends[0].receive()
    assert time.monotonic() - start > 0.02


def test_a_packet_is_sent_and_noted_or_neither(ends: tuple[Lane, Lane]) -> None:
    client, worker = ends
    noted: list[int] = []
    assert client.send_and_note(b"\x91", noted.append, 1) and noted == [1]
    packet = b"\x91" * (MAX_PACKET // 2)
    while client.send_and_note(packet, noted.append, len(noted) + 1):
        pass
    received = []
    while (frames := worker.receive_nowait()) is not None:
        received.append(frames)
    assert len(received) == len(noted) == noted[-1]
    worker.close()
    with pytest.raises(Unreachable):
        client.send_and_note(packet, noted.append, 0)
    assert noted[-1] != 0


class Alarm(ConnectionError, TimeoutError):
    """What many write an alarm's handler with is an OSError, like those of a broken socket."""


@pytest.mark.parametrize("raised", [Alarm, BlockingIOError, ConnectionResetError])
def test_what_a_handler_of_signals_raises_comes_out_as_it_is(raised: type[OSError]) -> None:
    def ring(*_: object) -> None:
        raise raised(11, "by the handler")

    before = signal.signal(signal.SIGALRM, ring)
    ours, theirs = lane_pair(20_000)
    tether, other = (Tether(s) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        for wait in (ours.receive, lambda: tether.receive(20.0)):
            with pytest.raises(raised, match="by the handler"):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                wait()
    finally:
        signal.signal(signal.SIGALRM, before)
        for end in (ours, theirs, tether, other):
            end.close()


def test_waiting_is_interrupted_by_signals(ends: tuple[Lane, Lane]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    ours, theirs = lane_pair(20_000)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            ours.receive()
    finally:
        signal.signal(signal.SIGALRM, before)
        ours.close()
        theirs.close()


def test_waiting_lets_other_threads_run() -> None:
    client, worker = make_ends(60_000)
    late = threading.Timer(0.01, worker.send_nowait, [[b"\x90late"]])
    late.start()
    assert client.receive() == [b"\x90late"]
    late.join()
    client.close()
    worker.close()


def test_the_end_is_news_and_comes_after_what_was_said(ends: tuple[Lane, Lane]) -> None:
    client, worker = ends
    worker.send_nowait([b"\x90last words"])
    worker.close()
    assert client.receive() == [b"\x90last words"]
    for _ in range(2):
        with pytest.raises(Unreachable):
            client.receive()
    with pytest.raises(Unreachable):
        client.receive_nowait()
    with pytest.raises(Unreachable):
        client.send_nowait([b"hello"])
    worker.close()


def test_a_closed_end_says_so(ends: tuple[Lane, Lane]) -> None:
    ends[0].close()
    for act in (lambda: ends[0].send_nowait([b"\x90"]), ends[0].receive, ends[0].receive_nowait):
        with pytest.raises(Unreachable):
            act()


def test_answers_are_read_though_the_worker_ended_with_calls_unread(ends: tuple[Lane, Lane]) -> None:
    client, worker = ends
    worker.send_nowait([b"\x91answer"])
    client.send_nowait([b"\x91call"])
    worker.close()
    assert client.receive() == [b"\x91answer"]
    with pytest.raises(Unreachable):
        client.receive()


def test_a_peer_that_does_not_read_blocks_nobody(ends: tuple[Lane, Lane]) -> None:
    with pytest.raises(TooLong):
        for _ in range(10_000):
            ends[0].send_nowait([bytes(1000)])


def test_R57_too_long_a_packet_ends_the_lane(ends: tuple[Lane, Lane]) -> None:
    client, worker = ends
    client.send_nowait([bytes(MAX_PACKET + 1)])
    with pytest.raises(Unreachable, match="too long"):
        worker.receive_nowait()


def test_R57_descriptors_on_a_lane_go_nowhere(footprint: Callable[[], tuple[int, int]]) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lane = Lane(other)
    before = footprint()
    fd = os.memfd_create("gradwire-test")
    one.sendmsg([b"\x90"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    os.close(fd)
    assert lane.receive_nowait() == [b"\x90"] and footprint() == before
    one.close()
    lane.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: os.open("/dev/null", os.O_RDONLY),
        lambda: os.memfd_create("gradwire-test"),
        lambda: socket.socket(socket.AF_INET).detach(),
        lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).detach(),
        lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach(),
    ],
)
def test_R57_what_is_no_lane_is_closed(
    make: Callable[[], int], footprint: Callable[[], tuple[int, int]]
) -> None:
    before = footprint()
    assert received_lane(make()) is None
    assert footprint() == before


def test_a_packet_that_the_system_does_not_take_can_go_another_way() -> None:
    """With small buffers, as some systems have them."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    lane = Lane(one)
    with pytest.raises(TooLong):
        lane.send_nowait([bytes(60_000)])
    lane.send_nowait([b"short"])
    assert two.recv(100) == b"short"
    lane.close()
    two.close()


def test_a_system_with_small_buffers_says_what_it_takes(ends: tuple[Lane, Lane]) -> None:
    """So that nothing waits here that would never go (submitted calls, answers behind others)."""
    client, worker = ends
    assert client.largest_packet() == worker.largest_packet() == MAX_PACKET
    client._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    most = client.largest_packet()
    with pytest.raises(TooLong):
        client.send_nowait([b"\x91" * (most + 1)])
    client.send_nowait([b"\x91" * most])
    assert worker.receive_nowait() == [b"\x91" * most]
