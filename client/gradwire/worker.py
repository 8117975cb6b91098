"""A worker process, seen from the client: where remote functions and modules come from."""

from __future__ import annotations

import threading
from typing import Any

from gradwire.background import Background
from gradwire.broker_link import BrokerLink, WorkerFacts, WorkerSpec
from gradwire.connection import Connection
from gradwire.families import barrier, exported, is_leaf
from gradwire.handle import Handle
from gradwire.remote import Remote
from gradwire_wire.errors import ClosedError, GradwireError
from gradwire_wire.exchange import Memory
from gradwire_wire.structures import flatten, positional

__all__ = ["Worker"]

HANDSHAKE_S = 30.0


class Worker:
    """One interpreter with one framework. Made by `Bridge.worker`; usable from any thread."""

    def __init__(self, link: BrokerLink, memory: Memory, spec: WorkerSpec) -> None:
        self._link, self._memory, self._spec = link, memory, spec
        self._lock = threading.Lock()
        self._background = Background(f"gradwire-{spec.name}")
        self._closed = False
        self._connection = self._start()

    def _start(self) -> Connection:
        facts = self._link.start_worker(self._spec)
        try:
            return Connection(self._link, facts, self._memory, HANDSHAKE_S)
        except BaseException:
            self._link.stop_worker(facts.incarnation)
            raise

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"pid {self.pid}" if self.alive else "dead"
        return f"<gradwire.Worker {self.name!r} {self._spec.framework} {state}>"

    def function(self, target: str) -> Remote:
        """A remote function, named ``"pkg.mod:attr"`` or ``"path/file.py:attr"``.

        A JAX or TensorFlow worker traces the function once for each signature: what Python does inside
        (counters, ``np.random``, printing) then happens at the trace only. A function that cannot be
        traced runs eagerly instead; ``options(compile=False)`` always does, ``compile=True`` insists.

        UnknownTargetError where it is not there; RemoteError with what its module raised when imported.
        """
        return Remote(Handle(self._present, "function", target, positional(0), []), self._background)

    def module(self, target: str, *args: Any, **kwargs: Any) -> Remote:
        """A remote module: the factory is called in the worker with these arguments, and the result stays there."""
        structure, leaves = flatten([list(args), kwargs], is_leaf)
        carriers = exported(leaves, structure)
        return Remote(Handle(self._present, "module", target, structure, carriers), self._background)

    def _present(self) -> Connection:
        if self._closed:
            raise ClosedError(f"worker {self.name!r} was closed; make a new one with bridge.worker(...)")
        return self._connection

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
        return {**self._facts.info, "carried_by": "shared memory" if self._memory.is_shared else "messages"}

    @property
    def alive(self) -> bool:
        """Whether the process is there, as far as is known without asking it."""
        return not self._closed and self._connection.is_alive

    def restart(self) -> None:
        """End the process, whatever it is doing, and start it again; targets are loaded again at their next call.

        Modules begin anew from their factory: parameters that were trained are lost unless saved.
        """
        with self._lock:
            if self._closed:
                raise ClosedError(f"worker {self.name!r} was closed; make a new one with bridge.worker(...)")
            self._link.stop_worker(self._facts.incarnation, 1.0)
            self._connection.close()
            self._connection.bury()
            self._connection = self._start()

    def close(self) -> None:
        """End the process. Results that are here stay valid. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._connection.is_alive:
                barrier()
            self._background.close()
            self._connection.close()
            self._link.stop_worker(self._facts.incarnation)
            self._connection.bury()

    def detach(self) -> None:
        """The broker is going, and the process with it: only let go of what is here."""
        with self._lock:
            self._closed = True
            self._background.close()
            self._connection.close()

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
