"""Calls that nobody waits for: in order or not, one after the other's result, and when one of them fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pathlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire import lines
from tests.doubles.interrupted import Interrupted

TARGETS = pathlib.Path(__file__).parent / "targets"


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[gw.Worker, gw.Worker]]:
    with gw.connect() as bridge:
        yield (
            bridge.worker("numpy", name="one", path=[TARGETS]),
            bridge.worker("numpy", name="other", path=[TARGETS]),
        )


def test_many_at_once(workers: tuple[gw.Worker, gw.Worker]) -> None:
    double = workers[0].function("any_framework:double")
    futures = [double.submit(np.full(3, i, "f4")) for i in range(300)]
    for i, future in enumerate(futures):
        np.testing.assert_array_equal(future.result(60), np.full(3, 2 * i))


def test_a_call_behind_one_that_was_interrupted_when_it_woke_who_reads(
    workers: tuple[gw.Worker, gw.Worker],
) -> None:
    double: Any = workers[0].function("any_framework:double")
    assert double.submit(np.float32(1)).result(60) == 2
    reader = double.handle._loaded._pipeline
    waiters = Interrupted()

    def is_asleep() -> bool:
        with reader._lock:
            return bool(reader._is_idle and reader._work._waiters)

    until(is_asleep)
    waiters.extend(reader._work._waiters)
    reader._work._waiters = waiters
    with pytest.raises(TimeoutError, match="by the handler"):
        double.submit(np.float32(2)).result(60)
    until(lambda: len(waiters) != 1 and is_asleep())
    assert double.submit(np.float32(3)).result(20) == 6


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_future_is_an_argument_of_the_next(workers: tuple[gw.Worker, gw.Worker]) -> None:
    """From one worker to the other and back, small and large; both, in trees and as keywords, too."""
    one, other = (w.function("any_framework:double") for w in workers)
    both, many = (workers[0].function(f"any_framework:{name}") for name in ("both", "total"))
    for n in (3, 300_000):
        x = np.arange(n, dtype="f8")
        np.testing.assert_array_equal(other.submit(one.submit(other.submit(x))).result(60), 8 * x)
        total, thrice = both.submit(one.submit(x), y=other.submit(x)).result(60)
        np.testing.assert_array_equal(total, 4 * x)
        np.testing.assert_array_equal(thrice, 6 * x)
        np.testing.assert_array_equal(many.submit([one.submit(x), x, (other.submit(x))]).result(60), 5 * x)


def test_a_chain_longer_than_there_are_threads(workers: tuple[gw.Worker, gw.Worker]) -> None:
    one, other = (w.function("any_framework:double") for w in workers)
    last = one.submit(np.array(1.0))
    for _ in range(50):
        last = one.submit(other.submit(last))
    assert last.result(60) == 2.0**101


@pytest.mark.parametrize(
    "way", ["in turn", "deadline", "submit", "exception", "again", "event loop", "pullback", "spec"]
)
def test_an_error_that_was_handled_holds_nothing(workers: tuple[gw.Worker, gw.Worker], way: str) -> None:
    """Neither results nor arguments of the failed call's caller wait for the garbage collector to find a cycle."""
    one = workers[0]
    double, fail = (one.function(f"any_framework:{name}") for name in ("double", "bad"))
    nap = one.function("fragile:nap")

    async def awaited(x: Any) -> bool:
        with contextlib.suppress(ValueError):  # here, for asyncio.run has a cycle of its own
            await fail.aio(x)
        return True

    ways: dict[str, Any] = {
        "in turn": fail,
        "deadline": lambda x: nap.options(timeout=0.05)(x, 20.0),
        "submit": lambda x: fail.submit(x).result(60),
        "exception": lambda x: fail.submit(x).exception(30),
        "again": lambda x: fail.submit(double.submit(x)).result(60),
        "event loop": lambda x: asyncio.run(awaited(x)),
        "pullback": lambda x: double.vjp(x)[1](np.ones(3), np.ones(3)),
        "spec": lambda x: fail.spec(x),
    }

    def program() -> weakref.ref[Any]:
        result = double(np.ones(5000))
        try:
            raised = ways[way](result)
        except (gw.GradwireError, TypeError, ValueError):
            raised = True
        assert raised
        return weakref.ref(result)

    program()
    gc.collect()
    gc.disable()
    try:
        result, deadline = program(), time.monotonic() + 60
        while result() is not None:  # the thread that brought the error may be at it still
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        gc.enable()


