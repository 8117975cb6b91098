"""The one file that touches ZeroMQ.

Theory of operation. One context per process, never terminated: ``linger`` is 0 on every socket, so
that leaving the interpreter waits for nobody (``ctx.term()`` and the default linger can each hang
for ever). A socket is used by one thread at a time; whoever passes one on does so under the GIL or
a lock, which is the full fence that libzmq asks for. Nothing here ever blocks without a timeout or
sends without NOBLOCK where a peer could refuse to read.

A context does not survive ``fork``: the child gets a context of its own at its next use, and the
parent's sockets are never touched there (a child that uses them spins for ever).
"""

from __future__ import annotations

import os
from typing import Any, Sequence

import zmq
import zmq.backend

from gradwire_wire.messages import MAX_FRAME

__all__ = [
    "IN",
    "Addressee",
    "Again",
    "Dealer",
    "Poller",
    "Socket",
    "SocketError",
    "Unreachable",
    "bind_router",
    "connect_dealer",
    "context",
    "receive",
    "receive_nowait",
    "send_nowait",
]

IN = zmq.POLLIN
Poller = zmq.Poller
Socket = zmq.Socket
SocketError = zmq.ZMQError
Again = zmq.Again

# pyzmq's own layer under its Socket: the layer above looks up enumerations at each call (5 µs against 1)
_send, _recv = zmq.backend.Socket.send, zmq.backend.Socket.recv
_NOWAIT, _MORE_NOWAIT = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

_contexts: dict[int, Any] = {}


class Unreachable(Exception):
    """The addressee of a ROUTER is gone, or does not read its replies: drop the message."""


def context() -> Any:
    """This process's context (made at the first use in the process)."""
    pid = os.getpid()
    made = _contexts.get(pid)
    if made is None:
        made = zmq.Context()
        made.linger = 0
        made.set(zmq.MAX_SOCKETS, 16384)
        _contexts[pid] = made
    return made


def bind_router(address: str) -> Any:
    """A bound ROUTER that refuses unroutable messages and bounds the queue of each client."""
    socket = context().socket(zmq.ROUTER)
    socket.linger = 0
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 10000)
    socket.bind(address)
    return socket


def connect_dealer(address: str, identity: bytes, receive_timeout_ms: int = -1) -> Any:
    """A connected DEALER under an identity of its own; receives wait at most ``receive_timeout_ms``."""
    socket = context().socket(zmq.DEALER)
    socket.linger = 0
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RCVTIMEO, receive_timeout_ms)
    socket.connect(address)
    return socket


def send_nowait(socket: Any, frames: Sequence[Any]) -> None:
    """Send without ever blocking; Unreachable where the peer is gone or its queue is full."""
    try:
        for frame in frames[:-1]:
            _send(socket, frame, _MORE_NOWAIT)
        _send(socket, frames[-1], _NOWAIT)
    except zmq.Again as error:
        raise Unreachable("the peer does not read its messages") from error
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            raise Unreachable("the peer is gone") from error
        raise


def receive(socket: Any) -> list[bytes]:
    """The next message's frames; Again after the socket's receive timeout."""
    return _receive(socket, 0)


def receive_nowait(socket: Any) -> list[bytes] | None:
    """The next message's frames, or None where there is none."""
    try:
        return _receive(socket, _NOWAIT)
    except zmq.Again:
        return None


class Dealer:
    """A DEALER as one way to send a call and wait for its reply; `gradwire_wire.lane.Lane` is the other.

    Used by one thread at a time.
    """

    def __init__(self, address: str, identity: bytes, receive_timeout_ms: int) -> None:
        self._socket = connect_dealer(address, identity, receive_timeout_ms)

    def send_nowait(self, frames: Sequence[Any]) -> None:
        """Send without ever blocking; Unreachable where the queue is full."""
        send_nowait(self._socket, frames)

    def receive(self) -> list[bytes]:
        """The next message's frames. Again after the timeout."""
        return _receive(self._socket, 0)

    def receive_nowait(self) -> list[bytes] | None:
        """The next message's frames, or None where there is none."""
        return receive_nowait(self._socket)

    def close(self) -> None:
        """Close the socket; what was not sent yet is dropped."""
        self._socket.close()


class Addressee:
    """Who sent a message to a ROUTER, as a way to answer."""

    __slots__ = ("_identity", "_router")

    def __init__(self, router: Any, identity: bytes) -> None:
        self._router, self._identity = router, identity

    def send_nowait(self, frames: Sequence[Any]) -> None:
        """Answer without ever blocking; Unreachable where the client is gone or does not read."""
        send_nowait(self._router, [self._identity, *frames])


def _receive(socket: Any, flags: int) -> list[bytes]:
    frame = _recv(socket, flags, False)
    frames: list[bytes] = [frame.bytes]
    while frame.more:
        frame = _recv(socket, flags, False)
        frames.append(frame.bytes)
    return frames
