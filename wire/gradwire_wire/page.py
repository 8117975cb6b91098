"""Pages: lanes whose short frames go through memory that both processes map; the socket is their bell.

Theory of operation. A page is made by the client and passed with the lane's socket. Each half has one writer::

    words      0  request    number << 24 | bytes     client writes (bytes 0: the call is in the socket)
               8  answer     number << 24 | bytes     worker writes       (bytes 0: the answer is in the socket)
              16  awake      1: do not ring           worker writes, for itself
              24  awake      1: do not ring           client writes, for itself
    frames     client's, worker's                     each HALF bytes

A sender writes the frame, then its word. Unless the receiver is awake it also rings: it sends a packet of one zero byte by
the socket. A receiver that is awake looks at the word again and again. Before it sleeps, in a poll or a receive, it stores 0
into its own `awake` and looks once more.

What goes by the page: short calls and answers; messages that have an answer, if the client will look for that; and answers to a
client that looks. All other frames, and the end of the peer, come by the socket as on any lane. Whoever sends such a packet announces it in
its word (bytes 0), for a peer that is awake looks nowhere else. So the words count all calls.

The client decides whether looking pays (spin.py). A worker looks for the next call of a client that looks, if its calls have
come soon after each other of late. A client that will not look sends short calls of up to some KiB as packets, as on a lane
without a page, and is answered by packets: a frame and a bell cost more.

Order of memory. This is for x86 alone, where loads are in order, stores are in order, and a store of eight
aligned bytes is whole; CPython makes one of an item assignment to a memoryview of 'Q', and copies arrays by plain stores
(glibc fences its non-temporal ones). So whoever sees the word sees the frame. The one thing that x86 reorders is a
store and a later load of something else, and two of these meet here: ::

    sender    word = n;    FENCE; if not awake: ring
    receiver  awake = 0;   FENCE; if word is new: go on, else sleep

Without the fences both could load the old value, and the receiver would sleep although the frame is there. The fence is to
acquire and release a lock that only this end has: in every CPython that executes an interlocked instruction. The acquiring does not
wait. (If an interrupt came between the two, the lock is still taken, and then the release is the fence.) Should a bell be lost all
the same, a client that waits looks at the word and rings again each time its receive times out: a call may be late, and is never lost.

One call at a time. The client writes its half only after the last answer has come, and the worker writes its own only after the
next request has. But a message without an answer (a Release) may still lie in the socket when the next call is shown. The worker that
reads this packet then finds a word that belongs to the call, and must leave it: a reader acts on the word that it has looked at,
and does not load it again.

Trust. Either end may be malicious or dying, and what lies in the page can change while it is read. So heads and entries are copied
first and then checked, and tensors are copied out (see plans.py). A word that says more bytes than the half has is refused. Garbage in
a half harms nobody but its reader. A process that dies between frame and word has said nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import threading
from itertools import repeat
from os import sched_yield
from time import perf_counter
from typing import Any, Sequence

from gradwire_wire.errors import MemoryExhaustedError, ProtocolError
from gradwire_wire.interruption import came_from_handler
from gradwire_wire.lane import MAX_PACKET, NOWAIT, KeepingLane, Lane, socket_of
from gradwire_wire.segments import OwnSegment, SharedPage
from gradwire_wire.sockets import LONG, Again, Unreachable
from gradwire_wire.spin import Spin

__all__ = [
    "HALF",
    "PAGE_NBYTES",
    "ClientPage",
    "PageLane",
    "WorkerPage",
    "can_page",
    "page_lane_pair",
    "received_page_lane",
]

WORDS, HALF = 4096, 256 << 10
PAGE_NBYTES = WORDS + 2 * HALF
REQUEST, ANSWER, WORKER_AWAKE, CLIENT_AWAKE = 0, 8, 16, 24
BELL = b"\0"
PACKET = 16 << 10
"""Bytes of a short frame that may as well be a packet."""
COUNT_BITS = 24
COUNT = (1 << COUNT_BITS) - 1
ROUND = 200
"""Looks (40 ns each) between two at which other threads of this process may run."""
CLIENT_LOOKS, CLIENT_NEAR_S = 25000, 1200e-6
WORKER_LOOKS, WORKER_NEAR_S = 8000, 300e-6
"""Looks before a sleep, and how long waits may be on average for that: a worker looks about as long as they last, seldom in vain."""


def can_page() -> bool:
    """Whether this machine keeps the order of stores that pages need."""
    return platform.machine() in ("x86_64", "AMD64")


class PageLane(Lane):
    """One end of a lane with a page; `ClientPage` and `WorkerPage` are the two.

    is_awake: whether the peer may find this end looking: then it must `leave_off` before it sleeps.
    """

    room, inlined, max_message = HALF, HALF, HALF
    _out, _in, _mine, _theirs = REQUEST, ANSWER, CLIENT_AWAKE, WORKER_AWAKE

    def __init__(self, sock: socket.socket, page: SharedPage, receive_timeout_ms: int = 0) -> None:
        super().__init__(sock, receive_timeout_ms)
        memory = page.memory
        halves = memory[WORDS : WORDS + HALF], memory[WORDS + HALF :]
        self._packet = self.incoming
        self.outgoing, self.incoming = halves if self._out == REQUEST else halves[::-1]
        self._words = memory[:WORDS].cast("Q")
        self._seen = 0  # (not what is there: the client may have called before this end was made)
        self._number = 0
        fence = threading.Lock()
        self._fence_in, self._fence_out = fence.acquire, fence.release  # a with statement takes twice as long
        self._has_processors = len(os.sched_getaffinity(0)) >= 2
        self._sent_at = 0.0
        self.is_awake = False

    def _show(self, nbytes: int) -> None:
        """Show the peer a frame of so many bytes."""
        words = self._words
        words[self._out] = self._number << COUNT_BITS | nbytes
        self._fence_in(False)
        self._fence_out()
        if not words[self._theirs]:
            self._ring()

    def _ring(self) -> None:
        try:
            self._socket.send(BELL, NOWAIT)
        except OSError as error:
            if came_from_handler(error):
                raise
            if not isinstance(error, BlockingIOError):  # so much lies there that it is awake anyway
                raise Unreachable(str(error)) from error

    def _look(self, looks: int) -> bool:
        """Look for a new word so often; other threads of this process get their turns."""
        words, place, seen = self._words, self._in, self._seen
        if not self.is_awake:
            words[self._mine] = 1
            self.is_awake = True
        for _ in range(looks // ROUND):
            for _ in repeat(None, ROUND):
                if words[place] != seen:
                    return True
            sched_yield()
        return False

    def leave_off(self) -> bool:
        """From now on the peer rings. Whether a new word came before it knew that."""
        if self.is_awake:
            self._words[self._mine] = 0
            self.is_awake = False
            self._fence_in(False)
            self._fence_out()
        return self._words[self._in] != self._seen

    def _take(self) -> tuple[int, int]:
        """Number and bytes that the new word says; Unreachable where it says more than there can be."""
        word = self._seen = self._words[self._in]
        if word & COUNT > HALF:
            raise Unreachable("the peer shows a frame longer than its half of the page")
        return word >> COUNT_BITS, word & COUNT

    def _shown(self, nbytes: int) -> list[bytes] | int:
        """The frame of so many bytes that the peer shows: a message, or a short one's length."""
        incoming = self.incoming
        return [bytes(incoming[:nbytes])] if incoming[0] >= LONG else nbytes

    def _packet_or_bell(self, flags: int) -> list[bytes] | int | None:
        """The next frame by the socket; the length of a short one, which is put where it belongs; None for the bell.

        Again after the timeout, Unreachable once the peer is gone.
        """
        packet = self._packet
        count = self._receive_into(packet, flags)
        if packet[0] >= LONG:
            return [bytes(packet[:count])]
        if count == 1:
            return None
        self.incoming[:count] = packet[:count]
        return count