def test_nobody_waits_for_what_is_not_there(workers: tuple[gw.Worker, gw.Worker]) -> None:
    """Calls whose arguments are pending take no thread: others go on, whatever their number."""
    double, pending = workers[0].function("any_framework:double"), Future()
    before = threading.active_count()
    blocked = [double.submit(pending) for _ in range(50)]
    assert double.submit(np.array(2.0)).result(60) == 4.0
    assert threading.active_count() <= before + 8 and not any(f.done() for f in blocked)
    pending.set_result(np.array(3.0))
    assert [f.result(60) for f in blocked] == [6.0] * 50


def test_failures_are_passed_on(workers: tuple[gw.Worker, gw.Worker]) -> None:
    bad, double = workers[0].function("any_framework:bad"), workers[1].function("any_framework:double")
    last = bad.submit(np.array(1.0))
    for _ in range(2000):  # more than Python's stack has levels
        last = double.submit(last)
    with pytest.raises(gw.RemoteError, match="bad 42"):
        last.result(60)
    cancelled: Future[object] = Future()
    after = double.submit(cancelled)
    cancelled.cancel()
    with pytest.raises(CancelledError):
        after.result(60)
    several = double.submit([bad.submit(np.array(1.0)), bad.submit(np.array(1.0))])
    with pytest.raises(gw.RemoteError, match="bad 42"):
        several.result(60)


def test_cancelled_before_it_could_begin(workers: tuple[gw.Worker, gw.Worker]) -> None:
    double, pending = workers[0].function("any_framework:double"), Future()
    future = double.submit(pending)
    assert future.cancel()
    pending.set_result(np.array(1.0))
    with pytest.raises(CancelledError):
        future.result(60)
    assert double.submit(np.array(1.0)).result(60) == 2.0


@pytest.fixture(scope="module")
def torch_worker(torch_python: pathlib.Path) -> Iterator[gw.Worker]:
    with gw.connect() as bridge:
        yield bridge.worker("torch", python=torch_python, path=[TARGETS], threads=1)


def test_the_callers_grad_mode_follows(torch_worker: gw.Worker) -> None:
    """As if the call had been made here: what is submitted under no_grad records nothing."""
    import torch

    linear, norm = torch_worker.module("torch.nn:Linear", 3, 2), torch_worker.module("torch.nn:LayerNorm", 3)
    x = torch.ones(3)
    with torch.no_grad():
        silent = linear.submit(x)
        chained = linear.submit(norm.submit(x))
        with torch.enable_grad():
            recorded = linear.submit(x)
    with torch.inference_mode():
        inferred = linear.submit(x)
    assert not silent.result().requires_grad and not chained.result().requires_grad
    assert recorded.result().requires_grad and linear.submit(x).result().requires_grad
    assert inferred.result().is_inference()


def test_awaited(workers: tuple[gw.Worker, gw.Worker]) -> None:
    double = workers[0].function("any_framework:double")

    async def act() -> list[float]:
        return [float(y) for y in await asyncio.gather(*(double.aio(np.array(float(i))) for i in range(20)))]

    assert asyncio.run(act()) == [2.0 * i for i in range(20)]


