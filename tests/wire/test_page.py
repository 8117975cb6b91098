"""Pages: what is shown is seen, whoever sleeps is woken, and a peer that lies or dies does no more harm than by socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gradwire_wire import page
from gradwire_wire.lane import MAX_PACKET, TooLong
from gradwire_wire.page import (
    COUNT_BITS,
    HALF,
    PAGE_NBYTES,
    ClientPage,
    WorkerPage,
    page_lane_pair,
    received_page_lane,
)
from gradwire_wire.segments import OwnSegment
from gradwire_wire.sockets import Again, Unreachable
from gradwire_wire.spin import Spin

pytestmark = pytest.mark.skipif(not page.can_page(), reason="pages are for x86")


def make_ends(timeout_ms: int = 50) -> tuple[ClientPage, WorkerPage]:
    client, theirs, segment = page_lane_pair(timeout_ms)
    worker = received_page_lane(theirs.detach(), os.dup(segment.fd))
    segment.close()
    assert worker is not None
    client._spin.took(0.0, False)  # so that it looks for its answers, and shows its calls
    client._has_processors = worker._has_processors = (
        True  # also where the tests have one: no end waits for the other
    )
    return client, worker


@pytest.fixture
def ends() -> Iterator[tuple[ClientPage, WorkerPage]]:
    client, worker = make_ends()
    yield client, worker
    client.close()
    worker.close()


def too_short() -> int:
    segment = OwnSegment(0, PAGE_NBYTES - 4096)
    return os.dup(segment.fd)


def show(end: ClientPage | WorkerPage, text: bytes) -> None:
    end.outgoing[: len(text)] = text
    end.send_short_nowait(len(text))


def polled(worker: WorkerPage) -> object:
    """What a poller finds, which comes again as long as anything is in the socket."""
    while (received := worker.receive_nowait()) is None:
        worker._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return received


def look(end: ClientPage | WorkerPage, received: object) -> bytes:
    assert type(received) is int, received
    return bytes(end.incoming[:received])


def read(end: ClientPage | WorkerPage, received: object) -> bytes:
    """A message, or a short frame."""
    return received[0] if isinstance(received, list) else look(end, received)


@pytest.mark.parametrize("way", ["shown", "packets", "both"])
@pytest.mark.parametrize("nbytes", [2, 64, 5000, page.PACKET, page.PACKET + 1, HALF])
def test_there_and_back(nbytes: int, way: str, ends: tuple[ClientPage, WorkerPage]) -> None:
    client, worker = ends
    for i in range(6):
        if way != "shown":
            client._spin = Spin(0, 1.0)
            client._spin.took(0.0 if way == "both" and i % 2 else 2.0, False)
        frame = b"\1" + os.urandom(nbytes - 1)
        show(client, frame)
        assert look(worker, worker.receive_nowait()) == frame and worker.receive_nowait() is None
        show(worker, b"\2" + frame[1:])
        assert look(client, client.receive()) == b"\2" + frame[1:]


def test_a_packet_is_answered_by_the_page_where_the_answer_is_long(
    ends: tuple[ClientPage, WorkerPage],
) -> None:
    client, worker = ends
    for _ in range(3):
        client._spin = Spin(0, 1.0)
        show(client, b"\1little")
        assert look(worker, worker.receive_nowait()) == b"\1little"
        show(worker, b"\2" * (page.PACKET + 1))
        assert look(client, client.receive()) == b"\2" * (page.PACKET + 1)


@pytest.mark.parametrize("answer", [b"\x92answer", b"\x92" * (MAX_PACKET + 1), b"\2short"])
def test_messages_to_one_that_looks_take_no_socket(
    answer: bytes, ends: tuple[ClientPage, WorkerPage]
) -> None:
    client, worker = ends
    for i in range(3):
        assert not worker._look(page.ROUND)
        client.send_nowait([b"\x91call %d" % i])
        assert worker._look(page.ROUND) and worker.next() == [b"\x91call %d" % i]
        assert not client._look(page.ROUND)
        if answer[0] < 0x80:
            show(worker, answer)
        else:
            worker.send_nowait([answer])
        client._socket.send(
            BLOCKED
        )  # whatever came by the socket would come after this, or before it the other way
        worker._socket.send(BLOCKED)
        received = client.receive()
        assert received == [answer] if answer[0] >= 0x80 else look(client, received) == answer
        assert client._socket.recv(100) == worker._socket.recv(100) == BLOCKED


def test_an_answer_by_the_page_waits_for_those_before_it(ends: tuple[ClientPage, WorkerPage]) -> None:
    client, worker = ends
    client.send_nowait([b"\x91call"])
    assert worker.receive_nowait() == [b"\x91call"]
    worker.keep(b"\x92first")
    assert not client._look(page.ROUND)
    worker.send_nowait([b"\x92second"])
    assert list(worker.backlog) == [b"\x92first", b"\x92second"]


def test_messages_go_by_the_socket_between_short_frames(ends: tuple[ClientPage, WorkerPage]) -> None:
    client, worker = ends
    for _ in range(3):
        client.send_nowait([b"\x91long"])
        assert worker.receive_nowait() == [b"\x91long"]
        worker.send_nowait([b"\x92answer"])
        assert client.receive() == [b"\x92answer"]
        show(client, b"\1short")
        assert look(worker, worker.receive_nowait()) == b"\1short"
        worker.send_nowait([b"\x92long answer"])
        assert client.receive() == [b"\x92long answer"]


def test_a_call_shown_behind_what_has_no_answer_is_not_lost(ends: tuple[ClientPage, WorkerPage]) -> None:
    client, worker = ends
    for _ in range(3):
        client.tell_nowait([b"\x91told"])
        show(client, b"\1call")  # before the worker has read anything
        assert polled(worker) == [b"\x91told"]
        assert look(worker, polled(worker)) == b"\1call"
        show(worker, b"\2answer")
        assert look(client, client.receive()) == b"\2answer"


class Meanwhile:
    """A page's words, of which the client writes one as soon as the worker has read it."""

    def __init__(self, words: memoryview, act: Callable[[], None]) -> None:
        self._words, self._act = words, act

    def __getitem__(self, place: int) -> int:
        word = self._words[place]
        if place == page.REQUEST:
            self._act()
            self._act = lambda: None
        return word

    def __setitem__(self, place: int, word: int) -> None:
        self._words[place] = word


