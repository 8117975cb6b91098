"""The workers of a broker, from the order to start one to what is told of its death.

Workers are started from the main thread, in which the broker's loop runs, and nowhere else: the kernel kills a worker when the
*thread* that started it ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gradwire_broker import processors
from gradwire_broker.clients import Clients, denied, is_far
from gradwire_broker.loop import Loop
from gradwire_broker.remains import Remains, signalled
from gradwire_broker.reports import not_started
from gradwire_broker.worker import CannotLaunch, Place, Worker
from gradwire_wire import control
from gradwire_wire.errors import UsageError
from gradwire_wire.process import RAISE_LIMIT, check_descriptors
from gradwire_wire.spawn import Lent

__all__ = ["Terms", "Workforce"]

DEATHS_KEPT = 256
LAUNCH_DESCRIPTORS = 8  # what a launch takes for a moment; most are free afterwards, for clients who come: libzmq ends the process without
ENDED_KEPT = 32  # workers whose last words can still be asked for
CLIENT_GONE_S, RESTART_S = 3.0, 1.0  # for workers to end in


class Terms(NamedTuple):
    """What all workers of a broker are started with. ``expected``: how many there will be, as far as its file tells."""

    folder: Path
    lent: Lent
    expected: int
    allow: list[str] | None
    listen: str
    keys: str
    umask: int


class Workforce:
    """Those that live, by incarnation, and what is remembered of those that have ended. Tells clients what happens to them."""

    def __init__(self, terms: Terms, loop: Loop, clients: Clients) -> None:
        self._terms, self._loop, self._clients = terms, loop, clients
        self._workers: dict[bytes, Worker] = {}
        self.remains = Remains()
        self._ended_workers: dict[str, Worker] = {}  # by name, the last one of each that ended
        self._restarts: dict[bytes, list[tuple[bytes, control.Restart]]] = {}
        self._deaths: dict[bytes, control.Died] = {}
        self._is_over = False

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        """Those that live; any of them may end meanwhile."""
        return iter(list(self._workers.values()))

    def everybody(self) -> list[Worker]:
        """Those that live, and of the other names the last that had it; by name."""
        names = {worker.place.name for worker in self}
        ended = [worker for name, worker in self._ended_workers.items() if name not in names]
        return sorted([*self, *ended], key=lambda worker: worker.place.name)

    # ---- They start ----

    def start(self, client: bytes, order: control.Start, asker: bytes | None = None) -> None:
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
        self._loop.listen(worker.pidfd, lambda: self._ended(worker))
        self._loop.listen(worker.lifeline.fileno(), lambda: self._told(worker))
        self._loop.listen(worker.output, lambda: self._printed(worker))
        self._clients.send(asker, control.Starting(order.request, worker.doing))
        self._share_out()

    def _launch(self, client: bytes, order: control.Start) -> Worker:
        terms = self._terms
        names = {worker.place.name for worker in self if not worker.is_dismissed}
        name = order.name or _free_name(order.framework, names)
        if order.framework not in control.FRAMEWORKS:
            there_are = ", ".join(control.FRAMEWORKS)
            raise UsageError(f"there is no framework {order.framework!r}; there are {there_are}")
        if name in names:
            raise UsageError(f"there is a worker {name!r} already; give another name=")
        if self._is_over:
            raise CannotLaunch(not_started(name, order.framework, "the broker is ending"))
        try:
            check_descriptors(LAUNCH_DESCRIPTORS)
        except OSError as error:
            why = f"the broker has too few descriptors left for a worker: {error}; {RAISE_LIMIT} that started the broker"
            raise CannotLaunch(not_started(name, order.framework, why)) from error
        if not terms.folder.is_dir():
            why = (
                f"the folder of the sockets, {terms.folder}, is gone: did something clean up there? Start this program again, or "
                "gradwire up, with XDG_RUNTIME_DIR set to a folder that stays"
            )
            raise CannotLaunch(not_started(name, order.framework, why))
        base = dict(os.environ) if order.base is None else _decoded(order.base)
        return Worker(order, self._place(name), client, base)

    def _place(self, name: str) -> Place:
        terms, incarnation = self._terms, secrets.token_bytes(16)
        stem = str(terms.folder / f"w{incarnation.hex()[:16]}")
        return Place(
            name=name,
            incarnation=incarnation,
            token=secrets.token_bytes(16),
            endpoint=f"ipc://{stem}.zmq",
            tether_path=f"{stem}.mem",
            threads=self._share(len(self) + 1),
            lent=terms.lent,
            allow=terms.allow,
            listen=terms.listen,
            keys=terms.keys,
            umask=terms.umask,
        )

    def _share_out(self) -> None:
        """The processors are shared anew among all; those that are in use already keep what they have."""
        share = self._share(len(self))
        for worker in self:
            worker.share(share)

    def _share(self, count: int) -> int:
        """Of each of so many, or of more if more are expected."""
        return processors.share_of(processors.available_processors(), max(self._terms.expected, count))

    # ---- Clients want them otherwise ----

    def restart(self, client: bytes, message: control.Restart) -> None:
        """End it if it lives, and start it again as it was started first."""
        old = next((w for w in self.everybody() if w.place.incarnation == message.incarnation), None)
        if old is None:
            # another incarnation of it may be there: the client looks for that by its name
            self._clients.send(client, denied(message, "that process of the worker is long gone"))
        elif old.end is None and is_far(client):
            self._clients.send(client, denied(message, "over tcp a worker that runs cannot be restarted"))
        elif old.end is None:
            self._restarts.setdefault(message.incarnation, []).append((client, message))
            old.stop(RESTART_S)
        else:
            # (it ends with who started it, and with who started it again where that one is gone)
            is_owned = old.order.lasts or self._clients.is_here(old.client)
            owner = old.client if is_owned else client
            self.start(owner, old.order._replace(request=message.request), client)

    def _start_again(self, name: str, asked: list[tuple[bytes, control.Restart]]) -> None:
        """After the end of a worker that was to be restarted, perhaps by several clients: once, for all of them."""
        for client, message in asked:
            present = next((w for w in self if w.place.name == name), None)
            if present is None:
                self.restart(client, message)
            else:
                present.asking.append((client, message.request))

    def cancel(self, client: bytes, message: control.Cancel) -> None:
        """Nobody waits for its start any more."""
        for worker in self:
            if worker.asking == [(client, message.request)] and worker.client == client:
                worker.is_dismissed = True
                worker.kill()

    def interrupt(self, _: bytes, message: control.Interrupt) -> None:
        """Have it look whether the call that runs was abandoned."""
        if message.incarnation in self._workers:
            self._workers[message.incarnation].interrupt()

    def stop(self, client: bytes, message: control.Stop) -> None:
        """End it; a client that asks for one that has ended is told of its death again."""
        incarnation = message.incarnation
        if incarnation in self._workers:
            self._workers[incarnation].stop(message.timeout_s)
        else:
            gone = control.Died(incarnation, None, None, "", "")
            self._clients.send(client, self._deaths.get(incarnation, gone))

    def stop_those_of(self, client: bytes) -> None:
        """It is gone: what does not last without it ends."""
        for worker in self:
            if worker.client == client and not worker.order.lasts:
                worker.stop(CLIENT_GONE_S)

    def stop_all(self, timeout_s: float) -> None:
        """It is over, in order."""
        self._is_over = True
        for worker in self:
            worker.stop(timeout_s)

    def kill_all(self) -> None:
        """It is over, at once."""
        self._is_over = True
        for worker in self:
            worker.kill()

    def abandon(self) -> None:
        """Kill all that is there, whole groups, for nobody will see to what is left of them."""
        for group in (*(worker.pid for worker in self), *self.remains):
            signalled(group, signal.SIGKILL)

    # ---- What they say, and how they end ----

    def _told(self, worker: Worker) -> None:
        doing, was_ready, had = worker.doing, worker.ready, worker.threads
        if not worker.hear():
            self._loop.unlisten(worker.lifeline.fileno())
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
            self._loop.unlisten(worker.output)
        self._clients.tell_output(worker.place.name, text)

    def _ended(self, worker: Worker) -> None:
        self._told(worker)  # what it said before it ended
        for key in (worker.pidfd, worker.lifeline.fileno(), worker.output):
            self._loop.unlisten(key)
        self._clients.tell_output(worker.place.name, worker.finish())
        self.remains.end(worker.pid)
        del self._workers[worker.place.incarnation]
        self._share_out()
        _sweep_sockets(worker)
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


def _sweep_sockets(worker: Worker) -> None:
    for path in (worker.place.endpoint.partition("://")[2], worker.place.tether_path):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _free_name(framework: str, names: set[str]) -> str:
    if framework not in names:
        return framework
    return next(name for n in range(2, len(names) + 3) if (name := f"{framework}-{n}") not in names)


def _decoded(base: dict[bytes, bytes]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in base.items()}
