"""Calls that nobody waits for: in order or not, one after the other's result, and when one of them fails."""

from __future__ import annotations

import asyncio
import pathlib
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import pytest

import gradwire as gw

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
        np.testing.assert_array_equal(future.result(30), np.full(3, 2 * i))


def test_a_future_is_an_argument_of_the_next(workers: tuple[gw.Worker, gw.Worker]) -> None:
    """From one worker to the other and back, small and large; both, in trees and as keywords, too."""
    one, other = (w.function("any_framework:double") for w in workers)
    both, many = (workers[0].function(f"any_framework:{name}") for name in ("both", "total"))
    for n in (3, 300_000):
        x = np.arange(n, dtype="f8")
        np.testing.assert_array_equal(other.submit(one.submit(other.submit(x))).result(30), 8 * x)
        total, thrice = both.submit(one.submit(x), y=other.submit(x)).result(30)
        np.testing.assert_array_equal(total, 4 * x)
        np.testing.assert_array_equal(thrice, 6 * x)
        np.testing.assert_array_equal(many.submit([one.submit(x), x, (other.submit(x))]).result(30), 5 * x)


def test_a_chain_longer_than_there_are_threads(workers: tuple[gw.Worker, gw.Worker]) -> None:
    one, other = (w.function("any_framework:double") for w in workers)
    last = one.submit(np.array(1.0))
    for _ in range(50):
        last = one.submit(other.submit(last))
    assert last.result(30) == 2.0**101


def test_nobody_waits_for_what_is_not_there(workers: tuple[gw.Worker, gw.Worker]) -> None:
    """Calls whose arguments are pending take no thread: others go on, whatever their number."""
    double, pending = workers[0].function("any_framework:double"), Future()
    before = threading.active_count()
    blocked = [double.submit(pending) for _ in range(50)]
    assert double.submit(np.array(2.0)).result(30) == 4.0
    assert threading.active_count() <= before + 8 and not any(f.done() for f in blocked)
    pending.set_result(np.array(3.0))
    assert [f.result(30) for f in blocked] == [6.0] * 50


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
        after.result(30)
    several = double.submit([bad.submit(np.array(1.0)), bad.submit(np.array(1.0))])
    with pytest.raises(gw.RemoteError, match="bad 42"):
        several.result(30)


def test_cancelled_before_it_could_begin(workers: tuple[gw.Worker, gw.Worker]) -> None:
    double, pending = workers[0].function("any_framework:double"), Future()
    future = double.submit(pending)
    assert future.cancel()
    pending.set_result(np.array(1.0))
    with pytest.raises(CancelledError):
        future.result(30)
    assert double.submit(np.array(1.0)).result(30) == 2.0


def test_the_callers_grad_mode_follows(torch_python: Any) -> None:
    """As if the call had been made here: what is submitted under no_grad records nothing."""
    import torch

    with gw.connect() as bridge:
        worker = bridge.worker("torch", python=torch_python, threads=1)
        linear, norm = worker.module("torch.nn:Linear", 3, 2), worker.module("torch.nn:LayerNorm", 3)
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
