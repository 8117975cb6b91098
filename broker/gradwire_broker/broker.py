"""The broker: one thread that waits for everything at once.

It waits for messages of clients (ROUTER), for the end of the program it belongs to (a pidfd, and the lifeline
for a program that replaces itself by exec), and for three descriptors of every worker (see `worker`). Nothing is
polled; an idle broker sleeps.

    loop        the wait
    clients     who is attached, and what each is sent
    workforce   workers start, are restarted, end
    remains     what workers leave behind ends, a moment later
    broker      here: whose broker it is, and who acts on which message
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradwire_broker import clients
from gradwire_broker.clients import denied
from gradwire_broker.loop import Loop
from gradwire_broker.roll import Roll
from gradwire_broker.workforce import Terms, Workforce
from gradwire_wire import control, keys, sockets
from gradwire_wire.errors import ProtocolError
from gradwire_wire.lifeline import BrokerConfig, Lifeline
from gradwire_wire.process import open_pidfd
from gradwire_wire.rendezvous import has_card
from gradwire_wire.spawn import Lent

__all__ = ["Broker"]

SIGNALLED_S = 2.0  # for workers to end in
LOOK_S = 60.0
UNKILLABLE_S = 2.0  # a killed process may hang in the kernel; the broker does not wait longer
Act = Callable[[bytes, Any], None]


class Broker:
    """Serves until its owner ends or says so. Owns the router and all workers, not the folder."""

    def __init__(self, address: str, folder: Path, config: BrokerConfig, umask: int) -> None:
        self._is_restricted, self._is_shared = config.allow is not None, bool(config.name)
        self._guests: dict[bytes, int] = {}  # pidfds of a shared broker's clients
        self._over, self._folder = False, folder
        # By its card a shared broker is found, unless it is at tcp as well; a private one ends with its owner
        self._next_look = time.monotonic() + LOOK_S if self._is_shared and not config.listen else math.inf
        self._patience = math.inf  # until when to wait for the last workers
        self._loop = Loop()
        router = sockets.bind_router(address)
        self._clients = clients.Clients(
            router, bytes.fromhex(config.token), bytes.fromhex(config.owner_token)
        )
        self._roll = Roll(self._clients.send)
        self._loop.listen(router, lambda: self._hear_clients(clients.NEAR, router))
        far_host = self._listen_far(config.listen, Path(config.keys)) if config.listen else ""
        lent = Lent(config.lent_to_workers, [])
        terms = Terms(folder, lent, config.expected_workers, config.allow, far_host, config.keys, umask)
        self._workforce = Workforce(terms, self._loop, self._clients)
        self._acts: dict[type, Act] = {
            control.Attach: self._watch_client,
            control.Detach: lambda client, _: self._client_gone(client),
            control.Start: self._workforce.start,
            control.Restart: self._workforce.restart,
            control.Cancel: self._workforce.cancel,
            control.Interrupt: self._workforce.interrupt,
            control.Stop: self._workforce.stop,
            control.Look: self._look,
            control.ReadLog: self._tell_log,
            control.LetGo: self._let_go,
            control.ShutDown: lambda _, message: self._shut_down(message.timeout_s),
        }

    def _listen_far(self, address: str, folder: Path) -> str:
        """Also at tcp, for those whose keys are in the folder. Where workers are to listen for them."""
        key = keys.server_key(folder)
        gate = sockets.Gatekeeper(lambda public: keys.is_known(folder, public))
        router = sockets.bind_router(address, key)
        self._clients.come_also_by(router)
        self._loop.listen(gate.socket, gate.answer)
        self._loop.listen(router, lambda: self._hear_clients(clients.FAR, router))
        return address.rpartition(":")[0]

    def serve(self) -> None:
        """Until it is over and no worker is left, nor what one has started. Returns within seconds of the owner's end."""
        workforce = self._workforce
        while not self._over or ((workforce or workforce.remains) and time.monotonic() < self._patience):
            self._loop.turn(self._wait_ms())
            self._keep_time()

    def _wait_ms(self) -> int | None:
        timed = *self._workforce, self._workforce.remains
        dues = [due for one in timed if (due := one.due()) is not None]
        first = min((*dues, self._patience, self._roll.due(), self._next_look))
        left = min(control.LONGEST_S, first - time.monotonic())  # whatever a client has asked for
        return None if first == math.inf else max(0, int(1000 * left) + 1)

    def _keep_time(self) -> None:
        now = time.monotonic()
        for worker in self._workforce:
            worker.advance(now)
        self._workforce.remains.advance(now)
        self._roll.advance(now)
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._end_if_lost()

    def _end_if_lost(self) -> None:
        """Nobody can find a broker whose card is gone, not even to end it. (systemd removes $XDG_RUNTIME_DIR when its user logs out.)"""
        if not self._over and not len(self._clients) and not has_card(self._folder):
            self._shut_down(SIGNALLED_S)

    # ---- Whose broker this is ----

    def belong_to(self, owner_pid: int, lifeline: Lifeline) -> bool:
        """Watch the program; False: it is gone already. Raises OSError where the kernel has no pidfd."""
        pidfd = open_pidfd(owner_pid)
        if os.getppid() != owner_pid:
            return False
        self._owner = pidfd, lifeline.fileno()
        for end in self._owner:
            self._loop.listen(end, self._owner_gone)
        return True

    def _let_go(self, client: bytes, message: control.LetGo) -> None:
        """All is as its owner wanted it: a shared broker goes on without."""
        if not (self._is_shared and self._clients.is_owner(client)):
            self._clients.send(client, denied(message, "only who started a shared broker can let it go"))
            return
        self._forget_owner()
        self._clients.send(client, control.Alone(message.request))

    def _owner_gone(self) -> None:
        self._forget_owner()
        self.kill_all()

    def _forget_owner(self) -> None:
        for end in self._owner:
            self._loop.unlisten(end)

    def kill_all(self) -> None:
        """It is over, at once."""
        self._over, self._patience = True, time.monotonic() + UNKILLABLE_S
        self._workforce.kill_all()

    def abandon(self) -> None:
        """Nobody looks after anything from now on. What is still there is killed."""
        self._workforce.abandon()

    def heed_signals(self) -> None:
        """SIGTERM and its like end the broker in order."""
        self._alarm, writer = os.pipe()
        for end in (self._alarm, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self._loop.listen(self._alarm, self._signalled)

    def _signalled(self) -> None:
        os.read(self._alarm, 64)
        self._shut_down(SIGNALLED_S)

    def _shut_down(self, timeout_s: float) -> None:
        self._over, self._patience = True, time.monotonic() + timeout_s + UNKILLABLE_S
        self._workforce.stop_all(timeout_s)

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
            self._clients.send(client, denied(message, refusal))
            return
        act = self._acts.get(type(message))
        if act is None:
            raise ProtocolError(f"{type(message).__name__} is not for the broker")
        act(client, message)

    def _refusal(self, client: bytes, message: Any) -> str:
        """Why this client may not ask for that; "" where it may."""
        if clients.is_far(client) and isinstance(message, (control.Start, control.Stop, control.ShutDown)):
            return "over tcp workers are used, and neither started nor ended: do that where the broker runs"
        if isinstance(message, control.Start) and self._is_restricted and not self._clients.is_owner(client):
            return (
                "this broker restricts which targets may be called (allow = [...] in its file), "
                "so its workers are those of the file; add yours there and start it again with gradwire up"
            )
        return ""

    def _watch_client(self, client: bytes, message: control.Attach) -> None:
        """A shared broker forgets a client whose process has ended. (A private one ends itself then.)"""
        if not self._is_shared or clients.is_far(client):
            return
        try:
            pidfd = self._guests[client] = open_pidfd(message.pid)
        except OSError:  # in another PID namespace; it is forgotten when something cannot be sent to it
            return
        self._loop.listen(pidfd, lambda: self._client_gone(client))

    def _client_gone(self, client: bytes) -> None:
        self._clients.forget(client)
        pidfd = self._guests.pop(client, -1)
        if pidfd >= 0:
            self._loop.unlisten(pidfd)
            os.close(pidfd)
        if self._is_shared:
            self._workforce.stop_those_of(client)

    def _look(self, client: bytes, message: control.Look) -> None:
        self._roll.ask(client, message.request, self._workforce.everybody(), time.monotonic())

    def _tell_log(self, client: bytes, message: control.ReadLog) -> None:
        everybody = self._workforce.everybody()
        for worker in everybody:
            if worker.place.name == message.name:
                self._clients.send(client, control.Log(message.request, worker.log))
                if message.follow:
                    self._clients.show(client, message.name)
                return
        names = ", ".join(sorted(worker.place.name for worker in everybody)) or "none"
        unknown = f"there is no worker {message.name!r}; there are {names}"
        self._clients.send(client, denied(message, unknown))


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """A mistake in handling one message must not end the workers of all: it is written to the broker's stderr."""
    try:
        yield
    except Exception:
        traceback.print_exc(file=sys.stderr)
