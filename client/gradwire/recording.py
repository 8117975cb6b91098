"""When calls of a bridge happen, at both ends: what traces and benchmarks are made of.

Theory of operation. While a bridge is recorded, its link has a ``recorder``, and none at any other time. Whoever begins something looks
there once: `Remote` for a plain call, `Handle.invoke` for an invocation, which notes its calls, and `Connection.request` for any other
message. A message's note (`gradwire.notes`) goes with it from function to function and is told the time at each step, so what is under way when
a recording begins or ends is noted as it was begun. The worker does the same at its end (`messages.Trace`). Both ends
keep a ring. Times are of CLOCK_MONOTONIC, which all processes of a machine share, so that both ends' can be compared.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from gradwire import answers
from gradwire.connection import Connection
from gradwire.notes import FarEnd, Invocation, Message, Recorded, now, until
from gradwire_wire import messages
from gradwire_wire.errors import GradwireError, UsageError
from gradwire_wire.recordings import MAX_ROWS

if TYPE_CHECKING:
    from gradwire.bridge import Bridge

__all__ = ["CAPACITY", "Recording"]

CAPACITY = 1 << 16
ANSWER_S = 10.0  # for a worker to begin or to tell; it may be busy with a long call
_beginning = threading.RLock()


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
        self._attaching = threading.RLock()  # a handler of signals must not wait for what it has interrupted
        self._attached: dict[bytes, Connection] = {}  # by incarnation: those whose worker was told
        self._asked: dict[bytes, Connection] = {}  # and those whose worker perhaps was
        self._is_over = False
        self._lost: dict[str, str] = {}

    def start(self) -> None:
        """Begin. UsageError where the bridge is being recorded; ClosedError where it was closed.

        Waits for workers that are busy, ten seconds at most each.
        """
        self._bridge._check_usable()
        self._started = now()
        with _beginning:
            if self._link.recorder is not None:
                raise UsageError("this bridge is being traced already: one trace of a bridge at a time")
            self._link.recorder = self
        with self._abandoned_if_interrupted():
            for worker in list(self._bridge._workers.values()):
                if worker.alive:
                    self._attach(worker._connection)

    # -- what callers note -------------------------------------------------------------------------

    def invocation(self, name: str) -> Invocation:
        """This thread begins to invoke what has that name."""
        return Invocation(name, self.message)

    def message(self, connection: Connection, invocation: Invocation | None = None) -> Message:
        """This thread is about to send a message. A worker that was started meanwhile, or started again, is told to record first."""
        if connection.facts.incarnation not in self._attached:
            self._attach(connection)
        noted = Message(connection.facts, invocation)
        self._messages.append(noted)
        self._noted += 1  # two threads may count one together: `dropped` is for people
        return noted

    def _attach(self, connection: Connection) -> None:
        """Have the worker record from now on."""
        with self._attaching:
            if self._is_over or connection.facts.incarnation in self._attached:
                return
            self._asked[connection.facts.incarnation] = connection
            try:
                connection.ask(lambda n, _: messages.Trace(n, self._capacity), ANSWER_S)
            except GradwireError as error:
                self._lost[connection.facts.name] = _told(error)
            self._attached[connection.facts.incarnation] = connection

    # -- the end -----------------------------------------------------------------------------------

    @property
    def is_foreign(self) -> bool:
        """Whether this is a forked child of the process that records."""
        return self._pid != os.getpid()

    def stop(self) -> Recorded:
        """End, and fetch what the workers have recorded; what one that died had is lost, and nothing else."""
        with self._abandoned_if_interrupted():
            return self._stop()

    @contextmanager
    def _abandoned_if_interrupted(self) -> Iterator[None]:
        """After Ctrl-C, say, nobody stops it: so it is over, and workers that perhaps were told to record are told not to. Waits for none."""
        try:
            yield
        except BaseException:
            self._link.recorder, self._is_over = None, True
            for connection in self._asked.values():
                with suppress(GradwireError):
                    connection.ask(_stopping, 0.0)
            raise

    def _stop(self) -> Recorded:
        self._link.recorder = None
        stopped = now()
        with self._attaching:
            self._is_over = True
        far: dict[bytes, dict[int, FarEnd]] = {}
        dropped = {"this process": max(0, self._noted - len(self._messages))}
        for incarnation, connection in self._attached.items():
            try:
                far[incarnation], dropped[connection.facts.name] = _fetch(connection)
            except GradwireError as error:
                self._lost[connection.facts.name] = _told(error)
            if not _is_one_clock(self._messages, far.get(incarnation, {}), incarnation):
                del far[incarnation]
                self._lost[connection.facts.name] = (
                    "its clock is not this machine's: nobody knows when it did what"
                )
        noted = until(stopped, list(self._messages))
        self._messages.clear()  # whose invocations know this object
        return Recorded(
            self._started,
            stopped,
            noted,
            far,
            {incarnation: c.facts.pid for incarnation, c in self._attached.items()},
            {t.native_id: t.name for t in threading.enumerate() if t.native_id is not None},
            dropped,
            self._lost,
        )


def _fetch(connection: Connection) -> tuple[dict[int, FarEnd], int]:
    reply, frames = connection.ask(_stopping, ANSWER_S)
    rows, columns, dropped = answers.times(reply.structure, connection.borrow_all(reply.headers, frames))
    at = [columns.index(name) for name in FarEnd._fields]
    ids = rows[:, columns.index("call_id")].tolist()
    return {n: FarEnd(*row) for n, row in zip(ids, rows[:, at].tolist(), strict=True)}, dropped


def _stopping(call_id: int, _: Any) -> messages.Trace:
    return messages.Trace(call_id, 0)


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
