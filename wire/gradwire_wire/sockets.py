"""The one file that touches ZeroMQ.

Theory of operation. One context per process, never terminated: ``linger`` is 0 on every socket, so
that leaving the interpreter waits for nobody (``ctx.term()`` and the default linger can each hang
for ever). A socket is used by one thread at a time; whoever passes one on does so under the GIL or
a lock, which is the full fence that libzmq asks for. Nothing here ever blocks without a timeout or
sends without NOBLOCK where a peer could refuse to read.

At ``tcp://`` there is no socket without CURVE: both ends prove that they have the secret of a known public key,
and all bytes are encrypted. Whose key may come in is for a ZAP handler to say (`Gatekeeper`); libzmq by itself would let
every key in. A server's sockets demand the handler, so where it is missing nobody gets in.

A context does not survive ``fork``: the child gets a context of its own at its next use, and the
parent's sockets are never touched there (a child that uses them spins for ever).
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from socket import socketpair
from typing import Any, Callable, NamedTuple, Optional, Sequence

import zmq
import zmq.backend

from gradwire_wire.errors import UsageError
from gradwire_wire.interruption import came_from_handler
from gradwire_wire.messages import MAX_FRAME
from gradwire_wire.process import check_threads
from gradwire_wire.tether import OwnedSocket

__all__ = [
    "IN",
    "LONG",
    "OUT",
    "Addressee",
    "Again",
    "ClientKeys",
    "Dealer",
    "FarEnd",
    "Gatekeeper",
    "PipelineDealer",
    "Poller",
    "ServerKey",
    "Socket",
    "SocketError",
    "Unreachable",
    "address_of",
    "bind_router",
    "connect_dealer",
    "context",
    "is_address",
    "new_keys",
    "receive",
    "receive_nowait",
    "send_nowait",
]

IN, OUT = zmq.POLLIN, zmq.POLLOUT
LONG = 0x80
"""A message's first byte is this or more, and that of a short frame (see plans.py) is less."""
ROOM, INLINED = 256 << 10, 64 << 10
"""Bytes of a short frame by ZeroMQ, and of a tensor in it: to lend 128 KiB takes as long as libzmq's copies of them."""
Poller = zmq.Poller
Socket = zmq.Socket
SocketError = zmq.ZMQError
Again = zmq.Again

# pyzmq's own layer under its Socket: the layer above looks up enumerations at each call (5 µs against 1)
_send, _recv = zmq.backend.Socket.send, zmq.backend.Socket.recv
_NOWAIT, _MORE_NOWAIT = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

THREADS = 2
"""Of libzmq. Where it cannot start them, with its first socket, it ends the process."""
BEAT_MS, SILENCE_MS = 2000, 10_000
ZAP_DOMAIN = b"gradwire"

_contexts: dict[int, Any] = {}


class ServerKey(NamedTuple):
    """The secret of a binding socket's key, in Z85. Whoever connects must be let in by a `Gatekeeper`."""

    secret: str


class ClientKeys(NamedTuple):
    """What a connecting socket needs, in Z85: its own pair, and the public key that the other end must prove to have."""

    public: str
    secret: str
    server: str


class Unreachable(Exception):
    """The addressee of a ROUTER is gone, or does not read its replies: drop the message."""


def context() -> Any:
    """This process's context (made at the first use in the process). MemoryExhaustedError where its threads cannot be started."""
    pid = os.getpid()
    made = _contexts.get(pid)
    if made is None:
        check_threads(THREADS)
        made = zmq.Context()
        made.linger = 0
        made.set(zmq.MAX_SOCKETS, 16384)
        _contexts[pid] = made
    return made


def is_address(address: str) -> bool:
    """Whether it can be one at tcp: a host's name or number, IPv6's in brackets, and a port."""
    found = re.fullmatch(r"tcp://(?:[\w.-]+|\[[\w:.%]+\]):(\d{1,5})", address, re.ASCII)
    return found is not None and 0 < int(found[1]) < 1 << 16


