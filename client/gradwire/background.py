"""Calls that do not block their caller: a few daemon threads that leaving the interpreter never waits for."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gradwire.anteroom import Anteroom
from gradwire.loading import complete, needed
from gradwire_wire.errors import ForkedError, MemoryExhaustedError
from gradwire_wire.process import no_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Background", "behind", "futures_in", "giving", "is_ours", "raising", "with_results"]


class Background:
    """Runs what is submitted on at most ``threads`` threads, started when they are needed.

    Once closed it still runs what it is given, and no thread of it stays idle.

    anteroom: of calls that keep their order and cannot begin yet.
    """

    def __init__(self, name: str, threads: int = 8) -> None:
        self._name, self._limit = name, threads
        self._pid = os.getpid()
        self._waiting: deque[tuple[Future[Any] | None, Callable[[], Any]]] = deque()
        self._lock = threading.RLock()  # a handler of signals may submit where its thread has it
        self._changed = threading.Condition(self._lock)
        self._threads = self._idle = 0
        self._is_closed = False
        self.anteroom = Anteroom(name)

    def submit(self, act: Callable[[], Any]) -> Future[Any]:
        """A future of ``act()``. Cancelling it works until it has begun."""
        future = self.new_future()
        self.start(future, act)
        return future

    def after(self, waited: Sequence[Future[Any]], future: Future[Any], begin: Callable[[], None]) -> None:
        """Call ``begin`` once all of ``waited`` are done, in the thread that brought the last: it must not wait, nor raise.

        If one of them fails or is cancelled, so does ``future``, without ``begin``.
        """

        def tell(error: BaseException | None) -> None:
            if error is None:
                begin()
            else:
                self.start(future, raising(error))

        callback = _After(len(waited), tell)
        for other in waited:
            other.add_done_callback(callback)

    def new_future(self) -> Future[Any]:
        if self._pid != os.getpid():
            raise ForkedError(
                "submit in a forked child: open a bridge of its own there with gradwire.connect()"
            )
        futures = needed("gradwire.futures")  # a program that never submits anything does without
        future: Future[Any] = futures.ThreadFuture()
        return future

    def start(self, future: Future[Any] | None, act: Callable[[], Any]) -> None:
        """Have ``act()`` done for a future, which is perhaps running already, or for nobody.

        Where no thread can be had at all, the future fails with MemoryExhaustedError; what is for nobody is done here.
        """
        problem = None
        with self._lock:
            if len(self._waiting) >= self._idle and self._threads < self._limit:
                problem = self._grow()
            if self._threads:
                self._waiting.append((future, act))
                self._wake_one()
                return
        self._run(future, raising(no_thread(problem)) if future is not None else act)

    def start_in_order(self, future: Future[Any], act: Callable[[], Any]) -> None:
        """Have ``act()`` done for a future after what waits in the anteroom, and before what comes there later."""
        try:
            self.anteroom.put(partial(self.do_here, future, act))
        except MemoryExhaustedError as error:
            self._run(future, raising(error))

    def do_here(self, future: Future[Any], act: Callable[[], Any]) -> None:
        """``act()`` in this thread, for a future whose callbacks are called in another: they may wait for what this one does next."""
        if future.running() or future.set_running_or_notify_cancel():
            try:
                told = giving(act())
            except BaseException as error:
                told = raising(error)
            self.start(future, told)
            del told
        del future, act  # an error has this frame, and would hold itself and the arguments

    def _wake_one(self) -> None:
        """An idle thread, if there is one (lock held)."""
        try:
            self._changed.notify()
        except BaseException:  # of a handler of signals: a waiter that nobody is any more may be left behind, and would take the next
            self._changed.notify_all()
            raise

    def _grow(self) -> Exception | None:
        """One thread more; or why there is none (lock held)."""
        self._threads += 1
        thread = threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            self._threads -= 1
            return error
        return None

    def _work(self) -> None:
        while (item := self._next()) is not None:
            future, act = item
            self._run(future, act)
            del item, future, act  # or an idle thread would keep the last result alive

    def _next(self) -> tuple[Future[Any] | None, Callable[[], Any]] | None:
        """What is to be done next; None where that is nothing, and then this thread counts no more."""
        with self._lock:
            self._idle += 1
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            self._idle -= 1
            if self._waiting:
                return self._waiting.popleft()
            self._threads -= 1
            return None

    def _run(self, future: Future[Any] | None, act: Callable[[], Any]) -> None:
        try:
            if future is None:
                act()
            elif future.running() or future.set_running_or_notify_cancel():
                future.set_result(act())
        except BaseException as error:
            if future is not None:
                future.set_exception(error)
        finally:
            del future, act  # an error has this frame, and would hold itself and the arguments

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called: its worker is closed, or its bridge."""
        return self._is_closed

    def close(self) -> None:
        """Let the threads end once they are idle."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()


class _After:
    """Counts futures that are done, and tells once: that all are, or what the first to fail raised."""

    def __init__(self, count: int, tell: Callable[[BaseException | None], None]) -> None:
        self._left, self._lock = count, threading.Lock()
        self._tell: Any = tell

    def __call__(self, done: Future[Any]) -> None:
        error = _cancelled() if done.cancelled() else done.exception()
        with self._lock:
            was_told = self._left <= 0
            self._left = 0 if error is not None else self._left - 1
            is_time = not was_told and self._left == 0
        if is_time:
            tell, self._tell = (
                self._tell,
                None,
            )  # which knows the call, and so the futures that keep this callback
            tell(error)


def _cancelled() -> BaseException:
    error: BaseException = needed("concurrent.futures").CancelledError()
    return error


def is_ours(callback: Any) -> bool:
    """Whether a future's callback is known not to wait: whoever brings the result may call it."""
    return type(callback) is _After or getattr(callback, "__module__", "") == "asyncio.futures"


def giving(result: Any) -> Callable[[], Any]:
    """What gives that."""
    return lambda: result


def behind(wait: Callable[[], None], act: Callable[[], Any]) -> Callable[[], Any]:
    """What gives what ``act()`` does, once ``wait()`` has returned."""

    def both() -> Any:
        wait()
        return act()

    return both


def raising(error: BaseException) -> Callable[[], Any]:
    """What raises that once, in a thread of its own and not in the callback: chains may be longer than Python's stack."""

    def act() -> Any:
        nonlocal error
        try:
            raise error
        finally:
            del error  # which has this frame

    return act


def futures_in(tree: Any) -> list[Future[Any]]:
    """The futures among the arguments of a call; none where nobody has loaded futures."""
    loaded = complete("concurrent.futures")
    return [] if loaded is None else _futures_in(tree, loaded.Future)


def _futures_in(tree: Any, future: Any) -> list[Future[Any]]:
    if isinstance(tree, future):
        return [tree]
    return [found for child in _children(tree) for found in _futures_in(child, future)]


def _children(tree: Any) -> Any:
    kind = type(tree)
    return tree.values() if kind is dict else tree if kind in (list, tuple) else ()


def with_results(tree: Any) -> Any:
    """The tree with the result of each future, which is done, in its place."""
    if isinstance(tree, needed("concurrent.futures").Future):
        return tree.result()
    kind = type(tree)
    if kind is dict:
        return {key: with_results(child) for key, child in tree.items()}
    return kind(map(with_results, tree)) if kind in (list, tuple) else tree
