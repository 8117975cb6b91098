"""When calls of a bridge happen, at both ends: what traces and benchmarks are made of.

Theory of operation. While a bridge is recorded, its connections are of another class, which notes the time at each step
of a call, and so are the worker's desks (`messages.Trace`); `Handle.invoke` and the faces that `Remote` asks for are
wrapped. When nobody records, nothing of this is in anybody's way: there is no test on the path of a call. Each
thread has its own notes under way; what is done is kept in a ring. Times are of CLOCK_MONOTONIC, which all
processes of a machine share, so that both ends' can be compared. 0 is a step that was not reached.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from gradwire import answers, remote
from gradwire.connection import Connection
from gradwire.families import face_named
from gradwire.handle import Handle
from gradwire.sending import Sender
from gradwire.site import Outcome, Site
from gradwire_wire import messages
from gradwire_wire.errors import GradwireError, UsageError
from gradwire_wire.exchange import NotShared
from gradwire_wire.lane import TooLong
from gradwire_wire.recordings import MAX_ROWS

if TYPE_CHECKING:
    from gradwire.bridge import Bridge

__all__ = ["CAPACITY", "FarEnd", "FaceCall", "Invocation", "Message", "Recorded", "Recording"]

CAPACITY = 1 << 16
ANSWER_S = 10.0  # for a worker to begin or to tell; it may be busy with a long call
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

    def __init__(self, connection: Connection, invocation: Invocation | None) -> None:
        self.worker, self.incarnation = connection.facts.name, connection.facts.incarnation
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


# ---- What is in the way of calls while somebody records ----------------------------------------------------------------


class _Notes(threading.local):
    face: FaceCall | None = None
    invocation: Invocation | None = None
    message: Message | None = None


_notes = _Notes()


class RecordingConnection(Connection):
    """A connection whose messages are noted. It may become a plain one while it is in here: no ``super()``."""

    recording: Recording
    may_pipeline = False

    def request(self, *args: Any, **kwargs: Any) -> Any:
        """As of `Connection`."""
        return _noted(self.recording.note(self), Connection.request, self, args, kwargs)

    def evaluate(
        self, remote: int, site: Site, word: Any, carriers: Any, keep: int, token: Any, token_ops: int
    ) -> Outcome:
        """As of `Connection`."""
        noted = self.recording.note(self)
        noted.kind, noted.word, noted.keep, noted.token = "call", word, keep, token
        if noted.invocation is not None:
            noted.invocation.bytes_out = _nbytes(carriers)
        args = (remote, site, word, carriers, keep, token, token_ops)
        return _noted(noted, Connection.evaluate, self, args, {})

    def _evaluate_short(self, line: Any, plan: Any, *args: Any) -> Outcome:
        noted: Message | None = _notes.message
        planned: Any = plan
        if noted is None:
            return Connection._evaluate_short(self, line, plan, *args)
        noted.sent_as, planned = "short", _Planned(plan, noted)
        try:
            return Connection._evaluate_short(self, line, planned, *args)
        except (NotShared, TooLong):  # it will go as a message
            noted.sent_as, noted.lent = "message", 0
            raise

    def _wait(self, line: Any, call_id: int, *args: Any) -> Any:
        noted = _notes.message
        if noted is None:
            return Connection._wait(self, line, call_id, *args)
        noted.sent, noted.call_id, noted.by = now(), call_id, _line_name(line)
        try:
            return Connection._wait(self, line, call_id, *args)
        finally:
            noted.received = now()


class _RecordingSender(Sender):
    """Its messages are noted when they are made: their tensors are lent by then."""

    def send_plan(self, message: Any, *args: Any) -> Any:
        """As of `Sender`."""
        _describe(message)
        line, plan = Sender.send_plan(self, message, *args)
        if plan is not None and _notes.message is not None:
            _notes.message.sent_as = "plan"
        return line, plan

    def send(self, message: Any, *args: Any) -> Any:
        """As of `Sender`."""
        _describe(message)
        return Sender.send(self, message, *args)


def _noted(noted: Message, act: Any, connection: Connection, args: Any, kwargs: Any) -> Any:
    """Do it as this thread's message, and note how it ends."""
    _notes.message = noted
    try:
        return act(connection, *args, **kwargs)
    except BaseException as error:
        noted.error = type(error).__name__
        raise
    finally:
        noted.answered = now()
        _notes.message = None