def bind_router(address: str, key: Optional[ServerKey] = None) -> Any:
    """A bound ROUTER that refuses unroutable messages and bounds the queue of each client.

    UsageError for an address at tcp without a key; SocketError where it is taken.
    """
    _check_not_in_the_clear(address, key)
    socket = _made(zmq.ROUTER, address)
    if key is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without the handler nobody gets in
        _beat(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 10000)
    try:
        socket.bind(address)
    except BaseException:
        socket.close()
        raise
    return socket


def address_of(router: Any) -> str:
    """Where a router is bound; for ``tcp://HOST:*`` with the port it got."""
    return str(router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())


def connect_dealer(
    address: str,
    identity: bytes,
    receive_timeout_ms: int = -1,
    keys: Optional[ClientKeys] = None,
    before: Optional[Callable[[Any], object]] = None,
) -> Any:
    """A DEALER under an identity of its own, connecting; receives wait at most ``receive_timeout_ms``.

    before: is given the socket before it begins to. UsageError for an address at tcp without keys.
    """
    _check_not_in_the_clear(address, keys)
    socket = _made(zmq.DEALER, address)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
        _beat(socket)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RCVTIMEO, receive_timeout_ms)
    if before is not None:
        before(socket)
    socket.connect(address)
    return socket


def _made(kind: int, address: str) -> Any:
    """A socket for an address of that kind. (With IPv6 also for others, names would be looked up otherwise.)"""
    socket = context().socket(kind)
    socket.linger = 0
    socket.setsockopt(zmq.IPV6, address.startswith("tcp://["))
    return socket


def _wait(socket: Any) -> None:
    socket.setsockopt(zmq.IMMEDIATE, 1)


def _check_not_in_the_clear(address: str, keys: Any) -> None:
    if not address.startswith("ipc://") and keys is None:
        raise UsageError(
            f"{address} would be in the clear, for everyone to read and to call: gradwire uses tcp only with keys. Make them "
            "with `gradwire keys create DIR`; a client names its folder in GRADWIRE_KEYS"
        )