class ClientPage(PageLane):
    """The client's end. ``is_alone``: whether no other call of this process is in flight: only then it looks.

    _is_open: whether a call has no answer yet, as far as the page tells.
    """

    def __init__(self, sock: socket.socket, page: SharedPage, receive_timeout_ms: int) -> None:
        super().__init__(sock, page, receive_timeout_ms)
        self._spin = Spin(CLIENT_LOOKS, CLIENT_NEAR_S)
        self._is_open, self._looks = False, 0
        self._waits = 0  # for how long, in timeouts, the call that is open has waited

    def send_short_nowait(self, nbytes: int) -> None:
        """Send or show the short call that lies in ``outgoing``. Unreachable where the worker is gone and was asleep."""
        self._begin()
        if self._looks or nbytes > PACKET:
            self._show(nbytes)
        else:
            self._announce()
            self._send(self.outgoing[:nbytes])

    def send_nowait(self, frames: Sequence[bytes]) -> None:
        """Send a message by the page, or by the socket if its answer is not looked for. See `Lane.send_nowait`."""
        (frame,) = frames
        self._begin()
        if self._looks or len(frame) > MAX_PACKET:
            self.outgoing[: len(frame)] = frame
            self._show(len(frame))
        else:
            self._announce()
            self._send(frame)

    def tell_nowait(self, frames: Sequence[bytes]) -> None:
        """By the socket: the next call may be shown before the worker has read this. See `Lane.tell_nowait`."""
        (frame,) = frames
        self._begin()
        self._announce()
        self._send(frame)

    def _announce(self) -> None:
        """For a worker that looks at the page: a packet comes."""
        self._words[REQUEST] = self._number << COUNT_BITS

    def _begin(self) -> None:
        """The next call: its number, and whether its answer is to be looked for."""
        self._is_open = True
        self._waits = 0
        self._number += 1
        self._seen = self._words[ANSWER]
        self._looks = self._spin.looks() if self.is_alone and self._has_processors else 0
        self._sent_at = perf_counter()

    def receive(self) -> list[bytes] | int:
        """See `Lane.receive`."""
        if not self._is_open:
            return self._sleep()
        looks, self._looks = self._looks, 0
        is_here = (looks and self._look(looks)) or self.leave_off()
        received = self._answer() if is_here else self._sleep()
        self._spin.took(perf_counter() - self._sent_at, looks > 0)
        return received

    def _sleep(self) -> list[bytes] | int:
        while True:
            try:
                self._wait()
                received = self._packet_or_bell(NOWAIT)
            except Again:
                if not self._is_open or self._words[ANSWER] == self._seen:
                    self._ring_again()
                    raise
                received = None
            if received is not None:
                self._is_open = False
                return received
            if self._is_open and self._words[ANSWER] != self._seen:
                return self._answer()

    def _ring_again(self) -> None:
        """The rescue: should the worker sleep over a call, for whatever reason, it is woken late, but woken.

        Also once where it says that it is awake, for it may say so and have forgotten this page. Ever more rarely: a worker that
        computes for minutes reads no bells, and would have its socket full of them when the next call comes.
        """
        self._waits += 1
        is_time = not self._waits & (self._waits - 1)
        if self._is_open and is_time and (self._waits == 1 or not self._words[WORKER_AWAKE]):
            self._ring()

    def _answer(self) -> list[bytes] | int:
        self._is_open = False
        number, nbytes = self._take()
        if number != self._number:
            raise Unreachable("the worker's page answers another call")
        return self._shown(nbytes) if nbytes else self._sleep()  # nothing here: it is in the socket

    def receive_nowait(self) -> list[bytes] | int | None:
        """See `Lane.receive_nowait`."""
        try:
            while True:
                received = self._packet_or_bell(NOWAIT)
                if received is not None:
                    self._is_open = False
                    return received
        except Again:
            pass
        if not self._is_open or self._words[ANSWER] == self._seen:
            return None
        self._is_open = False
        number, nbytes = self._take()
        if number != self._number:
            raise Unreachable("the worker's page answers another call")
        return self._shown(nbytes) if nbytes else None