def _describe(message: Any) -> None:
    """A message is packed and sent now: its tensors are lent."""
    noted = _notes.message
    if noted is not None and not noted.lent:
        noted.lent = now()
        noted.call_id, noted.verb = message.call_id, getattr(message, "verb", "")
        noted.kind = noted.kind or type(message).__name__.lower()


class _Planned:
    """A plan that notes when the tensors of a short call are lent."""

    def __init__(self, plan: Any, noted: Message) -> None:
        self._plan, self._noted = plan, noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def put(self, *args: Any) -> Any:
        """As of `plans.Plan`."""
        loans = self._plan.put(*args)
        self._noted.lent = now()
        return loans


def _line_name(line: Any) -> str:
    return _LINES.get(type(line).__name__, "lane")


_LINES = {"Dealer": "ZeroMQ", "ClientPage": "page"}


def _nbytes(carriers: Sequence[Any]) -> int:
    return sum(c.array.nbytes for c in carriers if c is not None)


class _Face:
    """A caller's face whose calls are noted."""

    def __init__(self, face: Any) -> None:
        self._face = face

    def __getattr__(self, name: str) -> Any:
        return getattr(self._face, name)

    def call(self, handle: Handle, site: Any, operands: list[Any]) -> Any:
        """As of `families.Face`."""
        outer = _notes.face
        noted = _notes.face = FaceCall()
        try:
            return self._face.call(handle, site, operands)
        finally:
            noted.left = now()
            _notes.face = outer


_invoke, _ready = Handle.invoke, Handle._ready


def _noting_invoke(handle: Handle, site: Any, word: Any, carriers: Any, **options: Any) -> Any:
    outer = _notes.invocation
    noted = _notes.invocation = Invocation(handle.name, _notes.face)
    try:
        outcome = _invoke(handle, site, word, carriers, **options)
        noted.bytes_in = _nbytes(outcome.carriers)
        return outcome
    finally:
        noted.taken = now()
        _notes.invocation = outer


def _noting_ready(handle: Handle) -> Connection:
    """A worker that was started, or started again, meanwhile is recorded from its first call on."""
    connection = _ready(handle)
    if type(connection) is Connection:
        recording = _recordings.get(id(connection.link))
        if recording is not None:
            recording.attach(connection)
    return connection


_recordings: dict[int, Recording] = {}
"""By the id of the bridge's link, which a recording keeps."""
_hooking = threading.Lock()


def _hook(recordings: int) -> None:
    """Have the steps outside of connections noted, or not any more."""
    noting: list[tuple[Any, str, Any, Any]] = [
        (Handle, "invoke", _noting_invoke, _invoke),
        (Handle, "_ready", _noting_ready, _ready),
        (remote, "face_named", lambda family: _Face(face_named(family)), face_named),
    ]
    for owner, name, noted, plain in noting:
        setattr(owner, name, noted if recordings else plain)


# ---- A recording ---------------------------------------------------------------------------------------------------


