"""This program's line to the broker: starts and stops workers, learns of their deaths, shows what they print.

Theory of operation. One daemon thread per link owns the DEALER; nobody else touches it. Other threads hand
it work (`call_soon`: a deque and a byte in a socket pair, no lock, so finalizers may) and wait for news under one
condition, `_news`, which guards what the thread has learned: answers, deaths, whether the broker lives. The
thread never runs user code and never waits for a reader of stderr, so news is never held up. It also looks
after descriptors that others register (`watch`) and small periodic work (`every_second`); with none of that
it sleeps until something happens.

Ends. `close` asks the broker to end and waits for that within bounds; at the interpreter's exit all links
are closed, within a second. A program that is killed needs none of this: the broker sees its end. A killed
broker takes its workers along; what those had started is found by a mark in its environment and ended here.
After a fork the child owns nothing of this: every method raises ForkedError there.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import queue
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from gradwire.orphans import end_orphans
from gradwire.worker_output import Screen
from gradwire_wire import control, errors, sockets
from gradwire_wire.errors import (
    ClosedError,
    ConnectError,
    DeadlineError,
    ForkedError,
    UsageError,
    WorkerDiedError,
    WorkerStartError,
)

if TYPE_CHECKING:
    from gradwire.far_broker import FarBroker
    from gradwire.private_broker import PrivateBroker, Sharing
    from gradwire.shared_broker import SharedBroker

    Broker = PrivateBroker | SharedBroker | FarBroker

__all__ = ["BrokerLink", "Death", "WorkerFacts", "WorkerSpec"]

CLOSE_S = 5.0
EXIT_S = 1.0
PATIENCE_S = 10.0  # beyond a deadline that the broker keeps, before the broker itself is given up
ANSWER_S = 5.0  # a broker answers at once; a machine may be busy
FIND_AGAIN_S = 0.1
FOLLOW_S = 0.5
FIRST_PROGRESS_S, NEXT_PROGRESS_S = 5.0, 10.0
DEATHS_KEPT = 1024
LAST_MESSAGES_MS = 20  # what the broker said before it ended may still be on its way


Answer = control.Started | control.NotStarted | control.Denied


class WorkerSpec(NamedTuple):
    """What worker to start. Paths may be relative to the current folder; None leaves the choice to the broker."""

    framework: str
    name: str = ""
    python: str | None = None
    env: dict[str, str | None] = {}  # noqa: RUF012 - never changed
    path: list[str] | None = None
    cwd: str | None = None
    threads: int | None = None
    x64: bool | None = None
    device: str | None = None
    start_timeout: float = 120.0
    loads: dict[str, Any] = {}  # noqa: RUF012 - never changed
    lasts: bool = False
    restart: str = "never"


class WorkerFacts(NamedTuple):
    """A worker that is ready, and how to reach it."""

    name: str
    incarnation: bytes
    pid: int
    endpoint: str
    tether_path: str
    token: bytes
    info: dict[str, Any]


class Death(NamedTuple):
    """How a worker ended: by an exit code or by a signal; its last lines; its command line."""

    exit_code: int | None
    signal: str | None
    output: str
    command: str


class BrokerLink:
    """Every method may be called from any thread. See the head of this file."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.is_shared = not broker.ends_with_us
        self.keys = broker.keys
        self._pid = os.getpid()
        self._closed = False
        self._stopping = False
        self._news = threading.Condition()
        self._attached = False
        self._refusal: control.Refused | None = None
        self._asked: set[int] = set()
        self._answers: dict[int, Any] = {}
        self._doing: dict[int, str] = {}
        self._presents: dict[int, list[control.Present]] = {}
        self._living: dict[bytes, control.Started | control.Present] = {}
        self._deaths: dict[bytes, Death] = {}
        self.broker_alive = True
        self._last_words = ""
        self._requests = itertools.count(1)
        self._screen = Screen()
        self._outputs: queue.SimpleQueue[control.Output] | None = (
            None  # who follows a log gets it, not the screen
        )
        self._ticks: list[Callable[[], None]] = []
        self._work: deque[Callable[[], None]] = deque()
        self._wake_end, self._waking_end = socket.socketpair()
        for end in (self._wake_end, self._waking_end):
            end.setblocking(False)
        self._watched: dict[Any, Callable[[], None]] = {}
        self._next_tick = 0.0
        self._prepare()
        self._thread = threading.Thread(target=self._run, name="gradwire-link", daemon=True)
        _open_links.add(self)
        self._thread.start()

    @classmethod
    def start_private(
        cls, start_timeout: float, expected_workers: int = 0, sharing: Sharing | None = None
    ) -> BrokerLink:
        """Start a broker, of this program's own or a shared one. Blocks until it answers; ConnectError with its last lines."""
        deadline = time.monotonic() + start_timeout
        from gradwire.private_broker import PrivateBroker  # what starting a process takes is not everybody's

        return cls._attached_to(PrivateBroker(start_timeout, expected_workers, sharing), deadline)

    @classmethod
    def to_shared(cls, broker: SharedBroker | FarBroker, timeout_s: float) -> BrokerLink:
        """Connect to a broker that runs. Blocks until it answers; ConnectError."""
        return cls._attached_to(broker, time.monotonic() + timeout_s)

    @classmethod
    def _attached_to(cls, broker: Broker, deadline: float) -> BrokerLink:
        link = cls(broker)
        try:
            link._wait_attached(deadline)
        except BaseException:
            link.close()
            raise
        return link

    def _wait_attached(self, deadline: float) -> None:
        with self._news:
            self._news.wait_for(
                lambda: self._attached or self._refusal or not self.broker_alive, deadline - time.monotonic()
            )
            if self._attached:
                return
        if self._refusal is not None:
            raise getattr(errors, self._refusal.kind, ConnectError)(self._refusal.message)
        raise ConnectError(
            f"the broker at {self.address} does not answer\n{self._broker.last_words()}".rstrip()
        )

    @property
    def folder(self) -> str | None:
        """The broker's runtime folder, of mode 0700; None where it is on another machine."""
        return str(self._broker.folder) if self.keys is None else None

    # ---- Workers ----

    def start_worker(self, spec: WorkerSpec) -> WorkerFacts:
        """Start a worker and wait until it is ready; says on stderr how far it is where that takes long.

        Raises WorkerStartError: why, the command line, how it ended, its last output; UsageError where it cannot
        be had as asked for (its name is taken). An interrupted wait ends the worker.
        """
        self._check_usable()
        request = next(self._requests)
        order = _order(request, spec)
        self._asked.add(request)
        self._send_soon(order)
        try:
            answer = self._wait_started(request, spec)
        except BaseException:
            self._send_soon(control.Cancel(request))
            raise
        finally:
            self._forget(request)
        return _facts(answer)

    def restart_worker(self, incarnation: bytes, spec: WorkerSpec) -> WorkerFacts:
        """Have a worker of a shared broker ended, if it lives, and started again; or learn that this has been done.

        Raises as `start_worker` does.
        """
        self._check_usable()
        request = next(self._requests)
        self._asked.add(request)
        self._send_soon(control.Restart(request, incarnation))
        try:
            return _facts(self._wait_started(request, spec))
        finally:
            self._forget(request)

    # ---- Who else is there ----

    def look(self, timeout_s: float = ANSWER_S) -> list[control.Present]:
        """All workers of the broker, with what `ps` shows of them; ended ones as well."""
        self._check_usable()
        request = next(self._requests)
        self._presents[request] = []
        try:
            self._ask(request, control.Look(request), timeout_s)
            return list(self._presents[request])
        finally:
            del self._presents[request]

    def read_log(self, name: str) -> str:
        """The last lines of a worker. UsageError where there is none of that name."""
        self._check_usable()
        request = next(self._requests)
        return str(self._ask(request, control.ReadLog(request, name, False), ANSWER_S).text)

    def _ask(self, request: int, message: Any, timeout_s: float) -> Any:
        """Send it and wait for its answer; DeadlineError, ConnectError, or what the broker says against it."""
        self._asked.add(request)
        self._send_soon(message)
        try:
            with self._news:
                self._news.wait_for(lambda: request in self._answers or not self.broker_alive, timeout_s)
                if request not in self._answers and not self.broker_alive:
                    raise ConnectError(self._broker_gone("it did not answer"))
                answer = self._answers.get(request)
        finally:
            self._forget(request)
        if answer is None:
            raise DeadlineError(f"the broker did not answer within {timeout_s:g} s; is it stopped?")
        if isinstance(answer, control.Denied):
            raise getattr(errors, answer.kind, UsageError)(answer.message)
        return answer

    def follow_log(self, name: str) -> Iterator[str]:
        """`read_log`, and then what the worker prints, piece by piece; until the broker ends, which raises ConnectError."""
        self._check_usable()
        outputs = self._outputs = queue.SimpleQueue()
        request = next(self._requests)
        yield str(self._ask(request, control.ReadLog(request, name, True), ANSWER_S).text)
        while self.broker_alive or not outputs.empty():
            with contextlib.suppress(queue.Empty):
                output = outputs.get(timeout=FOLLOW_S)
                self._send_soon(control.Heard(output.cost))
                yield output.text
        raise ConnectError(self._broker_gone("its workers print no more"))

    def wait_broker_ended(self, timeout_s: float) -> bool:
        """Whether the broker is gone, waiting at most so long for it."""
        with self._news:
            return self._news.wait_for(lambda: not self.broker_alive, timeout_s)

    def find_worker(self, name: str, timeout_s: float) -> control.Present:
        """The worker of that name once it is ready. UsageError where there is none; WorkerStartError, DeadlineError."""
        deadline = time.monotonic() + timeout_s
        while True:
            there = {present.name: present for present in self.look()}
            if name not in there:
                names = ", ".join(sorted(there)) or "none"
                raise UsageError(f"no worker {name!r}; there are {names}")
            found = there[name]
            if found.state in ("idle", "busy"):
                return found
            if found.state == "ended":
                raise WorkerDiedError(
                    f"worker {name!r} ended ({found.doing}); its last output: gradwire logs {name}",
                    was_running=False,
                )
            if time.monotonic() > deadline:
                raise DeadlineError(f"worker {name!r} is still {found.doing} after {timeout_s:g} s")
            time.sleep(FIND_AGAIN_S)

    def use(self, present: control.Present) -> WorkerFacts:
        """From now on that worker's output is shown here, and its death is news."""
        self._send_soon(control.Show(present.name, True))
        with self._news:
            if present.incarnation not in self._deaths:
                self._living[present.incarnation] = present
        return WorkerFacts(
            present.name,
            present.incarnation,
            present.pid,
            self._broker.reachable(present.endpoint),
            present.tether_path,
            present.token,
            present.info,
        )

    def show(self, name: str, wanted: bool) -> None:
        """Have that worker's output shown here, or no more. Does not wait."""
        self._send_soon(control.Show(name, wanted))

    def let_go(self) -> None:
        """The shared broker that this program started does not end with it any more. Blocks until that is so."""
        request = next(self._requests)
        self._ask(request, control.LetGo(request), ANSWER_S)

    def end_broker(self, timeout_s: float = CLOSE_S) -> bool:
        """End a shared broker and all its workers, for all its clients. Whether it ended within the time."""
        self._check_usable()
        self._send_soon(control.ShutDown(0.6 * timeout_s))
        return self._broker.wait_ended(timeout_s)

    @property
    def address(self) -> str:
        """Where the broker listens."""
        return self._broker.address

    def _wait_started(self, request: int, spec: WorkerSpec) -> Any:
        start = time.monotonic()
        progress_s = FIRST_PROGRESS_S
        while (past := time.monotonic() - start) < spec.start_timeout + PATIENCE_S:
            with self._news:
                self._news.wait_for(
                    lambda: request in self._answers or not self.broker_alive, progress_s - past
                )
                if request in self._answers:
                    return self._answers[request]
                if not self.broker_alive:
                    raise WorkerStartError(self._broker_gone("the worker did not start"))
            if time.monotonic() - start >= progress_s:
                doing = self._doing.get(request, "waiting for the broker")
                _say(f"worker {spec.name or spec.framework!r} is still {doing} ({progress_s:.0f} s)")
                progress_s += NEXT_PROGRESS_S
        raise WorkerStartError("the broker does not answer; close the bridge and connect anew")

    def _forget(self, request: int) -> None:
        with self._news:
            self._asked.discard(request)
            self._answers.pop(request, None)
            self._doing.pop(request, None)

    def interrupt(self, incarnation: bytes) -> None:
        """SIGINT to the worker, if it is ready and there. Does not wait."""
        self._check_process()
        self._send_soon(control.Interrupt(incarnation))

    def stop_worker(self, incarnation: bytes, timeout_s: float = 5.0) -> None:
        """Ask the worker to end, terminate it, kill it; returns when it is gone. Idempotent.

        Raises DeadlineError where even that does not end it within the time (a process that hangs in the kernel).
        """
        self._check_process()
        if self._closed or not self.broker_alive or incarnation in self._deaths:
            return
        if self.keys is not None:
            raise UsageError(
                "over tcp workers are used, and neither started nor ended: do that where the broker runs"
            )
        self._send_soon(control.Stop(incarnation, timeout_s))
        if self.death_of(incarnation, timeout_s + 1.0) is None and self.broker_alive:
            raise DeadlineError(f"the worker is still there {timeout_s + 1.0:g} s after it was asked to end")

    def death_of(self, incarnation: bytes, wait_s: float = 0.0) -> Death | None:
        """How that worker ended, waiting at most so long for the broker's report. None: not known to have ended."""
        self._check_process()
        with self._news:
            self._news.wait_for(lambda: incarnation in self._deaths or not self.broker_alive, wait_s)
            return self._deaths.get(incarnation)

    # ---- The thread's services ----

    def call_soon(self, work: Callable[[], None]) -> None:
        """Have the link's thread run this, soon. Takes no lock: finalizers may call it. After close: dropped."""
        self._work.append(work)
        with contextlib.suppress(OSError):  # full: the thread is being woken already
            self._waking_end.send(b"\0")

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Have the link's thread call this whenever the descriptor is readable or at its end, until `unwatch`."""
        self.call_soon(lambda: self._listen(fd, on_readable))

    def unwatch(self, fd: int) -> None:
        """Forget the descriptor. When this returns it may be closed. Waits at most a second, normally not at all."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            self._unlisten(fd)
            return
        done = threading.Event()

        def forget() -> None:
            self._unlisten(fd)
            done.set()

        self.call_soon(forget)
        done.wait(1.0)

    def every_second(self, tick: Callable[[], None]) -> None:
        """Have the link's thread call this about once a second."""
        self.call_soon(lambda: self._ticks.append(tick))

    # ---- Ends ----

    def close(self) -> None:
        """End the broker and all its workers; leave a shared one. Bounded, idempotent; nothing in a forked child."""
        if self._closed or os.getpid() != self._pid:
            return
        self._ask_to_end(CLOSE_S)
        self._wait_ended(CLOSE_S)
        if self.broker_alive and not self.is_shared:
            self._broker.kill()

    def _ask_to_end(self, timeout_s: float) -> None:
        self._closed = True
        _open_links.discard(self)
        self._send_soon(control.Detach() if self.is_shared else control.ShutDown(0.6 * timeout_s))

    def _wait_ended(self, timeout_s: float) -> None:
        """Wait for the broker's end and end the thread; only the latter where this is that thread."""
        if threading.current_thread() is self._thread:
            self._stop()
            return
        if not self.is_shared:
            with self._news:
                self._news.wait_for(lambda: not self.broker_alive or self._stopping, timeout_s)
        self.call_soon(self._stop)
        self._thread.join(1.0)

    def _stop(self) -> None:
        self._stopping = True

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError("this bridge belongs to the parent process; open one of your own in the child")

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError("the bridge is closed; connect anew")
        if not self.broker_alive:
            raise ConnectError(self._broker_gone("nothing can be asked of it"))

    def _broker_gone(self, consequence: str) -> str:
        words = f". Its last words:\n{self._last_words}" if self._last_words else ""
        return f"the broker ended, so {consequence}; {self._broker.revival}{words}"

    # ---- The thread ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            traceback.print_exc()
        finally:
            self._leave()

    def _prepare(self) -> None:
        """Before the thread starts, which then has the socket to itself."""
        self._poller = sockets.Poller()
        self._dealer = sockets.connect_dealer(
            self._broker.address, os.urandom(16), keys=self.keys, before=self._watch_broker
        )
        self._listen(self._dealer, self._hear)
        self._listen(self._wake_end.fileno(), self._awake)
        self._send(control.Attach(control.PROTOCOL, self._broker.token, self._pid))

    def _watch_broker(self, dealer: Any) -> None:
        self._end = self._broker.watch(dealer)
        self._listen(self._end, self._broker_perhaps_ended)

    def _turn(self) -> None:
        for key, _ in self._poller.poll(self._wait_ms()):
            handler = self._watched.get(key)
            if handler is not None:
                self._guarded(key, handler)
        self._do_work()
        if self._ticks and time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + 1.0
            for tick in list(self._ticks):
                self._guarded(None, tick)
        if self._screen.waiting:
            self._pour()

    def _wait_ms(self) -> int | None:
        if self._screen.waiting:
            return 50  # stderr takes no more for now
        return max(0, int(1000 * (self._next_tick - time.monotonic())) + 1) if self._ticks else None

    def _guarded(self, key: Any, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # of somebody else; it must not end the thread, nor be called for ever
            traceback.print_exc()
            if key is not None and key is not self._dealer:
                self._unlisten(key)

    def _listen(self, key: Any, handler: Callable[[], None]) -> None:
        self._watched[key] = handler
        self._poller.register(key, sockets.IN)

    def _unlisten(self, key: Any) -> None:
        if self._watched.pop(key, None) is not None:
            self._poller.unregister(key)

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_end.recv(4096)

    def _do_work(self) -> None:
        while self._work:
            self._guarded(None, self._work.popleft())

    def _send_soon(self, message: Any) -> None:
        self.call_soon(lambda: self._send(message))

    def _send(self, message: Any) -> None:
        if self.broker_alive:
            with contextlib.suppress(sockets.Unreachable):
                sockets.send_nowait(self._dealer, [control.pack(message)])

    def _pour(self) -> None:
        cost = self._screen.pour()
        if cost:
            self._send(control.Heard(cost))

    def _hear(self) -> None:
        while (frames := sockets.receive_nowait(self._dealer)) is not None:
            message = control.unpack(frames[0])
            if isinstance(message, control.Output) and self._outputs is not None:
                self._outputs.put(message)
            elif isinstance(message, control.Output):
                self._screen.show(message)
                self._pour()
            else:
                with self._news:
                    self._learn(message)
                    self._news.notify_all()

    def _learn(self, message: Any) -> None:
        if isinstance(message, control.Attached):
            self._attached = True
        elif isinstance(message, control.Refused):
            self._refusal = message
        elif isinstance(message, control.Died):
            self._living.pop(message.incarnation, None)
            self._record(message.incarnation, Death(*message[1:]))
        elif isinstance(message, control.HasThreads):
            if (
                message.incarnation in self._living
            ):  # the same dict as in the `WorkerFacts` that were given out
                self._living[message.incarnation].info["threads"] = message.threads
        elif isinstance(message, control.Present):
            if message.request in self._presents:
                self._presents[message.request].append(message)
        elif message.request in self._asked:
            self._learn_of_start(message)

    def _learn_of_start(self, message: Any) -> None:
        if isinstance(message, control.Starting):
            self._doing[message.request] = message.doing
            return
        self._answers[message.request] = message
        if isinstance(message, control.Started):
            self._living[message.incarnation] = message

    def _record(self, incarnation: bytes, death: Death) -> None:
        self._deaths[incarnation] = death
        while len(self._deaths) > DEATHS_KEPT:
            del self._deaths[next(iter(self._deaths))]

    def _broker_perhaps_ended(self) -> None:
        if self._broker.has_ended():
            self._broker_ended()

    def _broker_ended(self) -> None:
        self._dealer.poll(LAST_MESSAGES_MS)
        self._hear()
        self._unlisten(self._end)
        self._broker.wait_ended(0.0)
        self._last_words = self._broker.last_words()
        orphaned = list(self._living)
        with self._news:
            self.broker_alive = False
            words = f"(the broker ended, and its workers with it; {self._broker.revival})"
            for incarnation in orphaned:
                self._record(incarnation, Death(None, "SIGKILL", words, ""))
            self._living.clear()
            self._news.notify_all()
        if self.keys is None:  # it ran on this machine
            import shutil  # which the broker's start has loaded: there is nothing to read at the interpreter's exit

            shutil.rmtree(self._broker.folder, ignore_errors=True)
            end_orphans(orphaned)

    def _leave(self) -> None:
        """The thread's last act: nobody waits for it any more, and the broker takes the closed lifeline for the end."""
        with self._news:
            self._stopping, self.broker_alive = True, False
            self._news.notify_all()
        self._broker.close()
        self._dealer.close(LAST_MESSAGES_MS if self.is_shared else 0)
        self._wake_end.close()
        self._waking_end.close()


def _facts(answer: Answer) -> WorkerFacts:
    if isinstance(answer, control.NotStarted):
        raise WorkerStartError(answer.message)
    if isinstance(answer, control.Denied):
        raise getattr(errors, answer.kind, UsageError)(answer.message)
    return WorkerFacts(*answer[1:])


def _order(request: int, spec: WorkerSpec) -> control.Start:
    cwd = os.path.abspath(os.path.expanduser(spec.cwd)) if spec.cwd else os.getcwd()
    python = os.path.expanduser(spec.python) if spec.python else None
    if python is not None and os.sep in python:
        python = os.path.abspath(python)
    return control.Start(
        request=request,
        framework=spec.framework,
        name=spec.name or "",
        python=python,
        base=dict(os.environb),
        env=dict(spec.env),
        path=[
            os.path.abspath(os.path.expanduser(folder))
            for folder in ([cwd] if spec.path is None else spec.path)
        ],
        cwd=cwd,
        threads=spec.threads,
        x64=spec.x64,
        device=spec.device,
        timeout_s=spec.start_timeout,
        loads=spec.loads,
        lasts=spec.lasts,
        restart=spec.restart,
    )


def _say(sentence: str) -> None:
    with contextlib.suppress(Exception):  # the user's stderr may be closed, or none
        print(f"gradwire: {sentence}", file=sys.stderr, flush=True)


_open_links: weakref.WeakSet[BrokerLink] = weakref.WeakSet()


def _close_all() -> None:
    """At the interpreter's exit: all are asked at once, then waited for together."""
    links = [link for link in _open_links if link._pid == os.getpid()]
    deadline = time.monotonic() + EXIT_S
    for link in links:
        link._ask_to_end(EXIT_S)
    for link in links:
        link._wait_ended(max(0.0, deadline - time.monotonic()))


atexit.register(_close_all)
