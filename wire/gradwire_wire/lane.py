"""Lanes: the same frames through a pair of Unix ``SOCK_SEQPACKET`` sockets, between two processes of one machine.

Theory of operation. ZeroMQ hands every message to a thread of its own on either side, so that a round trip wakes
four threads. A lane is a connected pair of sockets: one write wakes the one thread that waits. The client makes
the pair, keeps one end and passes the other over the tether; the worker polls it beside its other sockets. A
lane carries one call at a time, in the protocol's own frame, one packet each way (but for the one lane by which a
client submits: there are many under way there, and a packet may be a batch, see batches.py)::

    client                                   worker
    send_nowait(frame)  ──── packet ────►    poll, receive_nowait
    receive()           ◄─── packet ────     send_nowait(frame)

The kernel gives the rest: a packet is whole or not there, its bytes are a copy that nobody can change any more,
the end of the peer is an end of file, and send and receive order memory. A frame longer than a packet may be does not
go by lane: the client sends it by ZeroMQ, the worker puts it into shared memory and sends `messages.Long`.
Either end may be malicious or dying: it can send packets that are refused, or close.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections import deque
from itertools import chain
from typing import Any, Callable, Sequence

from gradwire_wire.batches import SHORT_BATCH, frames_in
from gradwire_wire.errors import ProtocolError
from gradwire_wire.interruption import came_from_handler
from gradwire_wire.sockets import LONG, Again, Unreachable
from gradwire_wire.tether import OwnedSocket

__all__ = [
    "MAX_PACKET",
    "NOWAIT",
    "KeepingLane",
    "Lane",
    "TooLong",
    "WorkerLane",
    "lane_pair",
    "received_lane",
    "socket_of",
]

MAX_PACKET = 64 << 10
"""Bytes of a frame that may go by lane; a socket's buffer takes about 200 KiB."""


PACKET_HEAD = 32
"""Bytes that the kernel wants beside a packet in a socket's buffer."""
MAX_BACKLOG = 256
"""Answers that wait in the worker for a client that has so many calls under way on one lane."""

# as plain numbers: the enumerations behind these names take 2 µs to combine
_TOO_LONG = (errno.EMSGSIZE, errno.ENOBUFS, errno.ENOMEM)
NOWAIT, _SEND = int(socket.MSG_DONTWAIT), int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class TooLong(Exception):
    """The system does not take this packet (it has small buffers, is short of them, or they are full): go another way."""


class Lane:
    """One end. Used by one thread at a time.

    incoming, outgoing: where short frames lie (see plans.py): the last one received, until the next is; and the
    next one to send. plans: what both ends have agreed on. inlined: tensors up to so many bytes travel in them.
    is_alone: whether no other call of this process is in flight; of use to lanes with a page.
    max_message: bytes that a call's message may have to go by this lane. takes_batches: whether a packet may be several frames.
    most_held: bytes of an answer that may wait here for those of the next calls; for lanes that have such calls.
    The rest: see `KeepingLane`, `WorkerLane`.
    """

    is_alone = takes_batches = True
    is_pipelined = has_more = False
    backlog: Any = ()
    most_held = 0
    room = max_message = MAX_PACKET
    inlined = 16 << 10

    def __init__(self, sock: socket.socket, receive_timeout_ms: int = 0) -> None:
        """Takes over the socket. ``receive_timeout_ms``: what `receive` waits at most."""
        self._socket = sock = OwnedSocket(fileno=sock.detach())
        self.incoming, self.outgoing = (
            memoryview(bytearray(MAX_PACKET + 1)),
            memoryview(bytearray(MAX_PACKET)),
        )
        self.plans: dict[Any, Any] = {}
        sock.setblocking(True)  # whatever the program's default is: no call here waits by itself
        self._timeout_ms, self._poller = receive_timeout_ms, select.poll()
        self._poller.register(sock.fileno(), select.POLLIN)

    def fileno(self) -> int:
        """For a poller; -1 once closed."""
        return self._socket.fileno()

    def largest_packet(self) -> int:
        """Bytes of the largest packet that the system will ever take here."""
        room: int = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - PACKET_HEAD
        return min(MAX_PACKET, room)

    def send_nowait(self, frames: Sequence[bytes]) -> None:
        """Send the one frame without ever blocking; Unreachable where the peer is gone. TooLong, also where it has not read enough."""
        (frame,) = frames
        self._send(frame)

    def tell_nowait(self, frames: Sequence[bytes]) -> None:
        """`send_nowait` for a message that has no answer: the next call may follow at once."""
        self.send_nowait(frames)

    def _send(self, frame: Any) -> None:
        if not self.send_if_room(frame):  # it lives, as far as one can tell: it may be reached another way
            raise TooLong("the peer has not read what was sent before")

    def send_short_nowait(self, nbytes: int) -> None:
        """Send the short frame that lies in ``outgoing``; otherwise as `send_nowait`."""
        self._send(self.outgoing[:nbytes])

    def send_if_room(self, packet: bytes) -> bool:
        """Send a packet; False where the peer has not read enough of the earlier ones. Unreachable, TooLong."""
        try:
            self._socket.send(packet, _SEND)
        except OSError as error:
            return _refused(error)
        return True

    def begin(self) -> None:
        """This thread receives from now on."""

    def may_send(self) -> bool:
        """Whether this thread may call `send_and_note`: see `gradwire_wire.sockets.PipelineDealer`."""
        return True

    def send_and_note(self, packet: bytes, note: Callable[[Any], Any], value: Any) -> bool:
        """As `send_if_room`, and then ``note(value)``: both or none, whatever a handler of signals raises meanwhile.

        Handlers run between the interpreter's steps, and there is none between these two. So note must be a function in C, such as
        a list's append. This is the only method that another thread than the receiver's may call.
        """
        steps = chain(map(self._socket.send, (packet,), (_SEND,)), map(note, (value,)))
        try:
            deque(steps, 0)
        except OSError as error:
            return _refused(error)
        return True

    def keep(self, frame: Any) -> None:
        """See `KeepingLane.keep`."""
        raise Unreachable("this end keeps nothing")

    def flush(self) -> None:
        """See `KeepingLane.flush`."""

    def receive(self) -> list[bytes] | int:
        """The next frame, or the length of a short one. Again after the timeout; Unreachable once the peer is gone."""
        self._wait()
        return self._receive(NOWAIT)

    def _wait(self) -> None:
        """Until there is something to receive, or Again after the timeout, however many signals come meanwhile.

        (A receive with a timeout of the kernel's takes 0.7 µs less, and begins it anew after each signal that is handled: with a
        timer's or a profiler's, every few milliseconds, it would not end.)
        """
        if not self._poller.poll(self._timeout_ms):
            raise Again

    def receive_nowait(self) -> list[bytes] | int | None:
        """The next frame, or the length of a short one, or None. Unreachable once the peer is gone."""
        try:
            return self._receive(NOWAIT)
        except Again:
            return None

    def _receive(self, flags: int) -> list[bytes] | int:
        incoming = self.incoming
        count = self._receive_into(incoming, flags)
        return count if incoming[0] < LONG else [bytes(incoming[:count])]

    def _receive_into(self, buffer: memoryview, flags: int) -> int:
        """Bytes of the next packet."""
        try:
            try:
                count = self._socket.recv_into(buffer, 0, flags)
            except ConnectionResetError as error:
                if came_from_handler(error):
                    raise
                # the peer ended with something unread: what it had said comes after this error
                count = self._socket.recv_into(buffer, 0, flags)
        except OSError as error:
            if came_from_handler(error):
                raise
            if isinstance(error, BlockingIOError):
                raise Again from None
            raise Unreachable(str(error)) from error
        if not count or count > MAX_PACKET:
            raise Unreachable("the peer has gone" if not count else "the peer sent too long a packet")
        return count

    def close(self) -> None:
        """Close this end; the peer sees end of file."""
        self._socket.close()
        self.plans.clear()  # which know this lane, and keep its page mapped