def test_a_call_shown_while_what_has_no_answer_is_read_is_not_lost(
    ends: tuple[ClientPage, WorkerPage],
) -> None:
    """Its word was taken with that of the packet before it, and its caller waited until the inquiry."""
    client, worker = ends
    for _ in range(3):
        client.tell_nowait([b"\x91told"])
        words = worker._words
        worker._words = Meanwhile(words, lambda: show(client, b"\1call"))  # type: ignore[assignment]
        assert worker.receive_nowait() == [b"\x91told"]
        worker._words = words
        assert look(worker, polled(worker)) == b"\1call"
        show(worker, b"\2answer")
        assert look(client, client.receive()) == b"\2answer"


MANY = 600  # more bells than a socket holds


@pytest.mark.parametrize("way", ["message", "packet"])
def test_an_answer_is_not_lost_behind_bells_that_nobody_read(
    way: str, ends: tuple[ClientPage, WorkerPage]
) -> None:
    """A client that is slow to look finds its answers before it sleeps, and lets the bells lie."""
    client, worker = ends
    for _ in range(MANY):
        client._spin = Spin(0, 1.0)
        show(client, b"\1" * (page.PACKET + 1))
        assert look(worker, worker.receive_nowait())
        show(worker, b"\2" * (page.PACKET + 1))
        assert look(client, client.receive()) and worker.receive_nowait() is None
    client._spin = Spin(0, 1.0)
    show(client, b"\1call")
    assert look(worker, polled(worker)) == b"\1call"
    if way == "message":
        worker.send_nowait([b"\x92long answer"])
    else:
        show(worker, b"\2answer")
    assert worker.backlog, "the socket had room: this shows nothing"
    with pytest.raises(Again):
        client.receive()
    worker.flush()  # as the poller has it done
    received = client.receive()
    assert received == [b"\x92long answer"] if way == "message" else look(client, received) == b"\2answer"


