"""One worker process, from its command line to its last words.

::

    STARTING ──WorkerReady──► READY ──┐
        │                             ├── asked, terminated, killed ──► its process ends ──► finished
        └──CouldNot, time is up───────┘      (or it dies at any time)

The broker's loop calls in when one of the three descriptors is readable: the lifeline, the output, the
pidfd; and when `due` has come. Nothing here blocks, except that starting a process waits for its exec.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import resource
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from gradwire_broker.environment import chooses_threads, fair_share, worker_environment
from gradwire_broker.output import Tail
from gradwire_broker.reports import STARTING, End, end_of, ended_early, not_started, timed_out
from gradwire_wire.control import Start
from gradwire_wire.errors import ProtocolError
from gradwire_wire.interpreters import NoInterpreter, find_interpreter
from gradwire_wire.lifeline import (
    CouldNot,
    Doing,
    HasThreads,
    Leave,
    Lifeline,
    LifelineEnded,
    Report,
    Served,
    Share,
    WorkerConfig,
    WorkerReady,
)
from gradwire_wire.process import (
    DUMP_STACK,
    INTERRUPT,
    RAISE_LIMIT,
    RAISE_PROCESSES,
    lacks_descriptors,
    open_pidfd,
)
from gradwire_wire.spawn import Lent, shown, spawn

__all__ = ["CannotLaunch", "Place", "Worker"]

CHUNK = 1 << 16
LOG_LINES, LOG_CHARACTERS = 1000, 100_000  # what is kept of a worker's output
REPORT_LINES, REPORT_CHARACTERS = 100, 16_000  # what the report of a death shows of that
MOST_AT_ONCE = 1 << 20  # bytes of output read before others get their turn


class CannotLaunch(Exception):
    """No process was started; the message is that of a WorkerStartError."""


class Place(NamedTuple):
    """What the broker gives a worker to be started with."""

    name: str
    incarnation: bytes
    token: bytes
    endpoint: str
    tether_path: str
    threads: int
    lent: Lent
    allow: list[str] | None
    listen: str
    keys: str
    umask: int


class Worker:
    """A worker that was started. ``ready``: its facts, once it is.

    client: who started it, and answers for it unless it lasts. asking: who waits for its start, with the number of
    each one's request. calls: how many it has served, as it reported last.
    is_dismissed: nobody waits for its start any more, and its name is free before its process has ended.
    """

    def __init__(self, order: Start, place: Place, client: bytes, base: dict[str, str]) -> None:
        """Raises CannotLaunch."""
        self.order, self.client, self._base = order, client, base
        self.place = place._replace(threads=fair_share(place.threads, base))
        self.asking = [(client, order.request)]
        self.calls = 0
        self._is_asked = False
        self.doing = STARTING
        self.ready: WorkerReady | None = None
        self.is_dismissed = False
        self.threads: int | None = None  # that it says it has, since it was ready
        chosen = order.threads is not None or chooses_threads(order.env)
        self._share = None if chosen else self.place.threads
        self.end: End | None = None
        self._why = ""
        self._tail = Tail(LOG_LINES, LOG_CHARACTERS)
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._steps: deque[tuple[float, Callable[[], None]]] = deque()
        self._born = time.monotonic()
        self._process, self.lifeline, self.output = self._launch()
        self.pidfd = self._watched()
        self._plan((order.timeout_s, self._time_is_up))

    @property
    def pid(self) -> int:
        """Also its process group's and its session's."""
        return self._process.pid

    @property
    def command(self) -> str:
        """The command line, for people."""
        return shown(self._process)

    # ---- Start ----

    def _launch(self) -> tuple[subprocess.Popen[bytes], Lifeline, int]:
        order, place = self.order, self.place
        try:
            python = find_interpreter(order.python, self._base)
        except NoInterpreter as error:
            raise CannotLaunch(not_started(place.name, order.framework, str(error))) from error
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        try:
            process, lifeline = spawn(
                [python, "-s"],
                place.lent,
                "gradwire_workers.__main__",
                self._config(),
                f"worker {place.name} ({order.framework})",
                cwd=order.cwd,
                env=self._environment(python),
                stdout=writer,
                stderr=writer,
            )
        except (OSError, ValueError, LifelineEnded) as error:
            os.close(reader)
            raise CannotLaunch(self._not_executed(python, error)) from error
        finally:
            os.close(writer)
        return process, lifeline, reader

    def _watched(self) -> int:
        try:
            return open_pidfd(self.pid)
        except OSError as error:
            self.kill()
            self._process.wait()
            os.close(self.output)
            self.lifeline.close()
            raise CannotLaunch(self._not_executed("it under watch", error)) from error

    def share(self, threads: int) -> None:
        """Its share of the processors is another one now. Not for one whose user has chosen."""
        threads = fair_share(threads, self._base)
        if self._share not in (None, threads):
            self._share = threads
            with contextlib.suppress(LifelineEnded):
                self.lifeline.send_nowait(Share(threads))

    def _config(self) -> WorkerConfig:
        order, place = self.order, self.place
        return WorkerConfig(
            broker_pid=os.getpid(),
            name=place.name,
            framework=order.framework,
            incarnation=place.incarnation.hex(),
            token=place.token.hex(),
            endpoint=place.endpoint,
            tether_path=place.tether_path,
            path=order.path,
            threads=order.threads or self._share,
            x64=order.x64,
            device=order.device,
            loads=order.loads,
            allow=place.allow,
            listen=place.listen,
            keys=place.keys,
            umask=place.umask,
        )

    def _environment(self, python: str) -> dict[str, str]:
        order, place = self.order, self.place
        threads = order.threads or place.threads
        made = worker_environment(
            self._base, order.env, python=python, framework=order.framework, threads=threads
        )
        # By this mark whatever the worker started can be found, should the broker be killed.
        return {**made, "GRADWIRE_INCARNATION": place.incarnation.hex()}

    def _not_executed(self, python: str, error: Exception) -> str:
        if not os.path.isdir(self.order.cwd):
            why = f"there is no folder {self.order.cwd} to run in (cwd=)"
        elif getattr(error, "filename", None) == self.order.cwd:
            why = f"this user cannot run anything in {self.order.cwd} (cwd=): {error.strerror}"  # type: ignore[attr-defined]
        else:
            why = f"the system cannot execute {python}: {_not_executed_because(python, error)}"
            if lacks_descriptors(error):
                why += f"; {RAISE_LIMIT} that started the broker"
        return not_started(self.place.name, self.order.framework, why)

    # ---- What it says ----

    def hear(self) -> bool:
        """The lifeline is readable. False: it will say no more (then stop polling it)."""
        try:
            while (message := self.lifeline.receive_nowait()) is not None:
                self._heard(message)
        except LifelineEnded:
            return False
        except ProtocolError as error:
            self._give_up(f"it broke the protocol: {error}")
            return False
        return True

    def _heard(self, message: object) -> None:
        if isinstance(message, Doing):
            self.doing = message.what
        elif isinstance(message, WorkerReady) and not self._why:
            self.ready = message
            self.doing = "ready"
            self._steps.clear()
        elif isinstance(message, HasThreads):
            self.threads = message.threads
        elif isinstance(message, CouldNot):
            self._give_up(message.message)
        elif isinstance(message, Served):
            self.calls, self._is_asked = message.calls, False

    def ask(self) -> None:
        """Have it report how many calls it has served, once its present call is done. Does not wait."""
        if self.ready is None or self.end is not None or self._is_asked:
            return
        with contextlib.suppress(LifelineEnded):
            self.lifeline.send_nowait(Report())
            self._is_asked = True

    @property
    def far_endpoint(self) -> str:
        """Where it listens at tcp, or ""."""
        return "" if self.ready is None else self.ready.far_endpoint

    @property
    def info(self) -> dict[str, Any]:
        """What it said it runs on; empty before it is ready."""
        info = {} if self.ready is None else self.ready.info
        return info if self.threads is None else {**info, "threads": self.threads}

    @property
    def state(self) -> str:
        """What the command ``ps`` shows."""
        if self.end is not None:
            return "ended"
        if self.ready is None:
            return "starting"
        return "busy" if self._is_asked else "idle"

    @property
    def age_s(self) -> float:
        """Since its start."""
        return time.monotonic() - self._born

    @property
    def memory_bytes(self) -> int:
        """What it has resident; 0 where that is not to be known."""
        try:
            with open(f"/proc/{self.pid}/statm") as file:
                return int(file.read().split()[1]) * resource.getpagesize()
        except (OSError, IndexError):
            return 0

    def read(self) -> tuple[str, bool]:
        """The output is readable: what was written, and whether more can come (False: stop polling it)."""
        read = bytearray()
        more = True
        try:
            while len(read) < MOST_AT_ONCE and (piece := os.read(self.output, CHUNK)):
                read += piece
            more = len(read) >= MOST_AT_ONCE
        except BlockingIOError:
            pass
        except OSError:
            more = False
        text = self._decoder.decode(bytes(read), final=not more)
        self._tail.write(text)
        return text, more

    # ---- How it ends ----

    def due(self) -> float | None:
        """When `advance` must be called next."""
        return self._steps[0][0] if self._steps else None

    def advance(self, now: float) -> None:
        """Take the steps whose time has come."""
        while self._steps and self._steps[0][0] <= now:
            self._steps.popleft()[1]()

    def _plan(self, *steps: tuple[float, Callable[[], None]]) -> None:
        now = time.monotonic()
        self._steps = deque((now + after, step) for after, step in steps)

    def stop(self, timeout_s: float) -> None:
        """Ask it to leave; terminate it after 2 s at the latest; kill it before the time is up."""
        ask, term = min(2.0, 0.5 * timeout_s), min(3.5, 0.8 * timeout_s)
        self._why = self._why or "it was stopped"
        self._plan((ask, lambda: self._signal(signal.SIGTERM)), (term, self.kill))
        try:
            self.lifeline.send_nowait(Leave())
        except LifelineEnded:
            pass
        if self.ready is None:
            self.kill()

    def kill(self) -> None:
        """Now; what it has started ends with it (see `gradwire_broker.remains`)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._signal(signal.SIGKILL)

    def interrupt(self) -> None:
        """For the call that runs, if it was abandoned."""
        if self.ready is not None:
            self._signal(INTERRUPT)

    def _signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)  # its child's pid is the broker's until the broker itself reaps it

    def _give_up(self, why: str) -> None:
        self._why = self._why or why
        self._plan((1.0, self.kill))

    def _time_is_up(self) -> None:
        self._give_up(timed_out(self.order.timeout_s, self.doing))
        if self.doing != STARTING:  # else nothing in it takes the signal for what it is
            self._signal(DUMP_STACK)
        self._plan((0.5, self.kill))

    def finish(self) -> str:
        """The pidfd is readable: reap it. Returns the last output.

        A grandchild may hold the output open for ever: what is in the pipe is read, its end is not waited for.
        """
        self.end = end_of(self._process.wait())
        text, _ = self.read()
        for descriptor in (self.output, self.pidfd):
            os.close(descriptor)
        self.lifeline.close()
        self._steps.clear()
        return text

    @property
    def last_output(self) -> str:
        """The last lines of its output, for a report."""
        return self._tail.text(REPORT_LINES, REPORT_CHARACTERS)

    @property
    def log(self) -> str:
        """All that is kept of its output."""
        return self._tail.text(LOG_LINES, LOG_CHARACTERS)

    def not_started(self) -> str:
        """The message of the WorkerStartError, for one that finished before it was ready."""
        assert self.end is not None
        by_us = self._why and self.end.signal == "SIGKILL"  # after it had said why, or had taken too long
        how = "by gradwire" if by_us else self.end
        after = f"{how}, {time.monotonic() - self._born:.1f} s after its start, while {self.doing}"
        return not_started(
            self.place.name,
            self.order.framework,
            self._why or ended_early(self.end, self.doing),
            command=self.command,
            cwd=self.order.cwd,
            ended=after,
            output=self.last_output,
        )


_ADVICE = {
    errno.EAGAIN: RAISE_PROCESSES,
    errno.E2BIG: "its environment is too large: some 2 MB in all, or 128 KiB in one variable",
    errno.EMSGSIZE: "what it is told at its start is too long: path= and what it is to load may have 200 kB together",
}


def _not_executed_because(python: str, error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, LifelineEnded) else error
    why = str(getattr(cause, "strerror", None) or error)
    code = getattr(cause, "errno", None)
    if code in _ADVICE:
        return f"{why}; {_ADVICE[code]}"
    if code == errno.ENOENT and os.path.exists(python):
        return f"{why}, which its first line (#!) names. Does that line end with \\r, as files from Windows have it?"
    if code == errno.ENOEXEC:
        return f"{why}: neither a program for this machine, nor a script whose first line (#!) names what runs it"
    return why