class KeepingLane(Lane):
    """A worker's end: no answer is lost because the socket is full, for a client that lives waits for it.

    backlog: answers that the socket did not take yet, at most `MAX_BACKLOG`; `flush` once it is writable.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.backlog = deque()
        self._most = self.largest_packet()

    def _send(self, frame: Any) -> None:
        """Send, or keep until the client has read more. TooLong; Unreachable where it has read nothing for too long."""
        if self.backlog and len(frame) > self._most:  # kept, it would never go, nor what comes after it
            raise TooLong("the system has small buffers")
        if self.backlog or not self.send_if_room(frame):
            self.keep(frame)

    def keep(self, frame: Any) -> None:
        """Send it once there is room: also what the system was too short of memory to take. Unreachable as `_send`."""
        if len(self.backlog) >= MAX_BACKLOG:
            raise Unreachable("the client does not read its answers")
        self.backlog.append(bytes(frame))

    def flush(self) -> None:
        """Send what the socket takes of the backlog. Unreachable once the peer is gone."""
        backlog = self.backlog
        try:
            while backlog and self.send_if_room(backlog[0]):
                backlog.popleft()
        except TooLong:  # the system is short of buffers: later
            pass


class WorkerLane(KeepingLane):
    """The worker's end. A client that submits has many calls under way here, and batches may come.

    is_pipelined: whether one has. has_more: whether frames of the last one are left, which no poller sees.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.most_held = self._most  # a longer one has to go another way
        self._frames: deque[bytes] = deque()

    def receive_nowait(self) -> list[bytes] | int | None:
        """See `Lane.receive_nowait`; the frames of a batch one by one."""
        if not self._frames:
            received = super().receive_nowait()
            if type(received) is not int or self.incoming[0] != SHORT_BATCH:
                return received
            try:
                self._frames.extend(frames_in(bytes(self.incoming[:received])))
            except ProtocolError as error:
                raise Unreachable(str(error)) from error
            self.is_pipelined = True
        frame = self._frames.popleft()
        self.has_more = bool(self._frames)
        if frame[0] >= LONG:
            return [frame]
        self.incoming[: len(frame)] = frame
        return len(frame)


def _refused(error: OSError) -> bool:
    """What a packet that was not taken means: False for "not now". What a handler of signals raised is raised as it is."""
    if came_from_handler(error):
        raise error
    if isinstance(error, BlockingIOError):
        return False
    if error.errno in _TOO_LONG:
        raise TooLong(str(error)) from error
    raise Unreachable(str(error)) from error


def lane_pair(receive_timeout_ms: int) -> tuple[Lane, Any]:
    """A client's end, and the socket that is to be passed on and then closed. OSError where none can be had."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Lane(ours, receive_timeout_ms), theirs


def received_lane(descriptor: int) -> WorkerLane | None:
    """The worker's end (takes over the descriptor); None where it is no such socket."""
    sock = socket_of(descriptor)
    return None if sock is None else WorkerLane(sock)


def socket_of(descriptor: int) -> socket.socket | None:
    """A received descriptor as a lane's socket (takes it over); None where it is none."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        return None
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
        sock.close()
        return None
    return sock
