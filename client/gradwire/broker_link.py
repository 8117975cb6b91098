"""This program's line to the broker: starts and stops workers, learns of their deaths, shows what they print.

What is here asks and waits for answers, in the thread that asks. The conversation goes on in a thread of its own
(`gradwire.link_thread`, `gradwire.broker_channel`), and what that has learned is waited for in `gradwire.broker_news`.
After a fork the child owns nothing of this: what asks raises ForkedError there.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gradwire.broker_channel import CLOSE_S, BrokerChannel
from gradwire.broker_news import Request
from gradwire.restarts import Restarts
from gradwire.worker_records import Death, WorkerFacts, WorkerSpec, facts_of, order_of
from gradwire_wire import control
from gradwire_wire.errors import (
    ConnectError,
    DeadlineError,
    MemoryExhaustedError,
    ProtocolError,
    UsageError,
    WorkerDiedError,
    WorkerStartError,
    class_named,
)
from gradwire_wire.process import fill_standard_descriptors

if TYPE_CHECKING:
    from gradwire.broker_channel import Broker
    from gradwire.far_broker import FarBroker
    from gradwire.private_broker import Sharing
    from gradwire.recording import Recording
    from gradwire.shared_broker import SharedBroker

__all__ = ["BrokerLink", "say"]

PATIENCE_S = 10.0  # beyond a deadline that the broker keeps, before the broker itself is given up
ANSWER_S = 5.0  # a broker answers at once; a machine may be busy
FIND_AGAIN_S = 0.1
FOLLOW_S = 0.5
FIRST_PROGRESS_S, NEXT_PROGRESS_S = 5.0, 10.0


class BrokerLink:
    """Every method may be called from any thread. Those that ask raise ClosedError and ConnectError where nothing can be.

    recorder: notes what the calls of this bridge do; None while nobody records.
    """

    recorder: Recording | None

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.is_shared = not broker.ends_with_us
        self.keys = broker.keys
        self.recorder = None
        self._channel = BrokerChannel(broker)
        self._news = self._channel.news
        thread = self._channel.thread  # whose services are offered on, as they are
        self.watch, self.unwatch, self.every_second = thread.watch, thread.unwatch, thread.every_second

    @classmethod
    def start_private(
        cls, start_timeout: float, expected_workers: int = 0, sharing: Sharing | None = None
    ) -> BrokerLink:
        """Start a broker, of this program's own or a shared one. Blocks until it answers; ConnectError with its last lines."""
        fill_standard_descriptors()
        deadline = time.monotonic() + start_timeout
        from gradwire.private_broker import PrivateBroker  # what starting a process takes is not everybody's

        return cls._attached_to(PrivateBroker(start_timeout, expected_workers, sharing), deadline)

    @classmethod
    def to_shared(cls, broker: SharedBroker | FarBroker, timeout_s: float) -> BrokerLink:
        """Connect to a broker that runs. Blocks until it answers; ConnectError."""
        fill_standard_descriptors()
        return cls._attached_to(broker, time.monotonic() + timeout_s)

    @classmethod
    def _attached_to(cls, broker: Broker, deadline: float) -> BrokerLink:
        try:
            link = cls(broker)
        except BaseException as error:  # no thread, no descriptor
            if broker.ends_with_us:
                broker.kill()
            broker.close()
            if isinstance(error, MemoryExhaustedError):
                raise ConnectError(f"a bridge needs threads of its own. {error}") from error
            raise
        try:
            if not link._news.wait_attached(deadline - time.monotonic()):
                raise ConnectError(
                    f"the broker at {link.address} does not answer{broker.when_silent}\n{broker.last_words()}".rstrip()
                )
        except BaseException:
            link.close()
            raise
        return link

    # ---- The broker ----

    @property
    def address(self) -> str:
        """Where the broker listens."""
        return self._broker.address

    @property
    def folder(self) -> str | None:
        """The broker's runtime folder, of mode 0700; None where it is on another machine."""
        return str(self._broker.folder) if self.keys is None else None

    @property
    def broker_alive(self) -> bool:
        """Whether the broker is there, as far as is known."""
        return self._news.broker_alive

    def broker_gone(self, consequence: str) -> str:
        """The sentence for an error that comes of the broker's end."""
        return self._news.broker_gone(consequence)

    def wait_broker_ended(self, timeout_s: float) -> bool:
        """Whether the broker is gone, waiting at most so long for it."""
        return self._news.wait_broker_ended(timeout_s)

    def let_go(self) -> None:
        """The shared broker that this program started does not end with it any more. Blocks until that is so."""
        with self._news.request() as request:
            self._ask(request, control.LetGo(request.number), control.Alone)

    def end_broker(self, timeout_s: float = CLOSE_S) -> bool:
        """End a shared broker and all its workers, for all its clients. Whether it ended within the time."""
        self._channel.check_usable()
        self._channel.send_soon(control.ShutDown(0.6 * timeout_s))
        return self._broker.wait_ended(timeout_s)

    def close(self) -> None:
        """End the broker and all its workers; leave a shared one. Bounded, idempotent; nothing in a forked child."""
        self._channel.close()

    # ---- Starting workers, and their ends ----

    def start_worker(self, spec: WorkerSpec) -> WorkerFacts:
        """Start a worker and wait until it is ready; says on stderr how far it is where that takes long.

        Raises WorkerStartError: why, the command line, how it ended, its last output; UsageError where it cannot
        be had as asked for (its name is taken). An interrupted wait ends the worker.
        """
        self._channel.check_usable()
        with self._news.request() as request:
            self._channel.send_soon(order_of(request.number, spec))
            try:
                answer = self._wait_started(request, spec)
            except BaseException:
                self._channel.send_soon(control.Cancel(request.number))
                raise
        return facts_of(answer)

    def restart_worker(self, incarnation: bytes, spec: WorkerSpec) -> WorkerFacts:
        """Have a worker of a shared broker ended, if it lives, and started again; or learn that this has been done.

        Raises as `start_worker` does.
        """
        self._channel.check_usable()
        with self._news.request() as request:
            self._channel.send_soon(control.Restart(request.number, incarnation))
            return facts_of(self._wait_started(request, spec))

    def _wait_started(self, request: Request, spec: WorkerSpec) -> Any:
        start = time.monotonic()
        progress_s = FIRST_PROGRESS_S
        longest_s = spec.start_timeout + PATIENCE_S
        while (past := time.monotonic() - start) < longest_s:
            answer = self._news.wait_answer(request, min(progress_s, longest_s) - past)
            if answer is not None:
                return answer
            if not self.broker_alive:
                raise WorkerStartError(self._news.broker_gone("the worker did not start"))
            if time.monotonic() - start >= progress_s:
                doing = request.doing or "waiting for the broker"
                say(f"worker {spec.name or spec.framework!r} is still {doing} ({progress_s:.0f} s)")
                progress_s += NEXT_PROGRESS_S
        raise WorkerStartError(
            f"worker {spec.name or spec.framework!r} did not start: the broker has not answered for {longest_s:g} s; is it stopped? "
            "Close the bridge and connect anew"
        )

    def interrupt(self, incarnation: bytes) -> None:
        """Have the worker look whether the call that runs was abandoned, if it is ready and there. Does not wait."""
        self._channel.check_process()
        self._channel.send_soon(control.Interrupt(incarnation))

    def stop_worker(self, incarnation: bytes, timeout_s: float = 5.0) -> None:
        """Ask the worker to end, terminate it, kill it; returns when it is gone. Idempotent.

        Raises DeadlineError where even that does not end it within the time (a process that hangs in the kernel),
        UsageError over tcp.
        """
        if self.death_of(incarnation) is not None or self._channel.is_closed or not self.broker_alive:
            return
        self.check_starts_workers()
        self._channel.send_soon(control.Stop(incarnation, timeout_s))
        if self.death_of(incarnation, timeout_s + 1.0) is None and self.broker_alive:
            raise DeadlineError(f"the worker is still there {timeout_s + 1.0:g} s after it was asked to end")

    def check_starts_workers(self) -> None:
        """Raises UsageError where workers are neither started nor ended from here: over tcp."""
        if self.keys is not None:
            raise UsageError(
                "over tcp workers are used, and neither started nor ended: do that where the broker runs"
            )

    def tell_of_death(self, incarnation: bytes, act: Callable[[], None]) -> None:
        """Have a method called once that worker's end is known, in the link's thread, unless its object is gone by then."""
        news = self._news
        self._channel.thread.call_soon(lambda: news.tell_of_death(incarnation, act))

    def death_of(self, incarnation: bytes, wait_s: float = 0.0) -> Death | None:
        """How that worker ended, waiting at most so long for the broker's report. None: not known to have ended."""
        self._channel.check_process()
        return self._news.wait_death(incarnation, wait_s)

    # ---- Workers that others started ----

    def look(self, timeout_s: float = ANSWER_S) -> list[control.Present]:
        """All workers of the broker, with what `ps` shows of them; ended ones as well."""
        self._channel.check_usable()
        with self._news.request() as request:
            self._ask(request, control.Look(request.number), control.Looked, timeout_s)
            return request.presents

    def find_worker(self, name: str, timeout_s: float) -> control.Present:
        """The worker of that name once it is ready; one that died is started again if its file says so.

        UsageError where there is none; WorkerDiedError, WorkerStartError, DeadlineError.
        """
        deadline = time.monotonic() + timeout_s
        tried: set[bytes] = set()
        while True:
            there = {present.name: present for present in self.look()}
            if name not in there:
                names = ", ".join(sorted(there)) or "none"
                raise UsageError(f"no worker {name!r}; there are {names}")
            found = there[name]
            if found.state in ("idle", "busy"):
                return found
            if found.state == "ended":
                self._start_by_policy(found, is_second=bool(tried - {found.incarnation}))
                tried.add(found.incarnation)
            if time.monotonic() > deadline:
                doing = f"not there again ({found.doing})" if found.state == "ended" else found.doing
                raise DeadlineError(f"worker {name!r} is still {doing} after {timeout_s:g} s")
            time.sleep(FIND_AGAIN_S)

    def _start_by_policy(self, ended: control.Present, is_second: bool) -> None:
        """As the call of a client would that has known it alive. WorkerDiedError where its policy is not to, or it ended again."""
        name, restarts = ended.name, Restarts(ended.restart)
        if is_second or not restarts.wants(_exit_code(ended.doing)):
            why = "at once after its start" if is_second else "which its policy does not start again"
            raise WorkerDiedError(
                f"worker {name!r} ended ({ended.doing}), {why} (restart={restarts.mode!r}); its last "
                f"output: gradwire logs {name}. To have it again: gradwire stop --all, and gradwire up FILE",
                was_running=False,
            )
        with contextlib.suppress(UsageError):  # another client has had it started meanwhile
            self.restart_worker(ended.incarnation, WorkerSpec(framework=ended.framework, name=name))

    def use(self, present: control.Present) -> WorkerFacts:
        """From now on that worker's output is shown here, and its death is news."""
        self.show(present.name, True)
        self.look(ANSWER_S)  # behind it: what the first call prints may reach the broker at once
        self._news.note_living(present)
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
        self._channel.send_soon(control.Show(name, wanted))

    def follow_log(self, name: str) -> Iterator[str]:
        """`read_log`, and then what the worker prints, piece by piece; until the broker ends, which raises ConnectError."""
        self._channel.check_usable()
        outputs = self._channel.follow()
        yield self._log_of(name, follow=True)
        while self.broker_alive or not outputs.empty():
            with contextlib.suppress(queue.Empty):
                output = outputs.get(timeout=FOLLOW_S)
                self._channel.send_soon(control.Heard(output.cost))
                yield output.text
        raise ConnectError(self._news.broker_gone("its workers print no more"))

    def read_log(self, name: str) -> str:
        """The last lines of a worker. UsageError where there is none of that name."""
        self._channel.check_usable()
        return self._log_of(name, follow=False)

    def _log_of(self, name: str, follow: bool) -> str:
        with self._news.request() as request:
            asked = control.ReadLog(request.number, name, follow)
            return str(self._ask(request, asked, control.Log).text)

    def _ask(self, request: Request, message: Any, kind: type, timeout_s: float = ANSWER_S) -> Any:
        """Send it and wait for its answer of that kind; DeadlineError, ConnectError, or what the broker says against it."""
        self._channel.send_soon(message)
        answer = self._news.wait_answer(request, timeout_s)
        if answer is None and not self.broker_alive:
            raise ConnectError(self._news.broker_gone("it did not answer"))
        if answer is None:
            raise DeadlineError(f"the broker did not answer within {timeout_s:g} s; is it stopped?")
        if isinstance(answer, control.Denied):
            raise class_named(answer.kind, UsageError)(answer.message)
        if not isinstance(answer, kind):
            raise ProtocolError(f"the broker answers {type(message).__name__} with {type(answer).__name__}")
        return answer


def _exit_code(how: str) -> int | None:
    """What a Present says of an end, as a number; None of a signal."""
    code = how.removeprefix("exit code ")
    return int(code) if code != how else None


def say(sentence: str) -> None:
    """To whoever sits before this program."""
    with contextlib.suppress(Exception):  # the user's stderr may be closed, or none
        print(f"gradwire: {sentence}", file=sys.stderr, flush=True)