# ---- Many under way ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["auto", "zmq"])
def by_each_line(request: pytest.FixtureRequest) -> Iterator[gw.Worker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADWIRE_LANE", request.param)
        with gw.connect() as bridge:
            yield bridge.worker("numpy", path=[TARGETS])


@pytest.fixture(params=["auto", "zmq"])
def line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What new connections go by."""
    monkeypatch.setenv("GRADWIRE_LANE", request.param)
    return str(request.param)


def small(i: float) -> np.ndarray:
    return np.full(1, i, "f8")


def test_they_are_made_in_their_order(by_each_line: gw.Worker) -> None:
    """Small and large, first ones and planned ones, and those that wait in an event loop, which never waits."""
    note, noted = (by_each_line.function(f"submitted:{name}") for name in ("note", "noted"))
    noted(small(0))

    async def within_a_loop() -> list[Future[Any]]:
        return [note.submit(np.full(1 + i % 3 * 5000, i, "f8")) for i in range(400, 1000)]

    futures = [note.submit(np.full(1 + i % 3 * 5000, i, "f8")) for i in range(400)]
    futures += asyncio.run(within_a_loop())
    for i, future in enumerate(futures):
        np.testing.assert_array_equal(future.result(60), np.full(1 + i % 3 * 5000, i, "f8"))
    np.testing.assert_array_equal(noted(small(0)), np.arange(1000))


def test_those_that_no_packet_takes_keep_their_order(by_each_line: gw.Worker) -> None:
    """For a text is longer; those that wait for room, and those whose argument is another's future, as well."""
    note, noted = (by_each_line.function(f"submitted:{name}") for name in ("note", "noted"))
    noted(small(0))

    def submit(i: int, x: Any) -> Future[Any]:
        return note.submit(x, "a" * 400_000 if i % 7 == 3 else "")

    async def within_a_loop() -> list[Future[Any]]:
        return [submit(i, small(i)) for i in range(50, 250)]

    futures = [submit(i, small(i)) for i in range(50)]
    futures += asyncio.run(within_a_loop())
    assert [float(f.result(60)[0]) for f in futures] == list(range(250))
    futures = [submit(3, futures[3]), submit(4, small(4))]
    assert [float(f.result(60)[0]) for f in futures] == [3, 4]
    found = noted(small(0))
    np.testing.assert_array_equal(found[:250], np.arange(250))
    assert sorted(found[250:]) == [3, 4]


@pytest.mark.parametrize("how", ["died", "restarted"])
@pytest.mark.usefixtures("line")
def test_they_keep_their_order_while_their_worker_comes_back(how: str) -> None:
    """Also those of several targets, of which one is loaded again before the other."""
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[TARGETS], restart="on-failure")
        targets = [worker.function(f"submitted:{name}") for name in ("note", "note_too")]
        noted, write = worker.function("submitted:noted"), worker.function("submitted:write")
        for _ in range(2):
            if how == "restarted":
                worker.restart()
            else:
                with pytest.raises(gw.WorkerDiedError):
                    write(small(7), os.devnull)
            futures = [targets[i % 3 // 2].submit(small(i)) for i in range(100)]
            assert [float(f.result(60)[0]) for f in futures] == list(range(100))
            np.testing.assert_array_equal(noted(small(0)), np.arange(100))


def test_they_keep_their_order_while_no_lane_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a worker has died just now, and its connection does not know yet; or for want of descriptors."""
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[TARGETS])
        note, noted = worker.function("submitted:note"), worker.function("submitted:noted")
        monkeypatch.setattr(lines.Lines, "open_pipeline", lambda self: None)
        futures = [note.submit(small(i)) for i in range(50)]
        wait(futures, 60)
        monkeypatch.undo()
        futures += [note.submit(small(i)) for i in range(50, 100)]
        assert [float(f.result(60)[0]) for f in futures] == list(range(100))
        np.testing.assert_array_equal(noted(small(0)), np.arange(100))


@pytest.mark.usefixtures("line")
def test_those_that_waited_for_room_go_to_the_next_process_in_their_order() -> None:
    """And before what is submitted later. Those that were under way are told."""
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[TARGETS])
        note, noted, nap = (worker.function(f"submitted:{name}") for name in ("note", "noted", "nap"))

        async def act() -> list[Future[Any]]:
            nap.submit(small(0), 600.0)
            futures = [note.submit(small(i)) for i in range(300)]
            worker.restart()
            return futures + [note.submit(small(i)) for i in range(300, 350)]

        futures = asyncio.run(act())
        wait(futures, 60)
        told = [i for i, future in enumerate(futures) if future.exception(0) is not None]
        assert told == list(range(127))  # the window, but for the one that slept
        assert isinstance(futures[0].exception(0), gw.WorkerDiedError)
        np.testing.assert_array_equal(noted(small(0)), np.arange(127, 350))


def test_small_arguments_are_taken_at_once(by_each_line: gw.Worker) -> None:
    nap, double = by_each_line.function("submitted:nap"), by_each_line.function("any_framework:double")
    x = np.zeros(3)
    first = nap.submit(x, 0.2)
    futures = []
    for i in range(50):
        x[:] = i
        futures.append(double.submit(x))
    first.result(60)
    assert [float(f.result(60)[0]) for f in futures] == [2.0 * i for i in range(50)]


def test_what_is_under_way_is_bounded() -> None:
    """2,000 calls of 1 MiB, each with an array of its own: neither process has more than some of them."""
    with gw.connect() as bridge:
        first = bridge.worker("numpy", path=[TARGETS]).function("submitted:first")
        first(np.ones(1 << 17))
        futures = []
        highest = 0
        for i in range(2000):
            futures.append(first.submit(np.full(1 << 17, float(i))))
            highest = max(highest, bridge._memory.arena.resident_bytes)
        assert [float(f.result(60)[0]) for f in futures] == [float(i) for i in range(2000)]
        assert highest < 40 << 20


def test_answers_that_nobody_reads_for_a_while(workers: tuple[gw.Worker, gw.Worker]) -> None:
    """More than the socket between them holds: the worker keeps them, and none is lost or out of turn."""
    spread = workers[0].function("submitted:spread")
    for _ in range(3):
        spread(small(0))
        spread.submit(small(0)).result(60)
    for _ in range(3):
        futures = [spread.submit(small(i)) for i in range(100)]
        sum(range(10_000_000))  # no other thread of this process runs meanwhile
        for i, future in enumerate(futures):
            np.testing.assert_array_equal(future.result(60), np.full(1024, float(i)))


def test_each_has_its_own_error(workers: tuple[gw.Worker, gw.Worker]) -> None:
    odd_fails = workers[0].function("submitted:odd_fails")
    futures = [odd_fails.submit(small(i)) for i in range(200)]
    for i, future in enumerate(futures):
        if i % 2:
            with pytest.raises(ValueError, match=rf"odd: {i}\b"):
                future.result(60)
        else:
            assert future.result(60) == i
    refused = odd_fails.submit(np.array(["text"]))
    with pytest.raises(gw.UnsupportedTensorError, match=r"args\[0\]"):
        refused.result(60)


@pytest.mark.usefixtures("line")
def test_a_worker_that_dies_under_them(tmp_path: pathlib.Path) -> None:
    """What was answered stays so, the others say that it died, and none is made a second time."""
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[TARGETS])
        write, path = worker.function("submitted:write"), tmp_path / "lines"
        futures = [write.submit(small(i), str(path)) for i in range(300)]
        for future in futures[8:]:
            with pytest.raises(gw.WorkerDiedError, match="exit code 3"):
                future.result(60)
        assert [int(line) for line in path.read_text().split()] == list(range(8))
        with pytest.raises(gw.WorkerDiedError):
            write.submit(small(1), str(path)).result(60)
        worker.restart()
        assert write.submit(small(1), str(path)).result(60) == 1


def test_a_deadline_counts_from_when_the_worker_could_begin(by_each_line: gw.Worker) -> None:
    nap, double = by_each_line.function("submitted:nap"), by_each_line.function("any_framework:double")
    nap.submit(small(0), 3.3)
    patient = nap.options(timeout=3.0)
    for future in [patient.submit(small(i), 0.05) for i in range(8)]:
        future.result(60)
    hasty = nap.options(timeout=0.3)
    late, after = hasty.submit(small(1), 600.0), [double.submit(small(i)) for i in range(20)]
    with pytest.raises(gw.DeadlineError):
        late.result(60)
    assert [float(f.result(60)[0]) for f in after] == [2.0 * i for i in range(20)]
    assert by_each_line.last_error is not None and isinstance(by_each_line.last_error[1], gw.DeadlineError)


def test_cancelled_while_it_waits(by_each_line: gw.Worker, tmp_path: pathlib.Path) -> None:
    note, noted, waits = (
        by_each_line.function(f"submitted:{name}") for name in ("note", "noted", "waits_for")
    )
    noted(small(0))

    async def act() -> list[Future[Any]]:
        waits.submit(str(tmp_path / "cancelled"))
        return [note.submit(small(i)) for i in range(300)]

    futures = asyncio.run(act())
    cancelled = [i for i in range(200, 300) if futures[i].cancel()]
    (tmp_path / "cancelled").touch()
    assert len(cancelled) == 100
    assert [float(f.result(60)[0]) for f in futures[:200]] == list(range(200))
    np.testing.assert_array_equal(noted(small(0)), np.arange(200))


def test_a_callback_may_wait_for_another_call(workers: tuple[gw.Worker, gw.Worker]) -> None:
    """Also of the same worker: it does not run where the answers are read."""
    double, found = workers[0].function("any_framework:double"), []
    called = threading.Event()

    def again(done: Future[Any]) -> None:
        found.append(double.submit(done.result()).result(60))
        found.append(double(done.result()))
        called.set()

    nap = workers[0].function("submitted:nap")
    nap.submit(small(3), 0.3).add_done_callback(again)
    assert called.wait(60) and found == [6.0, 6.0]


def test_a_thousand_gathered_while_the_loop_goes_on(
    workers: tuple[gw.Worker, gw.Worker], tmp_path: pathlib.Path
) -> None:
    double, waits = workers[0].function("any_framework:double"), workers[0].function("submitted:waits_for")
    sign = tmp_path / "ticked"

    async def tick() -> None:
        for _ in range(4):
            await asyncio.sleep(0.001)
        sign.touch()

    async def waiting() -> bool:
        return bool(await waits.aio(str(sign)))

    async def act() -> list[Any]:
        ticker = asyncio.create_task(tick())
        calls = [double.aio(small(i)) for i in range(1000)]  # more than may be under way
        results = await asyncio.gather(waiting(), *calls)
        await ticker
        return results

    has_ticked, *results = asyncio.run(act())
    assert [float(y[0]) for y in results] == [2.0 * i for i in range(1000)]
    assert has_ticked, "the calls waited behind the first, and so did the loop"


def test_a_handler_of_signals_is_refused_what_would_wait_for_the_call_that_it_interrupted(
    workers: tuple[gw.Worker, gw.Worker],
) -> None:
    double: Any = workers[0].function("any_framework:double")
    assert double.submit(small(1)).result(60) == 2
    with double.handle._loaded._pipeline._lock:  # as in the middle of `submit`
        with pytest.raises(gw.UsageError, match="a handler of signals has interrupted submit"):
            double.handle.drain()
    double.handle.drain()


def test_between_calls_of_other_threads(workers: tuple[gw.Worker, gw.Worker]) -> None:
    double, wrong = workers[0].function("any_framework:double"), []

    def in_turn(start: int) -> None:
        for i in range(start, start + 200):
            if double(small(i)) != 2.0 * i:
                wrong.append(i)

    def submitted(start: int) -> None:
        futures = [double.submit(small(i)) for i in range(start, start + 500)]
        wrong.extend(i for i, f in enumerate(futures, start) if f.result(60) != 2.0 * i)

    threads = [
        threading.Thread(target=act, args=(1000 * i,)) for i, act in enumerate([in_turn, submitted] * 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


@pytest.mark.usefixtures("line")
def test_closed_with_calls_under_way() -> None:
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[TARGETS])
        nap = worker.function("submitted:nap")
        futures = [nap.submit(small(i), 0.5) for i in range(100)]
        worker.close()
        for future in futures[20:]:  # which would be 40 s later
            with pytest.raises(gw.ClosedError):
                future.result(60)
        for _ in range(12):  # more than there are threads for it
            with pytest.raises(gw.ClosedError):
                nap.submit(small(0), 0.0).result(60)


def test_state_changes_after_what_was_submitted(torch_worker: gw.Worker) -> None:
    """In torch: what records nothing goes at once, what records has its gradient, and modes change in between."""
    torch = pytest.importorskip("torch")
    net, x = torch_worker.module("submitted_net:make"), torch.ones(4)
    net.train()
    with torch.no_grad():
        before = [net.submit(x) for _ in range(200)]
        net.eval()
        after = [net.submit(x) for _ in range(200)]
    assert [float(f.result(60)) for f in before + after] == [1.0] * 200 + [0.0] * 200
    assert not before[0].result().requires_grad
    torch_worker.restart(discard_state=True)
    net.train()
    torch_worker.restart(discard_state=True)
    with torch.no_grad():
        before = [net.submit(x) for _ in range(20)]
        net.eval()
        after = [net.submit(x) for _ in range(20)]
    assert [float(f.result(60)) for f in before + after] == [1.0] * 20 + [0.0] * 20
    leaf = torch.ones(4, requires_grad=True)
    net.submit(leaf).result(60).backward()
    assert leaf.grad is not None and leaf.grad.shape == (4,)
