"""Calls that do not block their caller: a few daemon threads that leaving the interpreter never waits for."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradwire_wire.errors import ForkedError

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Background"]


class Background:
    """Runs what is submitted on at most ``threads`` threads, started when they are needed."""

    def __init__(self, name: str, threads: int = 8) -> None:
        self._name, self._limit = name, threads
        self._pid = os.getpid()
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0

    def submit(self, act: Callable[[], Any]) -> Future[Any]:
        """A future of ``act()``. Cancelling it works until it has begun."""
        if self._pid != os.getpid():
            raise ForkedError(
                "submit in a forked child: open a bridge of its own there with gradwire.connect()"
            )
        from concurrent.futures import Future  # not needed by who never submits anything

        future: Future[Any] = Future()
        with self._lock:
            self._busy += 1
            if self._busy > self._threads and self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._waiting.put((future, act))
        return future

    def _work(self) -> None:
        while True:
            item = self._waiting.get()
            if item is None:
                return
            future, act = item
            self._run(future, act)
            del item, future, act  # or an idle thread would keep the last result alive

    def _run(self, future: Future[Any], act: Callable[[], Any]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(act())
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                self._busy -= 1

    def close(self) -> None:
        """Let the threads end once they are idle."""
        with self._lock:
            for _ in range(self._threads):
                self._waiting.put(None)
            self._threads = 0