def test_r69_a_call_after_one_that_took_minutes(ends: tuple[ClientPage, WorkerPage]) -> None:
    """Who waits long rings again, but not so often that the worker's socket is full when the next call comes."""
    client, worker = ends
    client._spin = Spin(0, 1.0)
    show(client, b"\1long call")
    assert look(worker, polled(worker)) == b"\1long call"
    for _ in range(MANY):
        client._ring_again()  # as `receive` does after each of its timeouts
    show(worker, b"\2answer")
    assert look(client, client.receive()) == b"\2answer"
    show(client, b"\1call")
    assert look(worker, polled(worker)) == b"\1call"


def test_a_call_that_finds_the_socket_full_may_go_another_way(ends: tuple[ClientPage, WorkerPage]) -> None:
    client, worker = ends
    with pytest.raises(TooLong):
        for _ in range(MANY):
            client.tell_nowait([TOLD])
    while worker.receive_nowait() == [TOLD]:
        pass
    show(client, b"\1call")
    assert look(worker, worker.receive_nowait()) == b"\1call"


@pytest.mark.parametrize("nbytes", [MAX_PACKET + 1, HALF])
def test_a_message_too_long_for_a_packet_goes_by_the_page(
    nbytes: int, ends: tuple[ClientPage, WorkerPage]
) -> None:
    client, worker = ends
    message = b"\x95" + bytes(range(251)) * (nbytes // 251 + 1)
    message = message[:nbytes]
    for _ in range(2):
        client.send_nowait([message])
        received = worker.receive_nowait()
        client.outgoing[:nbytes] = bytes(nbytes)
        assert received == [message]
        assert client.receive_nowait() is None
        worker.send_nowait([b"\x95answer"])
        assert client.receive() == [b"\x95answer"]
        show(client, b"\1" * 20_000)  # and a short call after it
        assert worker.receive_nowait() == 20_000
        show(worker, b"\2" * 30)
        assert client.receive() == 30 and bytes(client.incoming[:30]) == b"\2" * 30


def test_who_is_awake_is_not_rung(ends: tuple[ClientPage, WorkerPage]) -> None:
    client, worker = ends
    worker._look(page.ROUND)
    show(client, b"\1one")
    with pytest.raises(BlockingIOError):
        worker._socket.recv(10, socket.MSG_DONTWAIT)
    assert worker._look(page.ROUND) and look(worker, worker.next()) == b"\1one"
    show(worker, b"\2two")
    assert look(client, client.receive()) == b"\2two"
    assert not worker.leave_off()
    show(client, b"\1three")
    assert worker._socket.recv(10, socket.MSG_DONTWAIT) == page.BELL
    assert look(worker, worker.next()) == b"\1three"


def test_leaving_off_sees_what_came_meanwhile(ends: tuple[ClientPage, WorkerPage]) -> None:
    client, worker = ends
    worker._look(page.ROUND)
    show(client, b"\1one")
    assert worker.leave_off() and look(worker, worker.next()) == b"\1one"


def test_a_lost_bell_is_rung_again(ends: tuple[ClientPage, WorkerPage]) -> None:
    client, worker = ends
    show(client, b"\1one")
    assert worker._socket.recv(10) == page.BELL  # lost
    with pytest.raises(Again):
        client.receive()
    assert look(worker, worker.receive_nowait()) == b"\1one"


def test_it_is_rung_once_though_the_worker_says_that_it_is_awake(ends: tuple[ClientPage, WorkerPage]) -> None:
    """One that forgets a page it was awake for must not keep that page's client waiting for ever."""
    client, worker = ends
    worker._look(page.ROUND)
    show(client, b"\1one")
    with pytest.raises(BlockingIOError):
        worker._socket.recv(10, socket.MSG_DONTWAIT)
    for _ in range(3):
        with pytest.raises(Again):
            client.receive()
    assert look(worker, worker.receive_nowait()) == b"\1one"
    with pytest.raises(BlockingIOError):
        worker._socket.recv(10, socket.MSG_DONTWAIT)
    show(worker, b"\2two")
    assert look(client, client.receive()) == b"\2two"


def test_a_bell_without_a_frame_is_nothing() -> None:
    client, worker = make_ends(60_000)
    client._ring()
    assert worker.receive_nowait() is None
    worker._ring()
    show(client, b"\1one")
    worker.receive_nowait()
    late = threading.Timer(0.02, show, [worker, b"\2two"])
    late.start()
    assert look(client, client.receive()) == b"\2two"
    late.join()
    client.close()
    worker.close()


def test_a_late_answer_is_found_without_waiting(ends: tuple[ClientPage, WorkerPage]) -> None:
    client, worker = ends
    show(client, b"\1one")
    with pytest.raises(Again):
        client.receive()
    assert client.receive_nowait() is None
    polled(worker)
    show(worker, b"\2late")
    assert look(client, client.receive_nowait()) == b"\2late"
    show(client, b"\1two")
    polled(worker)
    worker.send_nowait([b"\x90late"])
    assert client.receive_nowait() == [b"\x90late"]
    show(client, b"\1three")
    assert look(worker, polled(worker)) == b"\1three"
    show(worker, b"\2three")
    assert look(client, client.receive()) == b"\2three"


def test_the_end_is_news(ends: tuple[ClientPage, WorkerPage]) -> None:
    client, worker = ends
    show(client, b"\1one")
    worker.receive_nowait()
    show(worker, b"\2last words")
    worker.close()
    assert look(client, client.receive()) == b"\2last words"
    with pytest.raises(Unreachable):
        show(client, b"\1two")
    with pytest.raises(Unreachable):
        client.receive()
    with pytest.raises(Unreachable):
        client.receive_nowait()


@pytest.mark.parametrize(
    "word",
    [
        (1 << COUNT_BITS) | (HALF + 1),
        (1 << COUNT_BITS) | 0xFFFFFF,
        (2 << COUNT_BITS) | 5,
        5,
        (1 << 64) - 1,
    ],
)
def test_R57_a_word_that_lies(word: int, ends: tuple[ClientPage, WorkerPage]) -> None:
    client, worker = ends
    show(client, b"\1one")
    worker._words[page.ANSWER] = word
    worker._ring()
    with pytest.raises(Unreachable):
        client.receive()
    if word & 0xFFFFFF > HALF:
        client._words[page.REQUEST] = word
        with pytest.raises(Unreachable):
            worker.next()


@pytest.mark.parametrize(
    "make",
    [
        lambda: os.open("/dev/null", os.O_RDONLY),
        lambda: os.memfd_create("gradwire-test"),
        lambda: too_short(),
        lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).detach(),
    ],
)
def test_R57_what_is_no_page_is_closed(
    make: Callable[[], int], footprint: Callable[[], tuple[int, int]]
) -> None:
    before = footprint()
    assert received_page_lane(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).detach(), make()) is None
    assert received_page_lane(make(), os.open("/dev/null", os.O_RDONLY)) is None
    assert footprint() == before


