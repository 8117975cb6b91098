"""Futures of calls that are under way: many answers at once wake whoever waits once.

Who waits for one waits on a condition that those of one connection share. But each future has a lock of its own, for
`concurrent.futures.wait` holds those of many at once, in an order that knows nothing of shared ones. (Locks are taken in
this order: a future's, then the condition's.)

Handlers of signals may raise, or call in here, between any two steps of the main thread: locks are those of C, and can be
taken again by whoever has them.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from gradwire import exits
from gradwire_wire.errors import ClosedError, UsageError

__all__ = ["OVER", "RUNNING", "CallFuture", "ThreadFuture", "belongs_to", "finish"]

RUNNING, _FINISHED = "RUNNING", "FINISHED"
OVER = frozenset({_FINISHED, "CANCELLED", "CANCELLED_AND_NOTIFIED"})
"""The states, as `Future` has them, in which one is done."""
_RLock: Any = type(threading.RLock())
"""The class in C: to take it by `with` is one step, which no handler of signals interrupts."""


class ThreadFuture(Future[Any]):
    """A future of a call that a thread of ours makes."""

    def result(self, timeout: float | None = None) -> Any:
        """See `concurrent.futures.Future.result`."""
        try:
            return super().result(timeout)
        except ClosedError:
            exits.end_daemon()
            raise
        finally:
            del self  # an error that is raised has this frame, and would hold its caller's variables


class _OwnLock(_RLock):
    """What a `Future` takes for its condition: a lock of its own, and who is to be woken waits elsewhere."""

    finished: threading.Condition

    def notify_all(self) -> None:
        """What was done to the future is seen by whoever waits for any of the connection."""
        with self.finished._lock:  # type: ignore[attr-defined]
            self.finished.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Nobody waits here: see `CallFuture.wait`."""
        return False


class CallFuture(Future[Any]):
    """A future for which one waits on the condition of its connection."""

    def __init__(self, finished: threading.Condition) -> None:
        self._condition = lock = _OwnLock()
        lock.finished = finished
        self._state = "PENDING"
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []

    def result(self, timeout: float | None = None) -> Any:
        """See `concurrent.futures.Future.result`."""
        try:
            if self._state != _FINISHED:
                self.wait(timeout)
            if self._state == _FINISHED and self._exception is None:
                return self._result
            return super().result(0)
        except ClosedError:
            exits.end_daemon()
            raise
        finally:
            del self  # an error that is raised has this frame, and would hold its caller's variables

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a call that was submitted cannot be copied or pickled; share the future itself, or what its result() gives"
        )

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `concurrent.futures.Future.exception`."""
        self.wait(timeout)
        return super().exception(0)

    def wait(self, timeout: float | None = None) -> None:
        """Until it is done or cancelled, or the seconds have passed."""
        finished: Any = self._condition.finished  # type: ignore[attr-defined]
        with finished._lock:
            finished.wait_for(self._is_over, timeout)

    def _is_over(self) -> bool:
        """As `done`, without the future's lock, which is not to be taken here."""
        return self._state in OVER


def belongs_to(future: Any, finished: threading.Condition) -> bool:
    """Whether those who wait for it wait on that condition."""
    return getattr(future._condition, "finished", None) is finished


def finish(future: Any, result: Any, error: BaseException | None) -> None:
    """Whoever waits for it is woken later, and callbacks are called later."""
    with future._condition:
        if future._state == _FINISHED:  # somebody's who interrupted its submission
            return
        future._result, future._exception, future._state = result, error, _FINISHED
        for waiter in future._waiters:
            if error is None:
                waiter.add_result(future)
            else:
                waiter.add_exception(future)
