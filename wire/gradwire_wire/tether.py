"""The tether: a Unix ``SOCK_SEQPACKET`` socket between a client process and a worker.

It carries segment descriptors (SCM_RIGHTS), proves who the peer is (SO_PEERCRED), and its end of
file is the news that the peer is dead, or looks at no slot of ours any more. A packet that was sent
has arrived: whoever meets an unknown segment number in a header drains the tether and then either
knows the segment or refuses the header.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
import time
from typing import Any, Sequence

from gradwire_wire import messages
from gradwire_wire.errors import ConnectError, DeadlineError, MemoryExhaustedError, ProtocolError
from gradwire_wire.interruption import came_from_handler, postpone
from gradwire_wire.process import check_descriptors, lacks_descriptors

__all__ = ["OwnedSocket", "Tether", "TetherClosedError", "accept_tether", "connect_tether", "listen_tether"]

MAX_PACKET = 4096
MAX_DESCRIPTORS = 4
MOST_AT_ONCE = 2  # a lane's socket and its page
RIGHTS_BYTES = socket.CMSG_LEN(MAX_DESCRIPTORS * array.array("i").itemsize)
FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)
OVER = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)


class TetherClosedError(Exception):
    """The peer is gone."""


class OwnedSocket(socket.socket):
    """Closed with the object, on purpose and so without a warning, also at the interpreter's exit."""

    def __del__(self, postpone: Any = postpone) -> None:
        try:
            self.close()
        except AttributeError:  # it was interrupted while it was made
            super(socket.socket, self).close()
        except BaseException as error:  # of a handler of signals
            postpone(error)


class Tether:
    """One end; takes over the socket. Packets are messages of `gradwire_wire.messages`; descriptors arrive close-on-exec."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = OwnedSocket(fileno=sock.detach())
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.peer_pid, self.peer_uid, _ = struct.unpack("=iII", credentials)

    def fileno(self) -> int:
        """For a poller; -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Any, descriptors: Sequence[int] = (), timeout_s: float = 10.0) -> None:
        """Send one packet; waits while the peer's queue is full. DeadlineError, TetherClosedError."""
        try:
            self._send(message, descriptors, timeout_s)
        except OSError as error:
            if came_from_handler(error, 1):
                raise
            if isinstance(error, (BlockingIOError, socket.timeout)):
                raise DeadlineError(
                    f"the peer has not read its tether for {timeout_s} s; is it stopped?"
                ) from error
            raise TetherClosedError(str(error)) from error

    def send_nowait(self, message: Any, descriptors: Sequence[int] = ()) -> bool:
        """Send one packet if that needs no waiting. False: the queue is full, or the peer is gone."""
        try:
            self._send(message, descriptors, 0)
        except OSError as error:
            if came_from_handler(error, 1) or not (error.errno in FULL or error.errno in OVER):
                raise
            return False
        return True

    def _send(self, message: Any, descriptors: Sequence[int], timeout_s: float) -> None:
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        self._socket.settimeout(timeout_s)
        self._socket.sendmsg([messages.pack(message)], rights, socket.MSG_NOSIGNAL)

    def receive(self, timeout_s: float) -> tuple[Any, list[int]] | None:
        """The next packet and its descriptors, or None after ``timeout_s`` (0: do not wait).

        The caller owns the descriptors. TetherClosedError at end of file; ProtocolError for what is no message;
        MemoryExhaustedError where this process has no descriptor left for what may come along: then nothing was read.
        """
        self._check_room()
        try:
            self._socket.settimeout(timeout_s)
            packet, rights, flags, _ = self._receive()
        except OSError as error:
            if came_from_handler(error, 1):
                raise
            if isinstance(error, (BlockingIOError, socket.timeout)):
                return None
            raise TetherClosedError(str(error)) from error
        descriptors = _descriptors_in(rights)
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError("a packet or its descriptors were cut short; are too many files open?")
            if not packet:
                raise TetherClosedError("the peer closed its end")
            return messages.unpack(packet), descriptors
        except (TetherClosedError, ProtocolError):
            for fd in descriptors:
                os.close(fd)
            raise

    def _receive(self) -> Any:
        try:
            return self._socket.recvmsg(MAX_PACKET, RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError as error:
            if came_from_handler(error):
                raise
            # the peer ended with something unread: what it had said comes after this error
            return self._socket.recvmsg(MAX_PACKET, RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)

    def _check_room(self) -> None:
        """The kernel drops descriptors that do not fit, for ever: so they are only asked for where they do."""
        try:
            check_descriptors(MOST_AT_ONCE)
        except OSError as error:
            if lacks_descriptors(error):
                raise MemoryExhaustedError(
                    "too many files are open in this process for it to see further shared memory: close some, or raise "
                    f"the limit (ulimit -n): {error}"
                ) from error

    def close(self) -> None:
        """Close this end; the peer sees end of file. Idempotent; happens with the object, too."""
        self._socket.close()


def _descriptors_in(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """(`socket.recv_fds` loses the flags it is given, and so the descriptors are inherited.)"""
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


def listen_tether(path: str) -> socket.socket:
    """A non-blocking listening socket at ``path`` (its folder is the user's own, mode 0700)."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(128)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def accept_tether(listener: socket.socket) -> Tether | None:
    """The next client that waits, if it is of our own user; None where nobody waits."""
    try:
        sock, _ = listener.accept()
    except OSError as error:
        if lacks_descriptors(error):
            time.sleep(0.01)  # it goes on waiting; so may we, but not at full speed
        return None
    tether = Tether(sock)
    if tether.peer_uid not in (os.getuid(), 0):
        tether.close()
        return None
    return tether


def connect_tether(path: str, timeout_s: float) -> Tether:
    """Connect to a listening worker. ConnectError where nobody listens, DeadlineError where it does not accept."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    deadline = time.monotonic() + timeout_s
    try:
        sock.settimeout(timeout_s)
        while True:
            try:
                sock.connect(path)
                return Tether(sock)
            except OSError as error:
                if came_from_handler(error):
                    raise
                if isinstance(error, PermissionError):
                    raise ConnectError(
                        f"this process may not reach the worker's socket {path}: {error}. Has it given up rights since "
                        "connect() (os.setuid, os.seteuid)? Let it do so before"
                    ) from error
                if not isinstance(error, BlockingIOError):
                    raise ConnectError(f"no worker listens at {path}: {error}") from error
                if time.monotonic() > deadline:  # its backlog is full
                    raise DeadlineError(
                        f"the worker has not accepted a connection for {timeout_s} s"
                    ) from None
            time.sleep(0.01)
    except BaseException:
        sock.close()
        raise
