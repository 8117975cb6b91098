"""What is noted of calls at this end while somebody records, by those who make them.

A plain call is a `FaceCall`; in it are invocations, usually one; an `Invocation` sends messages, usually one; a `Message` is told each of
its steps by the thread that takes it. Times are nanoseconds of CLOCK_MONOTONIC; 0 is a step that was not reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from gradwire.lines import Line
from gradwire.worker_records import WorkerFacts
from gradwire_wire.carriers import Carrier
from gradwire_wire.page import ClientPage
from gradwire_wire.sockets import Dealer
from gradwire_wire.words import Word

if TYPE_CHECKING:
    from gradwire.connection import Connection

__all__ = ["FaceCall", "FarEnd", "Invocation", "Message", "Recorded", "face_call", "now", "until"]

now = time.monotonic_ns


class FaceCall:
    """A plain call as its framework's face makes it: around one or more invocations."""

    __slots__ = ("entered", "left")

    def __init__(self) -> None:
        self.entered, self.left = now(), 0


class _Thread(threading.local):
    face: FaceCall | None = None


_this_thread = _Thread()


@contextmanager
def face_call() -> Iterator[None]:
    """Around a plain call: what is invoked by this thread meanwhile is part of it."""
    outer, noted = _this_thread.face, FaceCall()
    _this_thread.face = noted
    try:
        yield
    finally:
        noted.left = now()
        _this_thread.face = outer


class Invocation:
    """One `Handle.invoke`: arguments are carriers by then, and results are still. It ends with its last message.

    note: makes the note of a message, and keeps it.
    """

    __slots__ = ("_note", "face", "invoked", "remote")

    def __init__(self, name: str, note: Callable[[Connection, Invocation], Message]) -> None:
        self.remote, self._note, self.face, self.invoked = name, note, _this_thread.face, now()

    def message(
        self, connection: Connection, word: Word, carriers: Sequence[Carrier | None], keep: int, token: Any
    ) -> Message:
        """It is about to send this call."""
        noted = self._note(connection, self)
        noted.note_call(word, carriers, keep, token)
        return noted


class Message:
    """One message and its answer, at this end. invocation: that it belongs to, if it is a call.

    kind: call, load, spec, state. sent_as: message, plan (a message that makes one), or short (a call that has a plan).
    by: page, lane, or ZeroMQ. bytes_out, bytes_in: of tensors.
    """

    __slots__ = (
        "answered",
        "began",
        "by",
        "bytes_in",
        "bytes_out",
        "call_id",
        "error",
        "incarnation",
        "invocation",
        "keep",
        "kind",
        "lent",
        "received",
        "sent",
        "sent_as",
        "thread",
        "token",
        "verb",
        "word",
        "worker",
    )

    def __init__(self, facts: WorkerFacts, invocation: Invocation | None) -> None:
        self.worker, self.incarnation = facts.name, facts.incarnation
        self.invocation, self.thread = invocation, threading.get_native_id()
        self.call_id = self.keep = self.lent = self.sent = self.received = self.answered = 0
        self.bytes_out = self.bytes_in = 0
        self.kind, self.sent_as, self.by, self.verb, self.error = "", "message", "", "", ""
        self.word: Word = ()
        self.token: Any = 0
        self.began = now()

    def note_call(self, word: Word, carriers: Sequence[Carrier | None], keep: int, token: Any) -> None:
        """It is a call, of these."""
        self.kind, self.word, self.keep, self.token = "call", word, keep, token
        self.bytes_out = _nbytes(carriers)

    def note_lent(self, message: Any) -> None:
        """It is this message, and its tensors are lent."""
        self.lent, self.sent_as, self.call_id = now(), "message", message.call_id
        self.kind, self.verb = self.kind or type(message).__name__.lower(), getattr(message, "verb", "")

    def note_lent_short(self, call_id: int) -> None:
        """It is a short frame, and its tensors are lent; it may yet have to go as a message."""
        self.lent, self.sent_as, self.call_id = now(), "short", call_id

    def note_sent(self, line: Line) -> None:
        """It is on its way, by that line."""
        self.sent = now()
        self.by = "ZeroMQ" if isinstance(line, Dealer) else "page" if isinstance(line, ClientPage) else "lane"

    def note_received(self) -> None:
        """The answer is there."""
        self.received = now()

    def note_answered(self, carriers: Sequence[Carrier | None]) -> None:
        """These results, which the answer brought, are here."""
        self.bytes_in = _nbytes(carriers)
        self.answered = now()

    def note_error(self, error: BaseException) -> None:
        """It was answered by an error, or not at all."""
        self.error = type(error).__name__
        self.answered = now()


def _nbytes(carriers: Iterable[Carrier | None]) -> int:
    return sum(c.array.nbytes for c in carriers if c is not None)


class FarEnd(NamedTuple):
    """The times of a message in its worker; see docs/protocol.md, Trace."""

    free: int
    received: int
    begun: int
    computed: int
    ready: int
    sent: int


class Recorded(NamedTuple):
    """A recording that is over. ``far``: by incarnation and call id. ``lost``: why a worker's part is missing, by name."""

    started: int
    stopped: int
    messages: list[Message]
    far: dict[bytes, dict[int, FarEnd]]
    pids: dict[bytes, int]
    threads: dict[int, str]
    dropped: dict[str, int]
    lost: dict[str, str]


def until(stopped: int, messages: Iterable[Message]) -> list[Message]:
    """The messages as they stood then: those under way go on being noted. Later steps are 0, later messages left out."""
    known: dict[int, Any] = {}

    def clipped(noted: Any) -> Any:
        if noted is None or id(noted) in known:
            return known.get(id(noted))
        made = known[id(noted)] = copy(noted)
        for step in _STEPS & set(type(noted).__slots__):
            if getattr(made, step) > stopped:
                setattr(made, step, 0)
        for outer in _OUTER & set(type(noted).__slots__):
            setattr(made, outer, clipped(getattr(made, outer)))
        return made

    return [clipped(noted) for noted in messages if noted.began <= stopped]


_STEPS = {"answered", "left", "lent", "received", "sent"}
_OUTER = {"face", "invocation"}
