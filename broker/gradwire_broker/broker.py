"""The broker's loop: one thread that waits for everything at once.

It waits for messages of clients (ROUTER), for the end of the program it belongs to (a pidfd, and the lifeline
for a program that replaces itself by exec), and for three descriptors of every worker (see `worker`). Workers
are started from here, the main thread, and nowhere else: the kernel kills a worker when the *thread* that
started it ends. Nothing is polled; an idle broker sleeps.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradwire_broker import clients, processors
from gradwire_broker.reports import not_started
from gradwire_broker.worker import CannotLaunch, Place, Worker
from gradwire_wire import control, sockets
from gradwire_wire.errors import ProtocolError, UsageError
from gradwire_wire.lifeline import Lifeline
from gradwire_wire.process import open_pidfd
from gradwire_wire.spawn import Lent

__all__ = ["Broker"]

DEATHS_KEPT = 256
UNKILLABLE_S = 2.0  # a killed process may hang in the kernel; the broker does not wait longer


class Broker:
    """Serves until its owner ends or says so. Owns the router and all workers, not the folder."""

    def __init__(self, address: str, folder: Path, token: bytes, lent: Lent) -> None:
        self._folder, self._lent = folder, lent
        self._workers: dict[bytes, Worker] = {}
        self._deaths: dict[bytes, control.Died] = {}
        self._over = False
        self._patience = math.inf  # until when to wait for the last workers
        self._poller = sockets.Poller()
        self._handlers: dict[Any, Callable[[], object]] = {}
        self._router = sockets.bind_router(address)
        self._clients = clients.Clients(self._router, token)
        self._listen(self._router, self._hear_clients)

    # ---- The loop ----

    def serve(self) -> None:
        """Until it is over and no worker is left. Returns within seconds of the owner's end."""
        while not self._over or (self._workers and time.monotonic() < self._patience):
            for key, _ in self._poller.poll(self._wait_ms()):
                handler = self._handlers.get(key)
                if handler is not None:
                    handler()
            self._keep_time()

    def _listen(self, key: Any, handler: Callable[[], object]) -> None:
        self._handlers[key] = handler
        self._poller.register(key, sockets.IN)

    def _unlisten(self, key: Any) -> None:
        if self._handlers.pop(key, None) is not None:
            self._poller.unregister(key)

    def _wait_ms(self) -> int | None:
        dues = [due for worker in self._workers.values() if (due := worker.due()) is not None]
        first = min((*dues, self._patience))
        return None if first == math.inf else max(0, int(1000 * (first - time.monotonic())) + 1)

    def _keep_time(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            worker.advance(now)

    # ---- Whose broker this is ----

    def belong_to(self, owner_pid: int, lifeline: Lifeline) -> bool:
        """Watch the program; False: it is gone already. Raises OSError where the kernel has no pidfd."""
        pidfd = open_pidfd(owner_pid)
        if os.getppid() != owner_pid:
            return False
        self._listen(pidfd, lambda: self._owner_gone(pidfd, lifeline))
        self._listen(lifeline.fileno(), lambda: self._owner_gone(pidfd, lifeline))
        return True

    def _owner_gone(self, pidfd: int, lifeline: Lifeline) -> None:
        self._unlisten(pidfd)
        self._unlisten(lifeline.fileno())
        self.kill_all()

    def kill_all(self) -> None:
        """It is over, at once."""
        self._over, self._patience = True, time.monotonic() + UNKILLABLE_S
        for worker in self._workers.values():
            worker.kill()

    def heed_signals(self) -> None:
        """SIGTERM and its like end the broker in order."""
        self._alarm, writer = os.pipe()
        for end in (self._alarm, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._listen(self._alarm, self._signalled)

    def _signalled(self) -> None:
        os.read(self._alarm, 64)
        self._shut_down(2.0)

    def _shut_down(self, timeout_s: float) -> None:
        self._over, self._patience = True, time.monotonic() + timeout_s + UNKILLABLE_S
        for worker in self._workers.values():
            worker.stop(timeout_s)

    # ---- Clients ----

    def _hear_clients(self) -> None:
        while (frames := sockets.receive_nowait(self._router)) is not None:
            message = self._clients.admitted(frames)
            if message is not None:
                with _reported():
                    self._obey(frames[0], message)

    def _obey(self, client: bytes, message: Any) -> None:
        if isinstance(message, control.Start):
            self._start(client, message)
        elif isinstance(message, control.Cancel):
            self._cancel(client, message.request)
        elif isinstance(message, control.Interrupt):
            if message.incarnation in self._workers:
                self._workers[message.incarnation].interrupt()
        elif isinstance(message, control.Stop):
            self._stop(client, message)
        elif isinstance(message, control.ShutDown):
            self._shut_down(message.timeout_s)
        else:
            raise ProtocolError(f"{type(message).__name__} is not for the broker")

    def _start(self, client: bytes, order: control.Start) -> None:
        try:
            worker = self._launch(client, order)
        except CannotLaunch as error:
            self._clients.send(client, control.NotStarted(order.request, str(error)))
            return
        except UsageError as error:
            self._clients.send(client, control.Denied(order.request, type(error).__name__, str(error)))
            return
        except Exception as error:
            why = not_started(
                order.name or order.framework, order.framework, f"{type(error).__name__}: {error}"
            )
            self._clients.send(client, control.NotStarted(order.request, why))
            raise
        self._workers[worker.place.incarnation] = worker
        self._listen(worker.pidfd, lambda: self._ended(worker))
        self._listen(worker.lifeline.fileno(), lambda: self._told(worker))
        self._listen(worker.output, lambda: self._printed(worker))
        self._clients.send(client, control.Starting(order.request, worker.doing))
        self._share_out()

    def _share_out(self) -> None:
        """The processors are shared anew among all; those that are in use already keep what they have."""
        share = processors.share_of(processors.available_processors(), len(self._workers))
        for worker in self._workers.values():
            worker.share(share)

    def _launch(self, client: bytes, order: control.Start) -> Worker:
        names = {worker.place.name for worker in self._workers.values()}
        name = order.name or _free_name(order.framework, names)
        if order.framework not in control.FRAMEWORKS:
            there_are = ", ".join(control.FRAMEWORKS)
            raise UsageError(f"there is no framework {order.framework!r}; there are {there_are}")
        if name in names:
            raise UsageError(f"there is a worker {name!r} already; give another name=")
        if self._over:
            raise CannotLaunch(not_started(name, order.framework, "the broker is ending"))
        base = dict(os.environ) if order.base is None else _decoded(order.base)
        return Worker(order, self._place(name), client, base)

    def _place(self, name: str) -> Place:
        incarnation = secrets.token_bytes(16)
        stem = str(self._folder / f"w{incarnation.hex()[:16]}")
        return Place(
            name=name,
            incarnation=incarnation,
            token=secrets.token_bytes(16),
            endpoint=f"ipc://{stem}.zmq",
            tether_path=f"{stem}.mem",
            threads=processors.share_of(processors.available_processors(), len(self._workers) + 1),
            lent=self._lent,
        )

    def _cancel(self, client: bytes, request: int) -> None:
        for worker in self._workers.values():
            if worker.client == client and worker.order.request == request:
                worker.kill()

    def _stop(self, client: bytes, message: control.Stop) -> None:
        incarnation = message.incarnation
        if incarnation in self._workers:
            self._workers[incarnation].stop(message.timeout_s)
        else:
            gone = control.Died(incarnation, None, None, "", "")
            self._clients.send(client, self._deaths.get(incarnation, gone))

    # ---- Workers ----

    def _told(self, worker: Worker) -> None:
        doing, was_ready, had = worker.doing, worker.ready, worker.threads
        if not worker.hear():
            self._unlisten(worker.lifeline.fileno())
        if worker.ready is not None and was_ready is None:
            self._clients.send(worker.client, _started(worker))
        elif worker.doing != doing:
            self._clients.send(worker.client, control.Starting(worker.order.request, worker.doing))
        if worker.threads is not None and worker.threads != had:
            self._clients.tell(control.HasThreads(worker.place.incarnation, worker.threads))

    def _printed(self, worker: Worker) -> None:
        text, more = worker.read()
        if not more:
            self._unlisten(worker.output)
        self._clients.tell_output(worker.place.name, text)

    def _ended(self, worker: Worker) -> None:
        self._told(worker)  # what it said before it ended
        for key in (worker.pidfd, worker.lifeline.fileno(), worker.output):
            self._unlisten(key)
        self._clients.tell_output(worker.place.name, worker.finish())
        del self._workers[worker.place.incarnation]
        self._share_out()
        self._sweep_sockets(worker)
        if worker.ready is None:
            self._clients.send(worker.client, control.NotStarted(worker.order.request, worker.not_started()))
            return
        assert worker.end is not None
        died = control.Died(worker.place.incarnation, *worker.end, worker.last_output, worker.command)
        self._deaths[died.incarnation] = died
        while len(self._deaths) > DEATHS_KEPT:
            del self._deaths[next(iter(self._deaths))]
        self._clients.tell(died)

    def _sweep_sockets(self, worker: Worker) -> None:
        for path in (worker.place.endpoint.partition("://")[2], worker.place.tether_path):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _started(worker: Worker) -> control.Started:
    place = worker.place
    assert worker.ready is not None
    return control.Started(
        request=worker.order.request,
        name=place.name,
        incarnation=place.incarnation,
        pid=worker.pid,
        endpoint=place.endpoint,
        tether_path=place.tether_path,
        token=place.token,
        info=worker.ready.info,
    )


def _free_name(framework: str, names: set[str]) -> str:
    if framework not in names:
        return framework
    return next(name for n in range(2, len(names) + 3) if (name := f"{framework}-{n}") not in names)


def _decoded(base: dict[bytes, bytes]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in base.items()}


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """A mistake in handling one message must not end the workers of all: it is written to the broker's stderr."""
    try:
        yield
    except Exception:
        traceback.print_exc(file=sys.stderr)
