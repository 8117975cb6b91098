"""The inherited socket between a process and the one that started it: how its life begins, and that it is wanted.

The program starts the broker, and the broker starts the workers, in the same way (see `spawn`). One end of a
``SOCK_SEQPACKET`` pair goes with the child, and over it JSON, one packet a message (the environment of a
worker may lack msgpack, and must be able to say so)::

    parent → child    BrokerConfig or WorkerConfig;  later, to a worker, Share, Report and Leave
    child → parent    any number of Doing, then one of BrokerReady, WorkerReady and CouldNot;  later HasThreads,
                      and to each Report, Served

Secrets travel here and not on the command line, which every user of the machine can read. The end of the
stream means that the other end is gone (which its forked children can hide: who must know watches a pidfd).
"""

from __future__ import annotations

import json
import socket
from typing import Any, NamedTuple, Optional

from gradwire_wire.errors import ProtocolError
from gradwire_wire.vocabulary import Vocabulary

__all__ = [
    "ANOTHER_GRADWIRE",
    "BrokerConfig",
    "BrokerReady",
    "CouldNot",
    "Doing",
    "HasThreads",
    "Leave",
    "Lifeline",
    "LifelineEnded",
    "Report",
    "Served",
    "Share",
    "WorkerConfig",
    "WorkerReady",
]


class BrokerConfig(NamedTuple):
    """To the broker: whose it is, what clients must show it, and where the worker's packages lie.

    owner_pid: the program it ends with; a shared broker only until that lets it go (`control.LetGo`). Tokens are
    hexadecimal; who shows the owner's may start workers where targets are restricted. ``name``, ``file``: of a shared
    one, for its card. ``expected_workers``: among how many the processors are divided, if not more are there.
    """

    owner_pid: int
    token: str
    lent_to_workers: dict[str, str]
    expected_workers: int
    owner_token: str
    name: str
    file: str
    allow: Optional[list[str]]
    listen: str
    keys: str


class BrokerReady(NamedTuple):
    """From the broker: where it listens, and the folder that it will remove."""

    address: str
    folder: str


class WorkerConfig(NamedTuple):
    """To a worker: all it is told about itself. ``incarnation`` and ``token`` are hexadecimal.

    listen, keys: a host at tcp where it is reached too, at a port of its choice, and the folder of keys; or "". umask: of the
    program that the broker was started by, for the files of user code.
    """

    broker_pid: int
    name: str
    framework: str
    incarnation: str
    token: str
    endpoint: str
    tether_path: str
    path: list[str]
    threads: Optional[int]
    x64: Optional[bool]
    device: Optional[str]
    loads: dict[str, Any]
    allow: Optional[list[str]]
    listen: str
    keys: str
    umask: int


class Doing(NamedTuple):
    """From a worker: what the start is at, for people."""

    what: str


class WorkerReady(NamedTuple):
    """From a worker: it listens; what it runs on (interpreter, versions, devices, threads); where at tcp, or ""."""

    info: dict[str, Any]
    far_endpoint: str


class CouldNot(NamedTuple):
    """From either: it will end now, and why. `spawn.BOOT` writes it too."""

    message: str


class Share(NamedTuple):
    """To a worker: so many processors are yours from now on, if nobody has loaded a target yet."""

    threads: int


class HasThreads(NamedTuple):
    """From a worker: its pool was given another size, and has so many threads."""

    threads: int


class Leave(NamedTuple):
    """To a worker: end yourself when the present call is done."""


class Report(NamedTuple):
    """To a worker: say how many calls you have served. Answered when the present call is done."""


class Served(NamedTuple):
    """From a worker, after Report: the calls it has answered since its start."""

    calls: int


_VOCABULARY = Vocabulary(
    {
        cls.__name__: cls
        for cls in (
            *(BrokerConfig, BrokerReady, WorkerConfig, Doing, WorkerReady, CouldNot),
            *(Share, HasThreads, Report, Served, Leave),
        )
    }
)
KINDS = _VOCABULARY.kinds


MAX_PACKET = 1 << 20
ANOTHER_GRADWIRE = (
    "If gradwire was installed anew meanwhile, start again what has started this: the program, or gradwire up"
)
"""A child is a fresh process, and loads what is there now."""


class LifelineEnded(Exception):
    """The other end was closed, or its process is gone."""


class Lifeline:
    """One end. Owns its descriptor, which no further child inherits."""

    def __init__(self, end: socket.socket) -> None:
        end.set_inheritable(False)
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Lifeline, socket.socket]:
        """The parent's end, and the bare socket to hand on to the child (then to be closed)."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @classmethod
    def inherited(cls, fd: int) -> Lifeline:
        """The child's end."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """For a poller: readable when there is a message or the end."""
        return self._socket.fileno()

    def send_nowait(self, message: Any) -> None:
        """Send without ever blocking. LifelineEnded: nobody is there to read it, or nobody has for long."""
        self.send_raw(json.dumps(_VOCABULARY.to_array(message), default=str).encode())

    def send_raw(self, packet: bytes) -> None:
        """`send_nowait` for one packet that is none of our messages (the first one, which `spawn.BOOT` reads)."""
        try:
            self._socket.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            raise LifelineEnded(f"the other end does not listen: {error}") from error

    def receive_nowait(self) -> Any:
        """The next message, or None where none has come. Raises LifelineEnded, ProtocolError."""
        try:
            packet = self._receive()
        except BlockingIOError:
            return None
        except OSError as error:
            raise LifelineEnded(str(error)) from error
        if not packet:
            raise LifelineEnded("the other end was closed")
        try:
            raw = json.loads(packet)
        except ValueError as error:
            raise ProtocolError(f"not JSON: {error}") from error
        return _VOCABULARY.from_array(raw)

    def receive_config(self) -> Any:
        """What a child is told first. Raises as `receive_nowait`; of a ProtocolError the parent has heard then."""
        try:
            return self.receive_nowait()
        except ProtocolError as error:
            self.send_nowait(CouldNot(f"{error}. {ANOTHER_GRADWIRE}"))
            raise

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(MAX_PACKET, socket.MSG_DONTWAIT)
        except (
            ConnectionResetError
        ):  # it ended with something unread; what it had said comes after this error
            return self._socket.recv(MAX_PACKET, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
