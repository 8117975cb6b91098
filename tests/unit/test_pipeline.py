"""What threads share in a pipeline and behind it, without a worker. With one: tests/integration/test_submit.py."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest

from gradwire import exits
from gradwire.background import Background, behind, raising
from gradwire.futures import CallFuture, finish
from gradwire.pipeline import Pipeline
from gradwire_wire.errors import ClosedError, MemoryExhaustedError, UsageError
from tests.doubles.interrupted import Interrupted

# ---- Futures -----------------------------------------------------------------------------------------------------------


def test_who_waits_in_the_anteroom_for_what_is_given_back_to_it_does_so_no_more() -> None:
    background = Background("given-back")
    pipeline = Pipeline(MagicMock(), MagicMock(), background)
    waiting, behind_it = MagicMock(future=Future(), again=lambda: 1), Future[int]()
    pipeline._waiting.append(waiting)
    begun = threading.Event()
    background.start_in_order(behind_it, behind(lambda: (begun.set(), pipeline.drain())[1], lambda: 2))
    assert begun.wait(60)
    pipeline.give_back()
    assert (behind_it.result(60), waiting.future.result(60)) == (2, 1)


@pytest.fixture
def futures() -> list[CallFuture]:
    """Two of each of two connections."""
    conditions = [threading.Condition(threading.RLock()) for _ in range(2)]
    return [CallFuture(conditions[i % 2]) for i in range(4)]


def in_thread(act: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    threading.Thread(target=lambda: done.set_result(act()), daemon=True).start()
    return done


def test_a_copy_that_nobody_would_complete_is_refused(futures: list[CallFuture]) -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="copied or pickled"):
            copied(futures[0])


def test_who_holds_the_locks_of_some_keeps_nobody_from_those_of_others(futures: list[CallFuture]) -> None:
    """`concurrent.futures.wait` holds many at once, in the order of their addresses: with shared ones two of it would
    wait for each other."""
    first, second, third, fourth = futures
    with first._condition, second._condition:
        waited = in_thread(lambda: wait([third, fourth], 0.01))
        assert waited.result(60).not_done == {third, fourth}
    waited = in_thread(lambda: wait(futures))
    for future in futures:
        finish(future, 7, None)
    assert waited.result(60).done == set(futures)


@pytest.mark.parametrize("end", ["cancelled", "result", "error"])
def test_who_waits_is_woken(futures: list[CallFuture], end: str) -> None:
    future = futures[0]
    waiting = in_thread(lambda: future.exception(60) if end != "cancelled" else outcome_of(future))
    time.sleep(0.05)
    if end == "cancelled":
        assert future.cancel() and waiting.result(60) == "cancelled"
        return
    error = ValueError("bad 42") if end == "error" else None
    if end == "result":
        future.set_result(7)
    else:
        future.set_exception(error)
    assert waiting.result(60) is error
    with pytest.raises(TimeoutError):
        futures[1].result(0.01)


def outcome_of(future: Future[Any]) -> str:
    try:
        return str(future.result(60))
    except CancelledError:
        return "cancelled"


def test_a_daemon_thread_that_asks_at_the_exit_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes the call: a thread, or the pipeline."""
    monkeypatch.setattr(exits, "_leaving", [True])
    piped = CallFuture(threading.Condition(threading.RLock()))
    finish(piped, None, ClosedError("closed"))
    for future in (piped, Background("exit").submit(raising(ClosedError("closed")))):
        told = in_daemon_thread(partial(future.result, 60))
        assert type(told) is SystemExit
        with pytest.raises(ClosedError):
            future.result(60)


def in_daemon_thread(act: Callable[[], Any]) -> BaseException | None:
    """What it has raised there."""
    told: list[BaseException] = []

    def caught() -> None:
        try:
            act()
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    thread.join(60)
    return told[0] if told else None


def test_the_first_outcome_stays(futures: list[CallFuture]) -> None:
    finish(futures[0], 1, None)
    finish(futures[0], None, ValueError("late"))
    assert futures[0].result(0) == 1


# ---- Threads behind it --------------------------------------------------------------------------------------------------


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background("test", threads=3)
    yield made
    made.close()


def test_no_more_threads_than_allowed_and_all_is_done(background: Background) -> None:
    at_once, most, lock = 0, 0, threading.Lock()

    def act() -> int:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.002)
        with lock:
            at_once -= 1
        return 1

    assert sum(f.result(60) for f in [background.submit(act) for _ in range(100)]) == 100
    assert most <= 3


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_thread_that_was_woken_by_who_was_interrupted_is_woken_again(background: Background) -> None:
    assert background.submit(lambda: 1).result(60) == 1
    changed: Any = background._changed
    until(lambda: background._idle == 1 and len(changed._waiters) == 1)
    changed._waiters = Interrupted(changed._waiters)
    with pytest.raises(TimeoutError, match="by the handler"):
        background.submit(lambda: 2)
    until(lambda: background._idle == 1 and not background._waiting)
    assert background.submit(lambda: 3).result(20) == 3


def test_after_its_close_everything_is_still_done(background: Background) -> None:
    """What is submitted to a closed worker is told so, each time."""
    background.submit(lambda: 1).result(60)
    background.close()
    for _ in range(20):
        with pytest.raises(ValueError, match="closed"):
            background.submit(raising(ValueError("closed"))).result(60)
    deadline = time.monotonic() + 60
    while any(t.name.startswith("test-") for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_any_thread_futures_fail_and_callbacks_are_called(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", start)
        for _ in range(10):
            with pytest.raises(MemoryExhaustedError, match="ulimit -u"):
                background.submit(lambda: 1).result(60)
        called: list[int] = []
        background.start(None, lambda: called.append(1))
        assert called == [1]
    assert background.submit(lambda: 1).result(60) == 1