class Recording:
    """What the calls of a bridge do from `start` to `stop`; the latest ``capacity`` at each end.

    One at a time of a bridge. Calls under way when it begins are left out, and those under way when it ends
    are half there. Memory: about 400 bytes a call here, 56 in the worker.
    """

    def __init__(self, bridge: Bridge, capacity: int = CAPACITY) -> None:
        if not (isinstance(capacity, int) and 0 < capacity <= MAX_ROWS):
            raise UsageError(f"a trace keeps from 1 to {MAX_ROWS} calls, not {capacity!r}")
        self._bridge, self._link, self._capacity, self._pid = bridge, bridge._link, capacity, os.getpid()
        self._messages: deque[Message] = deque(maxlen=capacity)
        self._noted = self._started = 0
        self._attaching = threading.Lock()
        self._attached: dict[bytes, Connection] = {}
        self._lost: dict[str, str] = {}

    def start(self) -> None:
        """Begin. UsageError where the bridge is being recorded; ClosedError where it was closed.

        Waits for workers that are busy, ten seconds at most each.
        """
        self._bridge._check_usable()
        with _hooking:
            if id(self._link) in _recordings:
                raise UsageError("this bridge is being traced already: one trace of a bridge at a time")
            _recordings[id(self._link)] = self
            _hook(len(_recordings))
        self._started = now()
        for worker in list(self._bridge._workers.values()):
            if worker.alive:
                self.attach(worker._connection)

    def attach(self, connection: Connection) -> None:
        """Record a connection's calls from now on."""
        with self._attaching:
            if connection.facts.incarnation in self._attached or id(self._link) not in _recordings:
                return
            self._attached[connection.facts.incarnation] = connection
            try:
                connection.request(lambda n, _: messages.Trace(n, self._capacity), [], ANSWER_S)
            except GradwireError as error:
                self._lost[connection.facts.name] = _told(error)
            connection.__dict__["recording"] = self
            connection.__class__, connection.sender.__class__ = RecordingConnection, _RecordingSender

    def note(self, connection: Connection) -> Message:
        """A message is about to be sent by this thread."""
        noted = Message(connection, _notes.invocation)
        self._messages.append(noted)
        self._noted += 1  # two threads may count one together: `dropped` is for people
        return noted

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child of the process that records."""
        return self._pid != os.getpid()

    def stop(self) -> Recorded:
        """End, and fetch what the workers have recorded; what one that died had is lost, and nothing else."""
        with _hooking:
            _recordings.pop(id(self._link), None)
            _hook(len(_recordings))
        stopped = now()
        with self._attaching:
            attached = dict(self._attached)
        far: dict[bytes, dict[int, FarEnd]] = {}
        dropped = {"this process": max(0, self._noted - len(self._messages))}
        for incarnation, connection in attached.items():
            connection.__class__, connection.sender.__class__ = Connection, Sender
            try:
                far[incarnation], dropped[connection.facts.name] = _fetch(connection)
            except GradwireError as error:
                self._lost[connection.facts.name] = _told(error)
            if not _is_one_clock(self._messages, far.get(incarnation, {}), incarnation):
                del far[incarnation]
                self._lost[connection.facts.name] = (
                    "its clock is not this machine's: nobody knows when it did what"
                )
        return Recorded(
            self._started,
            stopped,
            _until(stopped, list(self._messages)),
            far,
            {incarnation: c.facts.pid for incarnation, c in attached.items()},
            {t.native_id: t.name for t in threading.enumerate() if t.native_id is not None},
            dropped,
            self._lost,
        )


def _until(stopped: int, messages: Iterable[Message]) -> list[Message]:
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


def _fetch(connection: Connection) -> tuple[dict[int, FarEnd], int]:
    reply, frames = connection.request(lambda n, _: messages.Trace(n, 0), [], ANSWER_S)
    rows, columns, dropped = answers.times(
        reply.structure, connection.exchange.borrow_all(reply.headers, frames)
    )
    at = [columns.index(name) for name in FarEnd._fields]
    ids = rows[:, columns.index("call_id")].tolist()
    return {n: FarEnd(*row) for n, row in zip(ids, rows[:, at].tolist(), strict=True)}, dropped


def _is_one_clock(noted: Iterable[Message], far: dict[int, FarEnd], incarnation: bytes) -> bool:
    """Whether what a worker says fits what was seen here; not so on another machine, and in another time namespace."""
    for message in noted:
        there = far.get(message.call_id) if message.incarnation == incarnation else None
        if there is None or not message.lent:
            continue
        answered = message.answered or there.received
        if not (message.lent <= there.received and max(there.received, there.computed) <= answered):
            return bool(message.error)  # of a call that nobody waited for, the rest may come later
    return True


def _told(error: GradwireError) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
