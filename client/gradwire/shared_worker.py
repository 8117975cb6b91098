"""A worker of a shared broker, seen from one of the programs that use it.

What differs from a worker of one's own: it is found and not started, closing the proxy leaves the process up, and
it may have been started again by another program, which is noticed at the next call. State is shared: modules that
the file loads are one object for all clients, with one training mode and one set of parameters.
"""

from __future__ import annotations

from gradwire.broker_link import BrokerLink, say
from gradwire.connection import Connection
from gradwire.far import FarConnection
from gradwire.worker import HANDSHAKE_S, Worker
from gradwire.worker_records import WorkerFacts, WorkerSpec
from gradwire_wire.control import Present
from gradwire_wire.errors import GradwireError
from gradwire_wire.exchange import Memory

__all__ = ["SharedWorker"]


class SharedWorker(Worker):
    """Made by ``bridge["name"]`` on a shared broker."""

    def __init__(self, link: BrokerLink, memory: Memory, present: Present) -> None:
        self._found: Present | None = present
        spec = WorkerSpec(framework=present.framework, name=present.name)
        super().__init__(link, memory, spec, present.restart)

    def _greet(self, facts: WorkerFacts) -> Connection:
        """Who comes while it is in a call waits for its turn, as those do who are there."""
        kind = Connection if self._link.keys is None else FarConnection
        return kind(self._link, facts, self._memory, HANDSHAKE_S, lambda: self._is_busy(facts))

    def _is_busy(self, facts: WorkerFacts) -> bool:
        there = [present for present in self._link.look() if present.incarnation == facts.incarnation]
        is_busy = any(present.state == "busy" for present in there)
        if is_busy:
            say(
                f"worker {facts.name!r} is in somebody's call, or is stopped, and does not answer yet. Its turn is waited for; "
                f"`gradwire stop {facts.name}` ends it for all, and Ctrl-C this wait"
            )
        return is_busy

    def _start_process(self) -> WorkerFacts:
        """One that was found; else the broker starts it again, once for all clients."""
        found, self._found = self._found, None
        if found is not None:
            return self._link.use(found)
        return self._link.restart_worker(self._facts.incarnation, self._spec)

    def _end_process(self, facts: WorkerFacts) -> None:
        """It is not ours alone, and a handshake that fails is no reason to end it for others."""

    def _revived(self) -> Connection:
        """If somebody has started it again, go over to the new process; else as any worker."""
        with self._lock:
            if not self._closed and not self._connection.life.is_there and self._look_for_another():
                self._replace()
                self._connection.life.follows_death = True
        return super()._revived()

    def _look_for_another(self) -> bool:
        try:
            there = {present.name: present for present in self._link.look()}
        except GradwireError:
            return False  # the broker is gone as well, which the call that comes here will be told
        present = there.get(self.name)
        if present is None or present.state not in ("idle", "busy"):
            return False
        if present.incarnation == self._facts.incarnation:
            return False
        self._found = present
        return True

    def restart(self, *, discard_state: bool = False) -> None:
        """End the process for all its clients and start it again as at first; not over tcp, which raises UsageError.

        discard_state: see `Worker.restart`; other clients are told all the same.
        """
        self._link.check_starts_workers()
        super().restart(discard_state=discard_state)

    def _part(self) -> None:
        """The process goes on for others; ``gradwire stop NAME`` ends it."""
        self._link.show(self.name, False)

    def bury(self) -> None:
        """The process lives on, and with it what it has borrowed."""
