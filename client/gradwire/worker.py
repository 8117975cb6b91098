"""A worker process, seen from the client: where remote functions and modules come from."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

from gradwire.background import Background
from gradwire.broker_link import BrokerLink
from gradwire.connection import Connection
from gradwire.endings import was_closed
from gradwire.families import barrier, exported, is_leaf
from gradwire.handle import Handle
from gradwire.orders import checked_target
from gradwire.remote import Remote
from gradwire.restarts import MOST_EARLY_ENDS, Restarts
from gradwire.worker_records import WorkerFacts, WorkerSpec
from gradwire_wire.errors import GradwireError, UsageError, WorkerStartError
from gradwire_wire.exchange import Memory
from gradwire_wire.structures import flatten, positional

__all__ = ["HANDSHAKE_S", "Worker", "belongs_here"]

HANDSHAKE_S = 30.0
REPORT_S = 1.5
ENDING_S = 1.0


_said: set[str] = set()


def _say_fallback(connection: Connection) -> None:
    """Once in a process for each way: that tensors go a slower way than they could, and why."""
    way, why = connection.exchange.carried_by, connection.exchange.why_not_shared
    if way == "shared memory" or way in _said:
        return
    _said.add(way)
    speed = "each is copied once more" if way == "files" else "each is copied several times"
    with contextlib.suppress(Exception):  # the user's stderr may be closed, or none
        print(
            f"gradwire: tensors travel through {way} instead of shared memory, so {speed} ({why})",
            file=sys.stderr,
            flush=True,
        )


def belongs_here(x: object) -> UsageError:
    """What copying and pickling a bridge or a worker raise."""
    return UsageError(
        f"{x!r} belongs to this process and cannot be copied or pickled; another process makes its own with "
        "gradwire.connect(...)"
    )


class Worker:
    """One interpreter with one framework. Made by `Bridge.worker`; usable from any thread.

    ``_lock`` is held while the process is replaced: calls made meanwhile wait for the new one.
    """

    def __init__(self, link: BrokerLink, memory: Memory, spec: WorkerSpec, restart: str = "never") -> None:
        self._restarts = Restarts(restart)
        self._link, self._memory, self._spec = link, memory, spec
        self._lock = threading.RLock()  # a handler of signals must not wait for what it has interrupted
        self._ending = threading.Event()
        self._background = Background(f"gradwire-{spec.name}")
        self._closed = False
        self._failure: str | None = None
        self._connection = self._start()
        self._since = time.monotonic()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise belongs_here(self)

    def _start(self) -> Connection:
        facts = self._start_process()
        try:
            made = self._greet(facts)
        except BaseException:
            self._end_process(facts)
            raise
        _say_fallback(made)
        made.life.advise, made.life.revives = self._restarts.advice, self._restarts.revives
        return made

    def _greet(self, facts: WorkerFacts) -> Connection:
        return Connection(self._link, facts, self._memory, HANDSHAKE_S)

    def _start_process(self) -> WorkerFacts:
        return self._link.start_worker(self._spec)

    def _end_process(self, facts: WorkerFacts) -> None:
        self._link.stop_worker(facts.incarnation)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"pid {self.pid}" if self.alive else "dead"
        return f"<gradwire.Worker {self.name!r} {self._spec.framework} {state}>"

    def function(self, target: str) -> Remote:
        """A remote function, named ``"pkg.mod:attr"`` or ``"path/file.py:attr"``.

        It must be pure; what has state is loaded with `module`. A JAX or TensorFlow worker traces the function once for each
        signature, so what its Python does beside that (counters, ``np.random``, printing) happens at the trace only. A function
        that cannot be traced runs eagerly. With ``options(compile=False)`` it always does, and ``compile=True`` makes it an error.

        Raises UnknownTargetError if it is not there, RemoteError with what its module raised when it was imported.
        """
        name = checked_target(target)
        return Remote(Handle(self._present, "function", name, positional(0), []), self._background)

    def module(self, target: str, /, *args: Any, **kwargs: Any) -> Remote:
        """A remote module, made by a factory: ``worker.module("models:make_net", depth=3)``.

        The target is the factory, named as for `function`. It is called in the worker with these arguments (copies of the
        tensors among them), and what it returns stays there: a module of the worker's framework, or any callable. Its state
        lives until the last `Remote` of it is gone, or the process ends; after a restart the factory is called again.

        Raises UnknownTargetError if the factory is not there, RemoteError with what it raised, UsageError if what it returns
        cannot be called.
        """
        checked_target(target)
        structure, leaves = flatten([list(args), kwargs], is_leaf)
        carriers = exported(leaves, structure)
        return Remote(Handle(self._present, "module", target, structure, carriers), self._background)

    def _present(self) -> Connection:
        connection = self._connection
        if connection.life.is_there and not self._closed:
            return connection
        return self._revived()

    def _revived(self) -> Connection:
        """After a death or during a restart: waits for what is under way, then starts the worker if its policy says so."""
        with self._lock:
            self._check_open()
            connection = self._connection
            if connection.life.is_there:
                return connection
            death = self._link.death_of(self._facts.incarnation, REPORT_S)
            exit_code = death.exit_code if death is not None else None
            if self._failure is None and not self._restarts.wants(exit_code):
                return connection  # which tells how it died
            if not self._restarts.revives:
                raise WorkerStartError(
                    f"worker {self.name!r} did not restart; worker.restart() tries again. {self._failure}"
                )
            self._revive(has_died=self._failure is None)
            return self._connection

    def _revive(self, has_died: bool) -> None:
        """The policy's restart, by the call that needs it. Raises WorkerStartError (lock held)."""
        restarts, connection = self._restarts, self._connection
        if has_died and not connection.life.is_counted:
            connection.life.is_counted = True
            restarts.note_end(time.monotonic() - self._since, connection.calls > 0)
        if restarts.is_given_up:
            raise WorkerStartError(
                f"worker {self.name!r} ended {MOST_EARLY_ENDS} times in a row at its start and was given up; "
                f"worker.restart() tries it once more. {self._failure or ''}".rstrip()
            )
        self._ending.wait(restarts.delay_s)
        self._check_open()
        self._end_process(connection.facts)  # it may live on though it cannot be reached any more
        try:
            self._replace()
        except WorkerStartError as error:
            restarts.note_end(0.0, has_answered=False)
            raise WorkerStartError(f"{error}\n  {restarts.advice(None)}") from error
        self._connection.life.follows_death = True

    def _replace(self, discard_state: bool = False) -> None:
        """Another process in place of this one (lock held). discard_state: see `restart`."""
        old = self._connection
        old.life.is_replaced = True
        old.close()
        old.bury()
        try:
            made = self._start()
        except GradwireError as error:
            self._failure = str(error)
            raise
        made.life.state_discarded = discard_state
        self._failure, self._connection, self._since = None, made, time.monotonic()
        if self._closed:  # meanwhile, by somebody who could not wait for the start
            made.close()

    def _check_open(self) -> None:
        if self._closed or self._ending.is_set():
            raise was_closed(self.name, was_running=False)

    @property
    def _facts(self) -> WorkerFacts:
        return self._connection.facts

    @property
    def name(self) -> str:
        """The name it was given, or its framework's."""
        return self._facts.name

    @property
    def pid(self) -> int:
        """Process id of the present incarnation."""
        return self._facts.pid

    @property
    def info(self) -> dict[str, Any]:
        """Executable, python, framework, numpy versions, devices, threads, and how tensors are carried."""
        return {**self._facts.info, "carried_by": self._connection.exchange.carried_by}

    @property
    def alive(self) -> bool:
        """Whether the process is there, as far as is known without asking it."""
        return not self._closed and self._connection.life.is_there

    @property
    def keeps_name(self) -> bool:
        """Whether no other worker may take its name: it is there, or may come back."""
        return self.alive or (self._restarts.revives and not self._closed)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def restart(self, *, discard_state: bool = False) -> None:
        """End the process, whatever it is doing, and start it again; targets are loaded again at their next call.

        Modules begin anew from their factory, in the mode they were in and with what was frozen: parameters that were
        trained are lost unless saved, and so are buffers that were moved. The first use of such a module raises
        WorkerDiedError once, unless it is ``load_state_dict`` or ``load``; discard_state: you know, do not raise.
        Calls in flight raise WorkerDiedError; calls made meanwhile wait for the new process.
        """
        self._check_open()
        with self._lock:
            self._check_open()
            self._restarts.forget()
            old = self._connection
            try:
                old.life.is_replaced = True
                self._link.stop_worker(old.facts.incarnation, 1.0)
                self._replace(discard_state)
            except (
                BaseException
            ) as error:  # Ctrl-C, too: nothing is there any more, and the next call says so
                if self._connection is old:
                    self._failure = self._failure or f"It was interrupted ({type(error).__name__})"
                    old.close()
                raise

    def close(self) -> None:
        """End the process; one that a shared broker started goes on for others. Results that are here stay valid. Idempotent."""
        self._ending.set()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._connection.life.is_there:
                barrier()
            self._background.close()
            self._connection.close()
            self._part()

    def _part(self) -> None:
        """The last of `close`."""
        self._link.stop_worker(self._facts.incarnation)
        self._connection.bury()

    def detach(self) -> None:
        """The broker is going, and the process with it: only let go of what is here."""
        self._closed = True
        self._ending.set()
        is_mine = self._lock.acquire(timeout=ENDING_S)  # a start under way ends with the broker
        try:
            self._background.close()
            self._connection.close()
        finally:
            if is_mine:
                self._lock.release()

    def bury(self) -> None:
        """After `detach`, once the broker has ended the process."""
        self._connection.bury()

    def stats(self) -> dict[str, Any]:
        """Figures of the present incarnation: calls, seconds waited and computed, bytes copied to it, loans."""
        c = self._connection
        return {
            "calls": c.calls,
            "waited_s": c.waited_s,
            "compute_s": c.compute_ns * 1e-9,
            "boundary_s": c.waited_s - c.compute_ns * 1e-9,
            "copied_bytes": c.exchange.copied_bytes,
            "lent": len(c.exchange.loans),
        }

    @property
    def last_error(self) -> tuple[float, GradwireError] | None:
        """When (monotonic seconds) and what a call on the present incarnation raised last."""
        return self._connection.last_error

    def every_second(self) -> None:
        """In the link's thread."""
        self._connection.every_second()
