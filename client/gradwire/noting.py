"""What is in the way of calls while somebody records, and at no other time.

Connections and their senders are of another class then, which notes the time at each step of a message; `Handle.invoke` and the
faces that `Remote` asks for are wrapped. When nobody records, nothing of this is in anybody's way: there is no test on the path of a
call. Each thread has its own notes under way.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gradwire import remote
from gradwire.broker_link import BrokerLink
from gradwire.connection import Connection
from gradwire.families import face_named
from gradwire.handle import Handle
from gradwire.notes import FaceCall, Invocation, Message, now
from gradwire.sending import Sender
from gradwire.site import Outcome, Site
from gradwire_wire.errors import UsageError
from gradwire_wire.exchange import NotShared
from gradwire_wire.lane import TooLong

if TYPE_CHECKING:
    from gradwire.recording import Recording

__all__ = ["attach", "begin", "detach", "end", "invocation", "is_recorded"]


class _UnderWay(threading.local):
    face: FaceCall | None = None
    invocation: Invocation | None = None
    message: Message | None = None


_under_way = _UnderWay()


def invocation() -> Invocation | None:
    """The one that this thread is in."""
    return _under_way.invocation


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
        noted: Message | None = _under_way.message
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
        noted = _under_way.message
        if noted is None:
            return Connection._wait(self, line, call_id, *args)
        noted.sent, noted.call_id, noted.by = now(), call_id, _line_name(line)
        try:
            return Connection._wait(self, line, call_id, *args)
        finally:
            noted.received = now()


class RecordingSender(Sender):
    """Its messages are noted when they are made: their tensors are lent by then."""

    def send_plan(self, message: Any, *args: Any) -> Any:
        """As of `Sender`."""
        _describe(message)
        line, plan = Sender.send_plan(self, message, *args)
        if plan is not None and _under_way.message is not None:
            _under_way.message.sent_as = "plan"
        return line, plan

    def send(self, message: Any, *args: Any) -> Any:
        """As of `Sender`."""
        _describe(message)
        return Sender.send(self, message, *args)


def _noted(noted: Message, act: Any, connection: Connection, args: Any, kwargs: Any) -> Any:
    """Do it as this thread's message, and note how it ends."""
    _under_way.message = noted
    try:
        return act(connection, *args, **kwargs)
    except BaseException as error:
        noted.error = type(error).__name__
        raise
    finally:
        noted.answered = now()
        _under_way.message = None


def _describe(message: Any) -> None:
    """A message is packed and sent now: its tensors are lent."""
    noted = _under_way.message
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
        outer = _under_way.face
        noted = _under_way.face = FaceCall()
        try:
            return self._face.call(handle, site, operands)
        finally:
            noted.left = now()
            _under_way.face = outer


_invoke, _ready = Handle.invoke, Handle._ready


def _noting_invoke(handle: Handle, site: Any, word: Any, carriers: Any, **options: Any) -> Any:
    outer = _under_way.invocation
    noted = _under_way.invocation = Invocation(handle.name, _under_way.face)
    try:
        outcome = _invoke(handle, site, word, carriers, **options)
        noted.bytes_in = _nbytes(outcome.carriers)
        return outcome
    finally:
        noted.taken = now()
        _under_way.invocation = outer


def _noting_ready(handle: Handle) -> Connection:
    """A worker that was started, or started again, meanwhile is recorded from its first call on."""
    connection = _ready(handle)
    if not isinstance(connection, RecordingConnection):
        recording = _recordings.get(id(connection.link))
        if recording is not None:
            recording.attach(connection)
    return connection


_recordings: dict[int, Recording] = {}
"""By the id of the bridge's link, which a recording keeps."""
_hooking = threading.Lock()


def _hook() -> None:
    """Have the steps outside of connections noted where anybody records, or not any more (lock held)."""
    hooks: list[tuple[Any, str, Any, Any]] = [
        (Handle, "invoke", _noting_invoke, _invoke),
        (Handle, "_ready", _noting_ready, _ready),
        (remote, "face_named", lambda family: _Face(face_named(family)), face_named),
    ]
    for owner, name, noting, plain in hooks:
        setattr(owner, name, noting if _recordings else plain)


def begin(link: BrokerLink, recording: Recording) -> None:
    """That bridge is recorded from now on, by this. UsageError where it is already."""
    with _hooking:
        if id(link) in _recordings:
            raise UsageError("this bridge is being traced already: one trace of a bridge at a time")
        _recordings[id(link)] = recording
        _hook()


def end(link: BrokerLink) -> None:
    """It is recorded no more."""
    with _hooking:
        _recordings.pop(id(link), None)
        _hook()


def is_recorded(link: BrokerLink) -> bool:
    """Whether the bridge of that link is."""
    return id(link) in _recordings


def attach(connection: Connection, recording: Recording) -> None:
    """Its messages are noted from now on."""
    connection.__dict__["recording"] = recording
    connection.__class__, connection.sender.__class__ = RecordingConnection, RecordingSender


def detach(connection: Connection) -> None:
    """They are noted no more."""
    connection.__class__, connection.sender.__class__ = Connection, Sender
