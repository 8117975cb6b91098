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
from gradwire_broker.roll import Roll
from gradwire_broker.worker import CannotLaunch, Place, Worker
from gradwire_wire import control, keys, sockets
from gradwire_wire.errors import ProtocolError, UsageError
from gradwire_wire.lifeline import BrokerConfig, Lifeline
from gradwire_wire.process import RAISE_LIMIT, check_descriptors, open_pidfd
from gradwire_wire.spawn import Lent

__all__ = ["Broker"]

DEATHS_KEPT = 256
LAUNCH_DESCRIPTORS = 8  # what a launch takes for a moment; most are free afterwards, for clients who come: libzmq ends the process without
ENDED_KEPT = 32  # workers whose last words can still be asked for
CLIENT_GONE_S, RESTART_S = 3.0, 1.0  # for workers to end in
UNKILLABLE_S = 2.0  # a killed process may hang in the kernel; the broker does not wait longer


class Broker:
    """Serves until its owner ends or says so. Owns the router and all workers, not the folder."""

    def __init__(self, address: str, folder: Path, config: BrokerConfig, umask: int) -> None:
        self._folder, self._lent, self._umask = folder, Lent(config.lent_to_workers, []), umask
        self._allow, self._expected = config.allow, config.expected_workers
        self._is_shared = bool(config.name)
        self._workers: dict[bytes, Worker] = {}
        self._ended_workers: dict[str, Worker] = {}  # by name, the last one of each that ended
        self._restarts: dict[bytes, list[tuple[bytes, control.Restart]]] = {}
        self._guests: dict[bytes, int] = {}  # pidfds of a shared broker's clients
        self._deaths: dict[bytes, control.Died] = {}
        self._over = False
        self._patience = math.inf  # until when to wait for the last workers
        self._poller = sockets.Poller()
        self._handlers: dict[Any, Callable[[], object]] = {}
        self._router = sockets.bind_router(address)
        self._clients = clients.Clients(
            self._router, bytes.fromhex(config.token), bytes.fromhex(config.owner_token)
        )
        self._roll = Roll(self._clients.send)
        self._listen(self._router, lambda: self._hear_clients(clients.NEAR, self._router))
        self._far_host, self._keys = "", config.keys
        if config.listen:
            self._listen_far(config.listen, Path(config.keys))

    def _listen_far(self, address: str, folder: Path) -> None:
        """Also at tcp, for those whose keys are in the folder."""
        key = keys.server_key(folder)
        gate = sockets.Gatekeeper(lambda public: keys.is_known(folder, public))
        router = sockets.bind_router(address, key)
        self._far_host = address.rpartition(":")[0]
        self._clients.come_also_by(router)
        self._listen(gate.socket, gate.answer)
        self._listen(router, lambda: self._hear_clients(clients.FAR, router))

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
        first = min((*dues, self._patience, self._roll.due()))
        return None if first == math.inf else max(0, int(1000 * (first - time.monotonic())) + 1)

    def _keep_time(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            worker.advance(now)
        self._roll.advance(now)

    # ---- Whose broker this is ----

    def belong_to(self, owner_pid: int, lifeline: Lifeline) -> bool:
        """Watch the program; False: it is gone already. Raises OSError where the kernel has no pidfd."""
        pidfd = open_pidfd(owner_pid)
        if os.getppid() != owner_pid:
            return False
        self._owner = pidfd, lifeline
        self._listen(pidfd, lambda: self._owner_gone(pidfd, lifeline))
        self._listen(lifeline.fileno(), lambda: self._owner_gone(pidfd, lifeline))
        return True

    def _let_go(self, client: bytes, message: control.LetGo) -> None:
        """All is as its owner wanted it: a shared broker goes on without."""
        if not (self._is_shared and self._clients.is_owner(client)):
            self._clients.send(client, _denied(message, "only who started a shared broker can let it go"))
            return
        pidfd, lifeline = self._owner
        self._unlisten(pidfd)
        self._unlisten(lifeline.fileno())
        self._clients.send(client, control.Alone(message.request))

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

    def _hear_clients(self, way: bytes, router: Any) -> None:
        while (frames := sockets.receive_nowait(router)) is not None:
            client, message = self._clients.admitted(way, frames)
            if message is not None:
                with _reported():
                    self._obey(client, message)

    def _obey(self, client: bytes, message: Any) -> None:
        refusal = self._refusal(client, message)
        if refusal:
            self._clients.send(client, _denied(message, refusal))
        elif isinstance(message, control.Start):
            self._start(client, message)
        elif isinstance(message, control.Attach):
            self._watch_client(client, message.pid)
        elif isinstance(message, control.Detach):
            self._client_gone(client)
        elif isinstance(message, control.Look):
            self._roll.ask(client, message.request, self._all_workers(), time.monotonic())
        elif isinstance(message, control.ReadLog):
            self._tell_log(client, message)
        elif isinstance(message, control.Restart):
            self._restart(client, message)
        elif isinstance(message, control.LetGo):
            self._let_go(client, message)
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

    def _refusal(self, client: bytes, message: Any) -> str:
        """Why this client may not ask for that; "" where it may."""
        if clients.is_far(client) and isinstance(message, (control.Start, control.Stop, control.ShutDown)):
            return "over tcp workers are used, and neither started nor ended: do that where the broker runs"
        if (
            isinstance(message, control.Start)
            and self._allow is not None
            and not self._clients.is_owner(client)
        ):
            return (
                "this broker restricts which targets may be called (allow = [...] in its file), "
                "so its workers are those of the file; add yours there and start it again with gradwire up"
            )
        return ""

    def _watch_client(self, client: bytes, pid: int) -> None:
        """A shared broker forgets a client whose process has ended. (A private one ends itself then.)"""
        if not self._is_shared or clients.is_far(client):
            return
        try:
            pidfd = self._guests[client] = open_pidfd(pid)
        except OSError:  # in another PID namespace; it is forgotten when something cannot be sent to it
            return
        self._listen(pidfd, lambda: self._client_gone(client))

    def _client_gone(self, client: bytes) -> None:
        self._clients.forget(client)
        pidfd = self._guests.pop(client, -1)
        if pidfd >= 0:
            self._unlisten(pidfd)
            os.close(pidfd)
        for worker in self._workers.values():
            if worker.client == client and not worker.order.lasts and self._is_shared:
                worker.stop(CLIENT_GONE_S)

    def _all_workers(self) -> list[Worker]:
        """Those that live, and of the other names the last that had it; by name."""
        names = {worker.place.name for worker in self._workers.values()}
        ended = [worker for name, worker in self._ended_workers.items() if name not in names]
        return sorted([*self._workers.values(), *ended], key=lambda worker: worker.place.name)

    def _tell_log(self, client: bytes, message: control.ReadLog) -> None:
        for worker in self._all_workers():
            if worker.place.name == message.name:
                self._clients.send(client, control.Log(message.request, worker.log))
                if message.follow:
                    self._clients.show(client, message.name)
                return
        self._clients.send(client, _denied(message, self._unknown(message.name)))

    def _unknown(self, name: str) -> str:
        names = ", ".join(sorted(worker.place.name for worker in self._all_workers())) or "none"
        return f"there is no worker {name!r}; there are {names}"

    def _restart(self, client: bytes, message: control.Restart) -> None:
        old = next((w for w in self._all_workers() if w.place.incarnation == message.incarnation), None)
        if old is None:
            # another incarnation of it may be there: the client looks for that by its name
            self._clients.send(client, _denied(message, "that process of the worker is long gone"))
        elif old.end is None and clients.is_far(client):
            self._clients.send(client, _denied(message, "over tcp a worker that runs cannot be restarted"))
        elif old.end is None:
            self._restarts.setdefault(message.incarnation, []).append((client, message))
            old.stop(RESTART_S)
        else:
            self._start(old.client, old.order._replace(request=message.request), client)

    def _start_again(self, name: str, asked: list[tuple[bytes, control.Restart]]) -> None:
        """After the end of a worker that was to be restarted, perhaps by several clients: once, for all of them."""
        for client, message in asked:
            present = next((w for w in self._workers.values() if w.place.name == name), None)
            if present is None:
                self._restart(client, message)
            else:
                present.asking.append((client, message.request))

    def _start(self, client: bytes, order: control.Start, asker: bytes | None = None) -> None:
        """``asker``: who is told, if not the client that it will belong to."""
        asker = client if asker is None else asker
        try:
            worker = self._launch(client, order)
        except CannotLaunch as error:
            self._clients.send(asker, control.NotStarted(order.request, str(error)))
            return
        except UsageError as error:
            self._clients.send(asker, control.Denied(order.request, type(error).__name__, str(error)))
            return
        except Exception as error:
            why = not_started(
                order.name or order.framework, order.framework, f"{type(error).__name__}: {error}"
            )
            self._clients.send(asker, control.NotStarted(order.request, why))
            raise
        worker.asking = [(asker, order.request)]
        self._clients.show(asker, worker.place.name)
        self._workers[worker.place.incarnation] = worker
        self._listen(worker.pidfd, lambda: self._ended(worker))
        self._listen(worker.lifeline.fileno(), lambda: self._told(worker))
        self._listen(worker.output, lambda: self._printed(worker))
        self._clients.send(asker, control.Starting(order.request, worker.doing))
        self._share_out()

    def _share_out(self) -> None:
        """The processors are shared anew among all; those that are in use already keep what they have."""
        share = processors.share_of(
            processors.available_processors(), max(self._expected, len(self._workers))
        )
        for worker in self._workers.values():
            worker.share(share)

    def _launch(self, client: bytes, order: control.Start) -> Worker:
        names = {worker.place.name for worker in self._workers.values() if not worker.is_dismissed}
        name = order.name or _free_name(order.framework, names)
        if order.framework not in control.FRAMEWORKS:
            there_are = ", ".join(control.FRAMEWORKS)
            raise UsageError(f"there is no framework {order.framework!r}; there are {there_are}")
        if name in names:
            raise UsageError(f"there is a worker {name!r} already; give another name=")
        if self._over:
            raise CannotLaunch(not_started(name, order.framework, "the broker is ending"))
        try:
            check_descriptors(LAUNCH_DESCRIPTORS)
        except OSError as error:
            why = f"the broker has too few descriptors left for a worker: {error}; {RAISE_LIMIT} that started the broker"
            raise CannotLaunch(not_started(name, order.framework, why)) from error
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
            threads=processors.share_of(
                processors.available_processors(), max(self._expected, len(self._workers) + 1)
            ),
            lent=self._lent,
            allow=self._allow,
            listen=self._far_host,
            keys=self._keys,
            umask=self._umask,
        )

    def _cancel(self, client: bytes, request: int) -> None:
        for worker in self._workers.values():
            if worker.asking == [(client, request)] and worker.client == client:
                worker.is_dismissed = True
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
            for client, request in worker.asking:
                self._clients.send(client, _started(worker, request))
        elif worker.doing != doing:
            for client, request in worker.asking:
                self._clients.send(client, control.Starting(request, worker.doing))
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
        self._note_end(worker)
        if worker.ready is None:
            for client, request in worker.asking:
                self._clients.send(client, control.NotStarted(request, worker.not_started()))
        else:
            self._tell_death(worker)
        self._start_again(worker.place.name, self._restarts.pop(worker.place.incarnation, []))

    def _note_end(self, worker: Worker) -> None:
        self._ended_workers.pop(worker.place.name, None)
        self._ended_workers[worker.place.name] = worker
        while len(self._ended_workers) > ENDED_KEPT:
            del self._ended_workers[next(iter(self._ended_workers))]

    def _tell_death(self, worker: Worker) -> None:
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


def _denied(message: Any, why: str) -> control.Denied | control.Refused:
    request = getattr(message, "request", None)
    return (
        control.Refused("UsageError", why) if request is None else control.Denied(request, "UsageError", why)
    )


def _started(worker: Worker, request: int) -> control.Started:
    place = worker.place
    assert worker.ready is not None
    return control.Started(
        request=request,
        name=place.name,
        incarnation=place.incarnation,
        pid=worker.pid,
        endpoint=place.endpoint,
        tether_path=place.tether_path,
        token=place.token,
        info=worker.info,
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