class WorkerPage(KeepingLane, PageLane):
    """The worker's end: in a poller with others. It looks for the next call between two polls, if that is worth it.

    was_packet: whether the last call came as a packet: then its client does not look either.
    """

    _out, _in, _mine, _theirs = ANSWER, REQUEST, WORKER_AWAKE, CLIENT_AWAKE

    def __init__(self, sock: socket.socket, page: SharedPage) -> None:
        super().__init__(sock, page)
        self.was_packet = False
        self._gap_s = 1.5 * WORKER_NEAR_S

    def send_short_nowait(self, nbytes: int) -> None:
        """Answer by the short frame in ``outgoing``, as the call came. Unreachable where the client is gone and was asleep."""
        if self.was_packet and nbytes <= PACKET:
            self._send(self.outgoing[:nbytes])
        else:
            self._show(nbytes)
        self._sent_at = perf_counter()

    def send_nowait(self, frames: Sequence[bytes]) -> None:
        """Send an answer: by the page to a client that looks there, else by the socket. See `Lane.send_nowait`."""
        (frame,) = frames
        if self._words[CLIENT_AWAKE] and len(frame) <= HALF and not self.backlog:
            self.outgoing[: len(frame)] = frame
            self._show(len(frame))
        else:
            self._words[ANSWER] = self._number << COUNT_BITS
            self._send(frame)
        self._sent_at = perf_counter()

    def is_next_here(self) -> bool:
        """Look for the next call for a while, if it may come soon; then leave off."""
        is_worth_it = self._gap_s <= WORKER_NEAR_S and self._has_processors and not self.was_packet
        return (is_worth_it and self._look(WORKER_LOOKS)) or self.leave_off()

    def next(self) -> list[bytes] | int | None:
        """The length of the short call that was seen, or the message that is there instead; None where nothing is yet."""
        self._number, nbytes = self._take()
        self._note_gap()
        if not nbytes:
            return self._announced()
        self.was_packet = False
        return self._shown(nbytes)

    def _announced(self) -> list[bytes] | int | None:
        """The packet that the word has announced. None where it does not come at once: then the poller will see it."""
        for _ in range(ROUND):
            with contextlib.suppress(Again):
                received = self._packet_or_bell(NOWAIT)
                if received is not None:
                    self.was_packet = type(received) is int
                    return received
        return None

    def _note_gap(self) -> None:
        gap_s = min(perf_counter() - self._sent_at, 1.5 * WORKER_NEAR_S)
        self._gap_s += (gap_s - self._gap_s) / 4

    def receive_nowait(self) -> list[bytes] | int | None:
        """See `Lane.receive_nowait`: what the poller has seen, a message or the bell."""
        try:
            received = self._packet_or_bell(NOWAIT)
        except Again:
            received = None
        if received is not None:
            # Read once: a call may be shown meanwhile, whose word must not be taken for this.
            word = self._words[REQUEST]
            if not word & COUNT:  # which has announced it; otherwise a call came behind it by the page
                self._seen, self._number = word, word >> COUNT_BITS
            self._note_gap()
            self.was_packet = type(received) is int
            return received
        return self.next() if self._words[REQUEST] != self._seen else None


def page_lane_pair(receive_timeout_ms: int) -> tuple[ClientPage, Any, OwnSegment]:
    """A client's end; and what is to be passed on and then closed: the other socket, and the page.

    OSError, MemoryExhaustedError or SharingUnavailableError where these cannot be had.
    """
    segment = OwnSegment(0, PAGE_NBYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return ClientPage(ours, SharedPage.of(segment), receive_timeout_ms), theirs, segment


def received_page_lane(sock: int, page: int) -> WorkerPage | None:
    """The worker's end (takes over both descriptors); None where these are no lane and page."""
    found = socket_of(sock)
    try:
        shared = SharedPage.received(page, PAGE_NBYTES)
    except (ProtocolError, MemoryExhaustedError):
        shared = None
    if found is None or shared is None:
        if found is not None:
            found.close()
        return None
    return WorkerPage(found, shared)
