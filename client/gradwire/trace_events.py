"""A recording as Chrome trace events. Pure: no clock, no I/O.

One process a process, one thread a thread. Spans (``ph: X``) of a thread lie within each other. Here: the call, in it
converting, and in it the message: lend, send, wait, take. In the worker, on its one thread: the message, in it
take, compute, reply. The way between is a pair of asynchronous spans (``b``, ``e``), since several can be under way; and arrows
(``s``, ``f``) join the spans that send to those that receive. A time is microseconds since the recording began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from gradwire.notes import FaceCall, FarEnd, Message, Recorded

__all__ = ["document", "parts_of"]

Event = dict[str, Any]
CATEGORY = "gradwire"


def document(recorded: Recorded, pid: int) -> dict[str, Any]:
    """The whole file. ``pid``: of this process."""
    return {
        "traceEvents": [*_names(recorded, pid), *_Events(recorded, pid).all()],
        "displayTimeUnit": "ns",
        "otherData": {"dropped": recorded.dropped, "lost": recorded.lost},
    }


def _names(recorded: Recorded, pid: int) -> Iterator[Event]:
    yield _named("process_name", pid, pid, "caller")
    workers = {noted.incarnation: noted.worker for noted in recorded.messages}
    for incarnation, worker_pid in recorded.pids.items():
        name = workers.get(incarnation)
        if name is not None:
            yield _named("process_name", worker_pid, worker_pid, f"worker {name}")
            yield _named("thread_name", worker_pid, worker_pid, "main")
    for thread in sorted({noted.thread for noted in recorded.messages}):
        yield _named("thread_name", pid, thread, recorded.threads.get(thread, f"thread {thread}"))


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def parts_of(noted: Message, far: FarEnd | None, face: FaceCall | None = None) -> dict[str, int] | None:
    """A call's nanoseconds by what they were spent on; together they are the call's. None for one that was not answered.

    convert: between the frameworks' tensors and bytes, at both ends. copy: the arguments into shared memory. wake:
    until the worker has the message. queue: it did something else first. compute: user code and its framework.
    return: from then until the results are here. ``face``: the call that it is alone in.
    """
    invocation = noted.invocation
    if invocation is None or far is None or noted.error or not (far.begun and noted.lent):
        return None
    begin = face.entered if face is not None else invocation.invoked
    end = face.left if face is not None else noted.answered
    queue = min(max(0, far.free - noted.lent), far.received - noted.lent)
    return {
        "convert": (noted.began - begin) + (far.begun - far.received) + (end - noted.answered),
        "copy": noted.lent - noted.began,
        "wake": far.received - noted.lent - queue,
        "queue": queue,
        "compute": far.computed - far.begun,
        "return": noted.answered - far.computed,
    }


class _Events:
    """The events of a recording. ``pid``: of this process."""

    def __init__(self, recorded: Recorded, pid: int) -> None:
        self._recorded, self._pid = recorded, pid
        self._arrows = 0

    def all(self) -> Iterator[Event]:
        """In no particular order, but outer spans before inner ones."""
        faces: dict[int, list[tuple[FaceCall, Message]]] = {}
        invocations: dict[int, list[Message]] = {}
        for noted in self._recorded.messages:
            if noted.invocation is not None:
                invocations.setdefault(id(noted.invocation), []).append(noted)
                if noted.invocation.face is not None:
                    faces.setdefault(id(noted.invocation.face), []).append((noted.invocation.face, noted))
        for group in faces.values():
            yield from self._face(group[0][0], [noted for _, noted in group])
        for inner in invocations.values():
            yield from self._invocation(inner)
        for noted in self._recorded.messages:
            yield from self._message(noted)

    # -- here --------------------------------------------------------------------------------------

    def _face(self, face: FaceCall, inner: Sequence[Message]) -> Iterator[Event]:
        first, last = inner[0], inner[-1]
        assert first.invocation is not None
        end = face.left or self._recorded.stopped
        yield self._span(first.invocation.remote, self._pid, first.thread, face.entered, end)
        if first.invocation.invoked >= face.entered:
            yield self._span("convert", self._pid, first.thread, face.entered, first.invocation.invoked)
        if last.answered:
            yield self._span("convert", self._pid, last.thread, last.answered, end)

    def _invocation(self, inner: Sequence[Message]) -> Iterator[Event]:
        invocation, last = inner[0].invocation, inner[-1]
        assert invocation is not None
        name = "invoke" if invocation.face is not None else invocation.remote
        end = last.answered or self._recorded.stopped
        carried = {"bytes there": last.bytes_out, "bytes back": last.bytes_in}
        yield self._span(name, self._pid, last.thread, invocation.invoked, end, **_arguments(last), **carried)

    def _message(self, noted: Message) -> Iterator[Event]:
        """The steps of one message, in both processes."""
        stages = [
            ("lend", noted.began),
            ("send", noted.lent),
            ("wait", noted.sent),
            ("take", noted.received),
            ("", noted.answered or self._recorded.stopped),
        ]
        reached = [(name, at) for name, at in stages if at]
        if noted.invocation is None:
            title = f"{noted.kind} {noted.verb}".strip()
            yield self._span(title, self._pid, noted.thread, noted.began, reached[-1][1], **_arguments(noted))
        for (name, begin), (_, end) in pairwise(reached):
            yield self._span(name, self._pid, noted.thread, begin, end)
        far = self._recorded.far.get(noted.incarnation, {}).get(noted.call_id)
        if far is not None and noted.lent:
            yield from self._far_end(noted, far)

    # -- there, and between ------------------------------------------------------------------------

    def _far_end(self, noted: Message, far: FarEnd) -> Iterator[Event]:
        pid = self._recorded.pids[noted.incarnation]
        title = noted.invocation.remote if noted.invocation is not None else noted.kind
        yield self._span(title, pid, pid, far.received, far.sent, **_arguments(noted))
        if far.begun and far.computed:
            yield self._span("take", pid, pid, far.received, far.begun)
            yield self._span("compute", pid, pid, far.begun, far.computed)
            yield self._span("reply", pid, pid, far.computed, far.sent)
        yield from self._way("to worker", noted, noted.lent, far.received)
        yield from self._arrow("request", (self._pid, noted.thread, noted.lent), (pid, pid, far.received))
        if noted.received:
            # the client may be awake before the worker knows that it has sent
            left = min(far.ready, noted.received)
            yield from self._way("to caller", noted, left, noted.received)
            yield from self._arrow("reply", (pid, pid, left), (self._pid, noted.thread, noted.received))

    def _way(self, name: str, noted: Message, begin: int, end: int) -> Iterator[Event]:
        number = f"{noted.incarnation.hex()}-{noted.call_id}-{name}"
        event = {
            "name": name,
            "cat": "wire",
            "id": number,
            "pid": self._pid,
            "tid": noted.thread,
        }
        arguments = {"worker": noted.worker, "by": noted.by}
        yield {**event, "ph": "b", "ts": self._at(begin), "args": arguments}
        yield {**event, "ph": "e", "ts": self._at(max(begin, end))}

    def _arrow(self, name: str, start: tuple[int, int, int], end: tuple[int, int, int]) -> Iterator[Event]:
        self._arrows += 1
        event = {"name": name, "cat": "wire", "id": self._arrows}
        for phase, (pid, tid, at) in (("s", start), ("f", end)):
            made = {**event, "ph": phase, "pid": pid, "tid": tid, "ts": self._at(at)}
            yield {**made, "bp": "e"} if phase == "f" else made

    def _span(self, name: str, pid: int, tid: int, begin: int, end: int, **arguments: Any) -> Event:
        made: Event = {
            "ph": "X",
            "name": name,
            "cat": CATEGORY,
            "pid": pid,
            "tid": tid,
            "ts": self._at(begin),
            "dur": max(0, end - max(begin, self._recorded.started)) / 1000,
        }
        if arguments:
            made["args"] = arguments
        return made

    def _at(self, ns: int) -> float:
        return max(0, ns - self._recorded.started) / 1000  # (a worker may have waited since an earlier trace)


def _arguments(noted: Message) -> dict[str, Any]:
    """What is known of a message, for whoever clicks on it."""
    made: dict[str, Any] = {
        "call_id": noted.call_id,
        "worker": noted.worker,
        "sent as": noted.sent_as,
        "by": noted.by,
    }
    if noted.kind == "call":
        made["function"] = in_words(noted.word)
        made["token"] = "rows" if isinstance(noted.token, list) else noted.token
        made["keeps"] = bool(noted.keep)
    if noted.error:
        made["error"] = noted.error
    return made


_OPERATIONS = {"J": "tangent", "T": "pullback", "V": "batch", "P": "primal", "M": "training step"}


def in_words(word: Sequence[Any]) -> str:
    """Which derived function it is: ``pullback of batch of the function``."""
    return " of ".join([*(_OPERATIONS[op[0]] for op in reversed(word)), "the function"])
