"""Where calls wait that were submitted while their target was not there: in their order, until it is.

A worker that died or was restarted has to be started, and the target to be loaded, before a pipeline can take calls; whoever submits waits
for neither. So a thread brings the target back for the first of them, or says why not, and begins one after the other.
Whatever is submitted to that worker meanwhile goes behind them, other targets' calls as well: what a worker keeps from call to call
depends on their order. A call that no packet takes waits here, too, until what is under way has been answered.

Handlers of signals may raise, or call in here, between any two steps of the main thread: the thread is on its way before there is something
for it, and where two are, one serves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from gradwire_wire.process import no_thread

__all__ = ["Anteroom"]


class Anteroom:
    """Of one worker, whatever process it is at the time. Any thread may put calls here."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._emptied = threading.Condition(self._lock)
        self._acts: deque[Callable[[], None]] = deque()
        self._is_awaited = self._is_serving = False
        self._server = 0

    @property
    def is_served_here(self) -> bool:
        """Whether it is this thread that begins the calls: none behind the one that it is at will be done before that."""
        return self._is_serving and self._server == threading.get_ident()

    @property
    def is_occupied(self) -> bool:
        """Whether a call waits here, or is being begun: others go behind it."""
        return bool(self._acts)

    def put(self, act: Callable[[], None]) -> None:
        """Have it done after what is here; it must not raise. MemoryExhaustedError where no thread can be had for it."""
        with self._lock:
            if not self._is_awaited:
                self._start()
                self._is_awaited = True
            self._acts.append(act)

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}-anteroom", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            raise no_thread(error) from error

    def _serve(self) -> None:
        with self._lock:
            if self._is_serving:
                return
            self._server, self._is_serving = threading.get_ident(), True
        while (act := self._first()) is not None:
            act()
            del act
            self._acts.popleft()  # only now: until it has begun, nothing may overtake it

    def _first(self) -> Callable[[], None] | None:
        with self._lock:
            if self._acts:
                return self._acts[0]
            self._is_awaited = self._is_serving = False
            self._emptied.notify_all()
            return None

    def drain(self) -> None:
        """Wait until nothing is here any more."""
        if self._acts:
            with self._lock:
                self._emptied.wait_for(lambda: not self._acts)
