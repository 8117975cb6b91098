"""The bridge: a broker of one's own, the workers it started, and the memory shared with them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradwire import hints
from gradwire.broker_link import BrokerLink
from gradwire.exits import end_daemon
from gradwire.families import barrier
from gradwire.greenlets import check_none
from gradwire.lines import lanes_wanted
from gradwire.orders import (
    checked_dtype,
    checked_framework,
    checked_seconds,
    checked_shape,
    checked_spec,
    with_environment,
)
from gradwire.restarts import Restarts
from gradwire.worker import Worker, belongs_here
from gradwire_wire.control import Present
from gradwire_wire.errors import ClosedError, ForkedError, GradwireError, UsageError
from gradwire_wire.exchange import Memory
from gradwire_wire.machine import shared_limit

# What only some programs need is loaded when it is needed: `import gradwire` is to cost little more than numpy does.
if TYPE_CHECKING:
    from gradwire.configuration import Configuration, WorkerEntry

__all__ = ["Bridge", "connect"]

ATTACH_S = 120.0  # for a shared worker that is starting


def connect(target: str | os.PathLike[str] | None = None, *, start_timeout: float = 60.0) -> Bridge:
    """Connect to a broker: a private one by default, which ends with this program.

    target: one of

    - None: a private broker without workers;
    - the path of a ``.toml`` file: a private broker with the workers of that file, which are ready when this returns; or the
      broker elsewhere that the file names;
    - the address, runtime folder or name of a shared broker that ``gradwire up`` has started.

    start_timeout: seconds the broker may take to answer.

    Raises ConnectError if the broker does not answer; UsageError if the file, GRADWIRE_LANE or GRADWIRE_MAX_SHARED_BYTES is
    wrong, or if greenlets have replaced this program's threads; WorkerStartError if a worker of the file does not start (then
    all others have been ended).
    """
    check_none()
    lanes_wanted()
    shared_limit()
    start_timeout = checked_seconds(start_timeout)
    if target is not None and not isinstance(target, (str, os.PathLike)):
        raise UsageError(
            f"connect takes the path of a .toml file, or the address or name of a broker, not {target!r:.80}"
        )
    text = None if target is None else str(os.fspath(target))
    if text is None:
        return Bridge(BrokerLink.start_private(start_timeout))
    if text.endswith(".toml"):
        from gradwire.configuration import read

        return _connect_by_file(read(text), start_timeout)
    return _connect_to(text, start_timeout)


def _connect_by_file(configuration: Configuration, start_timeout: float) -> Bridge:
    from gradwire.fleet import start_together

    if configuration.address is not None:
        return _connect_to(configuration.address, start_timeout, configuration.keys)
    bridge = Bridge(BrokerLink.start_private(start_timeout, expected_workers=len(configuration.workers)))
    try:
        start_together(configuration.workers.values(), bridge._start_entry)
        bridge._workers = {name: bridge._workers[name] for name in configuration.workers}  # as in the file
    except BaseException:
        bridge.close()
        raise
    return bridge


def _connect_to(address: str, start_timeout: float, keys: str | None = None) -> Bridge:
    from gradwire.far_broker import FarBroker
    from gradwire.shared_broker import SharedBroker, card_of

    if address.startswith("tcp://"):
        far = FarBroker(address, keys or os.environ.get("GRADWIRE_KEYS"))
        return Bridge(BrokerLink.to_shared(far, start_timeout))
    return Bridge(BrokerLink.to_shared(SharedBroker(card_of(address)), start_timeout))


class Bridge:
    """Made by `connect`. Close it, use it as a context manager, or leave it to the interpreter's exit."""

    def __init__(self, link: BrokerLink) -> None:
        self._link, self._pid = link, os.getpid()
        self._memory = Memory(shared_limit(), link.folder)
        self._workers: dict[str, Worker] = {}
        self._starting: set[str] = set()  # names that are given away, of workers that are not there yet
        self._naming, self._attaching = threading.RLock(), threading.RLock()
        self._closed = False
        link.every_second(self._every_second)

    def __repr__(self) -> str:
        workers = ", ".join(map(repr, list(self._workers))) or "none"
        return "<gradwire.Bridge closed>" if self._closed else f"<gradwire.Bridge with workers: {workers}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise belongs_here(self)

    def worker(
        self,
        framework: str,
        *,
        name: str | None = None,
        python: str | os.PathLike[str] | None = None,
        requirements: Sequence[str] | None = None,
        env: Mapping[str, str | None] | None = None,
        path: Sequence[str | os.PathLike[str]] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        x64: bool | None = None,
        device: str | None = None,
        start_timeout: float = 120.0,
        restart: str = "never",
    ) -> Worker:
        """Start a worker: its own process, interpreter and packages. Returns once it is ready.

        framework: "torch", "tensorflow", "jax" or "numpy".
        name: what errors and ``bridge[name]`` call the worker (default: its framework).
        python: the interpreter of its environment, a path or a version such as "3.9" (default: this program's).
        requirements: lines as for pip. An environment with these is built from that Python, once, and kept in a cache; building
        it may take minutes, which do not count for start_timeout.
        env: environment variables. They win over everything that gradwire sets; None removes a variable.
        path: folders where targets are looked for (default: the working directory).
        cwd: the folder the worker runs in (default: the working directory).
        threads: how many the framework uses (default: the worker's share of the cores, among the workers that there are when
        its first target is loaded).
        x64: JAX's 64-bit mode (default: JAX's).
        device: as the framework calls it, such as "cpu" or "cuda:0" (default: the framework's).
        start_timeout: seconds until the worker must be ready.
        restart: whether the next call starts the worker again after it has died: "never", "on-failure" (if it ended by a signal
        or with an exit code other than 0) or "always". Calls under way raise WorkerDiedError in any case, and are not repeated.
        Modules are made again by their factory, and what they had learned is lost unless saved.

        Raises UsageError if what is asked for cannot be had, and WorkerStartError, with the command line, the exit code and the
        last output, if the worker does not become ready.
        """
        self._check_usable()
        Restarts(restart)  # refuses what it does not know before anything is built
        chosen = self._take_name(checked_framework(framework), name)
        try:
            spec = with_environment(
                requirements,
                checked_spec(
                    framework,
                    chosen,
                    python=python,
                    env=env,
                    path=path,
                    cwd=cwd,
                    threads=threads,
                    x64=x64,
                    device=device,
                    start_timeout=start_timeout,
                ),
            )
            spec = spec._replace(restart=restart)
            return self._take_in(Worker(self._link, self._memory, spec, restart))
        finally:
            self._starting.discard(chosen)

    def _take_in(self, made: Worker) -> Worker:
        """A worker that has started is known from now on. ClosedError where the bridge was closed meanwhile, which has not seen it."""
        self._workers[made.name] = made
        if self._closed:
            made.detach()
            made.bury()
            self._check_usable()
        return made

    def _start_entry(self, entry: WorkerEntry) -> Worker:
        """A worker of a file."""
        from gradwire.fleet import spec_of

        chosen = self._take_name(entry.framework, entry.name)
        try:
            spec = spec_of(entry, lasts=self._link.is_shared)
            return self._take_in(Worker(self._link, self._memory, spec, entry.restart))
        finally:
            self._starting.discard(chosen)

    def _take_name(self, framework: str, name: str | None) -> str:
        """The name, or one that is free; it is taken until a worker has it or `_starting` forgets it."""
        with self._naming:
            taken = self._starting | {n for n, worker in self._workers.items() if worker.keeps_name}
            if name in taken:
                raise UsageError(f"there is a worker {name!r} already; give another name=")
            numbered = (f"{framework}-{i}" for i in range(2, len(taken) + 3))
            chosen = next(n for n in (framework, *numbered) if n not in taken) if name is None else name
            self._starting.add(chosen)
            return chosen

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise ForkedError(
                "this bridge belongs to the parent process; a forked child calls gradwire.connect() itself"
            )
        if self._closed:
            end_daemon()
            raise ClosedError("this bridge was closed; call gradwire.connect() again")

    def __getitem__(self, name: str) -> Worker:
        """The worker of that name. On a shared broker it is looked for there, and waited for while it starts."""
        with self._naming:
            known = self._workers.get(name)
        if self._link.is_shared and (known is None or known.is_closed):
            self._check_usable()
            return self._attach(self._link.find_worker(name, ATTACH_S))
        if known is None:
            raise UsageError(f"no worker {name!r}; there are {', '.join(self._workers) or 'none'}")
        return known

    def _attach(self, present: Present) -> Worker:
        """A proxy of a shared broker's worker, one for each name."""
        from gradwire.shared_worker import SharedWorker

        with self._attaching:
            known = self._workers.get(present.name)
            if known is not None and not known.is_closed:
                return known
            made = self._workers[present.name] = SharedWorker(self._link, self._memory, present)
            return made

    def workers(self) -> list[Worker]:
        """All workers, in the order of the file or of their start. On a shared broker: all that are ready, by name."""
        if self._link.is_shared:
            self._check_usable()
            ready = [present for present in self._link.look() if present.state in ("idle", "busy")]
            return [self._attach(present) for present in ready]
        return list(self._workers.values())

    def stats(self) -> dict[str, dict[str, Any]]:
        """Figures by worker (see `Worker.stats`)."""
        return {name: worker.stats() for name, worker in list(self._workers.items())}

    def last_error(self) -> GradwireError | None:
        """The last error a call on this bridge raised: compiled code shows its text only."""
        noted = [w.last_error for w in list(self._workers.values()) if w.last_error is not None]
        return max(noted, key=lambda entry: entry[0])[1] if noted else None

    def trace(self, path: str | os.PathLike[str], *, capacity: int = 1 << 16) -> hints.Trace:
        """Write what the calls made meanwhile do, and when, to a file that opens in https://ui.perfetto.dev::

            with bridge.trace("calls.json"):
                energy(x)

        The file has Chrome trace events: spans in this program (convert, lend, send, wait, take), on the way, and in the worker
        (take, compute, reply), joined by arrows; of all threads and all workers, also those that are started meanwhile. capacity:
        how many messages each end keeps. These are the latest ones, and the file says how many earlier ones are missing. Of a worker that dies,
        only its own spans are lost. A trace costs some tens of microseconds a call, and next to nothing while there is none; submitted calls are made one by
        one meanwhile, in their order. UsageError where the file cannot be written, or a trace of this bridge is going on.
        """
        from gradwire.trace import Trace

        return Trace(self, path, capacity)

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray:
        """An uninitialised numpy array in shared memory: passing it to a worker copies nothing.

        The worker reads these very bytes while it runs, so do not write to the array while a call with it is under way. What the
        worker keeps for a pullback is copied. Remote code that keeps the argument itself sees what you write later, unless it
        makes a copy. Forked children share the memory. It is free again when the last view of it is gone.
        """
        self._check_usable()
        return self._memory.empty(checked_shape(shape), checked_dtype(dtype))

    def _every_second(self) -> None:
        for worker in list(self._workers.values()):
            worker.every_second()

    def close(self) -> None:
        """End all workers and the broker. Results that are here stay valid. Bounded in time; idempotent.

        Of a shared broker only the workers that this bridge started itself are ended.
        """
        if self._closed or self._pid != os.getpid():
            return
        if any(worker.alive for worker in list(self._workers.values())):
            barrier()
        self._closed = True
        workers = list(self._workers.values())  # other threads may be starting some: see `_take_in`
        for worker in workers:
            worker.detach()
        self._link.close()
        for worker in workers:
            worker.bury()
        self._memory.close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