def test_both_ends_gone_nothing_is_left(footprint: Callable[[], tuple[int, int]]) -> None:
    for end in make_ends():
        end.close()
    del end
    before = footprint()
    for _ in range(10):
        client, worker = make_ends()
        show(client, b"\1")
        client.close()
        worker.close()
        del client, worker
    assert footprint() == before


# ---- The model: any interleaving of what two ends do, one step at a time --------------------------------------------------


TOLD, BLOCKED = b"\x90told", b"\x90block"


class Model(RuleBasedStateMachine):
    """A client that calls, and tells what has no answer, and a worker that serves; each step of either may come before or after the other's.

    What must hold: whoever sleeps with something to do has a bell in its socket.
    """

    @initialize()
    def start(self) -> None:
        self.client, self.worker = make_ends(1)
        self.number = 0
        self.is_called = self.is_taken = self.is_answered = False
        self.worker_sleeps = True

    def teardown(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
            self.worker.close()

    def rung(self, end: ClientPage | WorkerPage) -> bool:
        try:
            return bool(end._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False

    @rule(is_shown=st.booleans(), is_message=st.booleans())
    @precondition(lambda self: not self.is_called)
    def call(self, is_shown: bool, is_message: bool) -> None:
        self.number += 1
        self.client._spin = Spin(page.ROUND, 1.0)
        self.client._spin.took(0.0 if is_shown else 2.0, False)
        self.is_called = True
        if is_message:
            self.client.send_nowait([b"\x91%d" % self.number])
        else:
            show(self.client, b"\1%d" % self.number)

    @rule()
    @precondition(lambda self: not self.is_called)
    def tell(self) -> None:
        self.client.tell_nowait([TOLD])

    @rule()
    @precondition(lambda self: self.worker_sleeps)
    def worker_wakes_by_the_poller(self) -> None:
        if self.rung(self.worker):
            self.serve(self.worker.receive_nowait())

    @rule()
    def worker_stays_awake(self) -> None:
        self.worker_sleeps = False
        if self.worker._look(page.ROUND):
            self.serve(self.worker.next())

    @rule()
    @precondition(lambda self: not self.worker_sleeps)
    def worker_leaves_off(self) -> None:
        if self.worker.leave_off():
            self.serve(self.worker.next())
        else:
            self.worker_sleeps = True

    def serve(self, received: object) -> None:
        if received is not None and received != [TOLD]:
            assert self.is_called and not self.is_taken, "served what nobody asked for"
            assert read(self.worker, received)[1:] == b"%d" % self.number
            self.is_taken = True

    @rule(by_socket=st.booleans())
    @precondition(lambda self: self.is_taken and not self.is_answered)
    def answer(self, by_socket: bool) -> None:
        if by_socket:
            self.worker.send_nowait([b"\x90%d" % self.number])
        else:
            show(self.worker, b"\2%d" % self.number)
        self.is_answered = True

    @rule()
    @precondition(lambda self: self.is_called)
    def client_stays_awake(self) -> None:
        self.client._look(page.ROUND)

    @rule(looks=st.sampled_from([0, page.ROUND]), waits=st.booleans())
    @precondition(lambda self: self.is_called)
    def client_looks(self, looks: int, waits: bool) -> None:
        self.client._looks = looks
        try:
            received = self.client.receive() if waits else self.client.receive_nowait()
        except Again:
            received = None
        if received is None:
            assert not self.is_answered, "an answer was overlooked"
            return
        assert self.is_answered
        assert read(self.client, received)[1:] == b"%d" % self.number
        self.is_called = self.is_taken = self.is_answered = False

    @invariant()
    def nobody_sleeps_over_it(self) -> None:
        if hasattr(self, "client") and self.is_called and not self.is_taken and self.worker_sleeps:
            assert self.rung(self.worker)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- Two processes ---------------------------------------------------------------------------------------------------------

ECHO = """
import sys
from gradwire_wire import page, sockets
lane = page.received_page_lane(int(sys.argv[1]), int(sys.argv[2]))
poller = sockets.Poller()
poller.register(lane.fileno(), sockets.IN)
try:
    while True:
        poller.poll()
        received = lane.receive_nowait()
        while received:
            lane.outgoing[:received] = lane.incoming[:received]
            lane.send_short_nowait(received)
            received = lane.next() if lane.is_next_here() else 0
except sockets.Unreachable:
    pass
"""


def test_many_calls_between_two_processes() -> None:
    """No frame is lost, torn or late, with pauses that make either side sleep now and then. (make soak-page: 10 million)"""
    calls = int(os.environ.get("GRADWIRE_PAGE_CALLS", "4000"))
    client, theirs, segment = page_lane_pair(
        30_000
    )  # however busy the machine is: Again is a bell that was lost
    fds = [theirs.fileno(), segment.fd]
    echo = subprocess.Popen([sys.executable, "-c", ECHO, *map(str, fds)], pass_fds=fds)
    theirs.close()
    segment.close()
    for i in range(calls):
        frame = b"\1" + i.to_bytes(8, "little") * (1 + i % 40)
        show(client, frame)
        assert look(client, client.receive()) == frame
        if i % 97 == 0:
            time.sleep(0.0003)
    client.close()
    assert echo.wait(60) == 0


def test_a_worker_that_is_killed_is_noticed() -> None:
    client, theirs, segment = page_lane_pair(100)
    fds = [theirs.fileno(), segment.fd]
    echo = subprocess.Popen([sys.executable, "-c", ECHO, *map(str, fds)], pass_fds=fds)
    theirs.close()
    segment.close()
    for i in range(50):
        show(client, b"\1%d" % i)
        while True:
            try:
                assert look(client, client.receive()) == b"\1%d" % i
                break
            except Again:
                assert echo.poll() is None
    echo.kill()
    echo.wait()
    with pytest.raises(Unreachable):
        show(client, b"\1")
        client.receive()
    client.close()


# ---- When to look ----------------------------------------------------------------------------------------------------------


def simulate(spin: Spin, waits: int, sleeping_s: float, looking_s: float) -> float:
    """The share of so many waits that were spent looking."""
    looked = 0
    for _ in range(waits):
        is_looking = spin.looks() > 0
        looked += is_looking
        spin.took(looking_s if is_looking else sleeping_s, is_looking)
    return looked / waits


def test_looking_begins_after_a_short_wait_only() -> None:
    spin = Spin(1000, 1e-4)
    assert spin.looks() == 0
    assert simulate(spin, 1000, 1e-3, 1e-5) == 0
    simulate(spin, 100, 1e-5, 1e-6)
    assert simulate(spin, 100, 1e-5, 1e-6) > 0.9


def test_it_goes_on_as_long_as_it_pays() -> None:
    assert simulate(Spin(1000, 2e-4), 2000, 1e-4, 3e-5) > 0.98


@pytest.mark.parametrize("looking_s", [9.6e-5, 1e-4, 3e-4])
def test_in_vain_it_becomes_rare(looking_s: float) -> None:
    spin = Spin(1000, 2e-4)
    simulate(spin, 10_000, 1e-4, looking_s)
    assert simulate(spin, 20_000, 1e-4, looking_s) < 0.01


def test_it_changes_with_the_times() -> None:
    spin = Spin(1000, 2e-4)
    for _ in range(3):
        simulate(spin, 20_000, 1e-4, 3e-5)
        assert simulate(spin, 1000, 1e-4, 3e-5) > 0.95
        simulate(spin, 20_000, 1e-4, 2e-4)
        assert simulate(spin, 1000, 1e-4, 2e-4) < 0.05


def test_one_outlier_decides_nothing() -> None:
    spin = Spin(1000, 2e-4)
    simulate(spin, 1000, 1e-4, 2e-5)
    spin.took(5.0, True)
    assert simulate(spin, 1000, 1e-4, 2e-5) > 0.9
