"""The tether: a Unix ``SOCK_SEQPACKET`` socket between a client process and a worker.

It carries segment descriptors (SCM_RIGHTS), proves who the peer is (SO_PEERCRED), and its end of
file is the news of a death. A packet that was sent has arrived: whoever meets an unknown segment
number in a header drains the tether and then either knows the segment or refuses the header.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any, Sequence

from gradwire_wire import messages
from gradwire_wire.errors import ConnectError, DeadlineError, ProtocolError

__all__ = ["Tether", "TetherClosedError", "connect_tether", "listen_tether"]

MAX_PACKET = 4096
MAX_DESCRIPTORS = 4


class TetherClosedError(Exception):
    """The peer is gone."""


class Tether:
    """One end. Packets are messages of `gradwire_wire.messages`; descriptors arrive close-on-exec."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.peer_pid, self.peer_uid = pid, uid

    def fileno(self) -> int:
        """For a poller; -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Any, descriptors: Sequence[int] = (), timeout_s: float = 10.0) -> None:
        """Send one packet; waits while the peer's queue is full. DeadlineError, TetherClosedError."""
        self._socket.settimeout(timeout_s)
        try:
            socket.send_fds(self._socket, [messages.pack(message)], list(descriptors))
        except socket.timeout as error:
            raise DeadlineError(
                f"the peer has not read its tether for {timeout_s} s; is it stopped?"
            ) from error
        except OSError as error:
            raise TetherClosedError(str(error)) from error

    def receive(self, timeout_s: float) -> tuple[Any, list[int]] | None:
        """The next packet and its descriptors, or None after ``timeout_s`` (0: do not wait).

        The caller owns the descriptors. TetherClosedError at end of file; ProtocolError for what is no message.
        """
        self._socket.settimeout(timeout_s)
        try:
            packet, descriptors, flags, _ = socket.recv_fds(
                self._socket, MAX_PACKET, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, socket.timeout):
            return None
        except OSError as error:
            raise TetherClosedError(str(error)) from error
        if not packet:
            raise TetherClosedError("the peer closed its end")
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError("a packet or its descriptors were cut short")
            return messages.unpack(packet), descriptors
        except ProtocolError:
            for fd in descriptors:
                os.close(fd)
            raise

    def close(self) -> None:
        """Close this end; the peer sees end of file."""
        self._socket.close()


def listen_tether(path: str) -> socket.socket:
    """A non-blocking listening socket at ``path`` (its folder is the user's own, mode 0700)."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(128)
    listener.setblocking(False)
    return listener


def accept_tether(listener: socket.socket) -> Tether | None:
    """The next client that waits, if it is of our own user; None where nobody waits."""
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    tether = Tether(sock)
    if tether.peer_uid not in (os.getuid(), 0):
        tether.close()
        return None
    return tether


def connect_tether(path: str, timeout_s: float) -> Tether:
    """Connect to a listening worker. ConnectError where nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.settimeout(timeout_s)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock.connect(path)
            return Tether(sock)
        except BlockingIOError:  # its backlog is full
            if time.monotonic() > deadline:
                sock.close()
                raise DeadlineError(f"the worker has not accepted a connection for {timeout_s} s") from None
            time.sleep(0.01)
        except OSError as error:
            sock.close()
            raise ConnectError(f"no worker listens at {path}: {error}") from error