def _beat(socket: Any) -> None:
    """A peer or a network that is silent for so long is gone; TCP alone would notice after hours."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


def new_keys() -> tuple[str, str]:
    """A new key: public and secret part, in Z85. UsageError where this libzmq has no CURVE."""
    try:
        public, secret = zmq.curve_keypair()
    except zmq.ZMQError as error:
        raise UsageError("this libzmq was built without CURVE; install pyzmq from its own wheel") from error
    return public.decode(), secret.decode()


class Gatekeeper:
    """ZAP (ZeroMQ's RFC 27): says whose public key may come in. One in a process, before its tcp sockets are bound.

    Its ``socket`` belongs into the poller of the thread that made it; `answer` whenever it is readable.
    """

    def __init__(self, is_known: Callable[[str], bool]) -> None:
        """is_known: whether a public key (Z85) may come in; asked at every handshake."""
        self._is_known = is_known
        self.socket = context().socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer all that wait. What is no question of ZAP is dropped, which keeps its asker out."""
        while (frames := receive_nowait(self.socket)) is not None:
            if len(frames) < 8 or frames[2] != b"1.0":
                continue
            may = frames[4] == ZAP_DOMAIN and frames[7] == b"CURVE" and self._knows(frames[8:])
            status, text = (b"200", b"OK") if may else (b"400", b"unknown key")
            with contextlib.suppress(Unreachable):
                send_nowait(self.socket, [frames[0], b"", b"1.0", frames[3], status, text, b"", b""])

    def _knows(self, credentials: Sequence[bytes]) -> bool:
        if len(credentials) != 1 or len(credentials[0]) != 32:
            return False
        from zmq.utils import z85

        try:
            return self._is_known(z85.encode(credentials[0]).decode())
        except Exception:  # a folder that cannot be read lets nobody in
            return False


class FarEnd:
    """What becomes of a DEALER's connection at tcp: ``socket`` is readable when there is news."""

    def __init__(self, dealer: Any) -> None:
        """Before the first message; the dealer's own thread."""
        self._dealer = dealer
        self._was_there = False
        self.socket = dealer.get_monitor_socket()

    def end(self) -> str:
        """Why the connection is over; "" where it is not, as far as the news goes. Never waits."""
        from zmq.utils.monitor import recv_monitor_message

        while self.socket.poll(0):
            event = recv_monitor_message(self.socket, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._was_there = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return "it does not know this client's key: its public part must be in the folder server/clients there"
            elif event == zmq.EVENT_CONNECT_RETRIED and not self._was_there:
                return "nobody listens there"
            elif event in (
                zmq.EVENT_DISCONNECTED,
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            ):
                if self._was_there:
                    return "the connection broke"
                return "it hung up during the handshake: is it a gradwire broker, and is server.key its public key?"
        return ""

    def close(self) -> None:
        """Before the dealer is closed."""
        self._dealer.disable_monitor()
        self.socket.close(0)


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


class _Line:
    """What a ZeroMQ line keeps for plans; see `gradwire_wire.lane.Lane`, which has the same. Buffers are made when used."""

    room, inlined, most_held = ROOM, INLINED, ROOM

    def __init__(self) -> None:
        self.plans: dict[Any, Any] = {}
        self._incoming: Any = None
        self._outgoing: Any = None

    @property
    def incoming(self) -> memoryview:
        if self._incoming is None:
            self._incoming = memoryview(bytearray(ROOM))
        return self._incoming

    @property
    def outgoing(self) -> memoryview:
        if self._outgoing is None:
            self._outgoing = memoryview(bytearray(ROOM))
        return self._outgoing

    def take_short(self, frames: list[bytes]) -> list[bytes] | int:
        """The frames of a message; or a short frame's length, which lies in ``incoming`` then."""
        first = frames[0]
        if len(frames) > 1 or not first or first[0] >= LONG or len(first) > ROOM:
            return frames
        self.incoming[: len(first)] = first
        return len(first)


class Dealer(_Line):
    """A DEALER as one way to send a call and wait for its reply; `gradwire_wire.lane.Lane` is the other.

    Used by one thread at a time.
    """

    def __init__(
        self,
        address: str,
        identity: bytes,
        receive_timeout_ms: int,
        keys: Optional[ClientKeys] = None,
        waits: bool = False,
    ) -> None:
        """waits: nothing can be sent before it is connected (see `is_connected`); otherwise what is sent waits for that."""
        super().__init__()
        self._socket = connect_dealer(address, identity, receive_timeout_ms, keys, _wait if waits else None)
        self._timeout_ms = receive_timeout_ms

    def is_connected(self, timeout_ms: int) -> bool:
        """Whether it is, of one that ``waits``, after so long at most. libzmq's own thread opens the connection: without a
        descriptor for it that is tried again and again, and nobody is told."""
        return bool(self._socket.poll(timeout_ms, zmq.POLLOUT))

    def send_nowait(self, frames: Sequence[Any]) -> None:
        """Send without ever blocking; Unreachable where the queue is full."""
        send_nowait(self._socket, frames)

    def tell_nowait(self, frames: Sequence[Any]) -> None:
        """See `gradwire_wire.lane.Lane.tell_nowait`."""
        send_nowait(self._socket, frames)

    def send_short_nowait(self, nbytes: int) -> None:
        """Send the short frame that lies in ``outgoing``; otherwise as `send_nowait`."""
        send_nowait(self._socket, (self.outgoing[:nbytes],))

    def receive(self) -> list[bytes] | int:
        """The next message's frames, or the length of a short frame. Again after the timeout, whatever signals come meanwhile.

        (The socket's own timeout would begin anew after each; see `gradwire_wire.lane.Lane`.)
        """
        if not zmq.zmq_poll([(self._socket, IN)], self._timeout_ms):
            raise Again
        return self.take_short(_receive(self._socket, _NOWAIT))

    def receive_nowait(self) -> list[bytes] | int | None:
        """The next message's frames, or the length of a short frame, or None."""
        frames = receive_nowait(self._socket)
        return None if frames is None else self.take_short(frames)

    def close(self) -> None:
        """Close the socket; what was not sent yet is dropped."""
        self._socket.close()


class PipelineDealer(Dealer):
    """A DEALER with many calls under way; `gradwire_wire.lane.Lane` is the other line that can have them.

    One thread, its reader, sends and receives. Any other may only tell it that there is something to send. (So no handler of
    signals comes between the sending of a frame and the note that it was sent: the reader is never the main thread.)
    """

    takes_batches = False

    def __init__(
        self, address: str, identity: bytes, receive_timeout_ms: int, *, waits: bool = False
    ) -> None:
        """See `Dealer`. SocketError or OSError where this process has no descriptors for it."""
        self._alarm, self._bell = map(_unblocked, socketpair())
        super().__init__(address, identity, receive_timeout_ms, waits=waits)
        self._reader = 0
        self._lock = threading.RLock()  # held to ring, and to close: descriptors have new owners soon

    def begin(self) -> None:
        """This thread is the reader from now on."""
        self._reader = threading.get_ident()

    def may_send(self) -> bool:
        """Whether this thread sends. If not, the reader's `receive` ends soon, and it looks what there is to send."""
        if self._reader == threading.get_ident():
            return True
        with self._lock:
            try:
                self._bell.send(b"!")
            except OSError as error:  # it has rung often enough, or is closed
                if came_from_handler(error):
                    raise
        return False

    def largest_packet(self) -> int:
        """Bytes of the largest frame."""
        return ROOM

    def send_and_note(self, frame: bytes, note: Callable[[Any], Any], value: Any) -> bool:
        """Send, and then ``note(value)``; False where the queue is full. By the reader."""
        try:
            send_nowait(self._socket, (frame,))
        except Unreachable:
            return False
        note(value)
        return True

    def receive(self) -> list[bytes] | int:
        """As `Dealer.receive`; Again, too, when there is something to send."""
        received = self.receive_nowait()
        if received is not None:
            return received
        ready = dict(zmq.zmq_poll([(self._socket, IN), (self._alarm.fileno(), IN)], self._timeout_ms))
        if self._alarm.fileno() in ready:
            self._alarm.recv(4096)
        received = self.receive_nowait() if self._socket in ready else None
        if received is None:
            raise Again
        return received

    def close(self) -> None:
        """See `Dealer.close`."""
        super().close()
        with self._lock:
            self._alarm.close()
            self._bell.close()


def _unblocked(sock: Any) -> OwnedSocket:
    made = OwnedSocket(fileno=sock.detach())
    made.setblocking(False)
    return made


class Addressee(_Line):
    """Who sends messages to a ROUTER by one DEALER, as a way to answer."""

    def __init__(self, router: Any, identity: bytes) -> None:
        super().__init__()
        self._identity, self._router = identity, router

    def send_nowait(self, frames: Sequence[Any]) -> None:
        """Answer without ever blocking; Unreachable where the client is gone or does not read."""
        send_nowait(self._router, [self._identity, *frames])

    def send_short_nowait(self, nbytes: int) -> None:
        """Answer with the short frame that lies in ``outgoing``; otherwise as `send_nowait`."""
        send_nowait(self._router, (self._identity, self.outgoing[:nbytes]))


def _receive(socket: Any, flags: int) -> list[bytes]:
    frame = _recv(socket, flags, False)
    frames: list[bytes] = [frame.bytes]
    while frame.more:
        frame = _recv(socket, flags, False)
        frames.append(frame.bytes)
    return frames
