"""What is noted of a call, at both ends, while somebody records. Times are nanoseconds of CLOCK_MONOTONIC; 0 is a step that
was not reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from copy import copy
from typing import Any, NamedTuple

from gradwire.worker_records import WorkerFacts

__all__ = ["FaceCall", "FarEnd", "Invocation", "Message", "Recorded", "now", "until"]

now = time.monotonic_ns


class FaceCall:
    """A plain call as its framework's face makes it: around one or more invocations."""

    __slots__ = ("entered", "left")

    def __init__(self) -> None:
        self.entered, self.left = now(), 0


class Invocation:
    """One `Handle.invoke`: arguments are carriers by then, and results are still."""

    __slots__ = ("bytes_in", "bytes_out", "face", "invoked", "remote", "taken")

    def __init__(self, name: str, face: FaceCall | None) -> None:
        self.remote, self.face = name, face
        self.taken = self.bytes_out = self.bytes_in = 0
        self.invoked = now()


class Message:
    """One message and its answer, at this end.

    kind: call, load, spec, state. sent_as: message, plan (a message that makes one), or short (a call that has a plan).
    by: page, lane, or ZeroMQ.
    """

    __slots__ = (
        "answered",
        "began",
        "by",
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
        self.kind, self.sent_as, self.by, self.verb, self.error = "", "message", "", "", ""
        self.word: Any = ()
        self.token: Any = 0
        self.began = now()


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


_STEPS = {"answered", "left", "lent", "received", "sent", "taken"}
_OUTER = {"face", "invocation"}
