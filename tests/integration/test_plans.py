"""Calls that are planned give what unplanned ones give, whatever changes between them."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import gradwire as gw
from gradwire_wire.plans import MAX_PLANS

TARGETS = pathlib.Path(__file__).parent / "targets"


@pytest.fixture(scope="module", params=["page", "socket", "zmq"])
def worker(request: pytest.FixtureRequest) -> Iterator[gw.Worker]:
    with pytest.MonkeyPatch.context() as patch, gw.connect() as bridge:
        patch.setenv("GRADWIRE_LANE", request.param)
        yield bridge.worker("numpy", path=[TARGETS])


def planned(worker: gw.Worker) -> int:
    """How many plans the line used last has."""
    lines = worker._connection.lines
    return len((lines._lanes or lines._dealers)[-1].plans)


def test_the_third_call_of_a_kind_is_planned(worker: gw.Worker) -> None:
    double, counts = worker.function("any_framework:double"), []
    before = planned(worker)
    for i in range(4):
        np.testing.assert_array_equal(double(np.full(11, i, "f4")), np.full(11, 2 * i, "f4"))
        counts.append(planned(worker) - before)
    assert counts == [0, 1, 1, 1]


@pytest.mark.parametrize("size", [10, 100, 600])
def test_many_leaves_come_back_as_they_went(size: int, worker: gw.Worker) -> None:
    """In lists, tuples and dicts, more of them than a packet or a page holds; the results are the caller's own."""
    same, kept = worker.function("any_framework:identity"), []
    before = planned(worker)
    for step in range(4):
        leaves = [np.full(size, i + step, "f4") for i in range(200)]
        tree = {
            "list": leaves[:90],
            "tuple": tuple(leaves[90:150]),
            "dict": {f"w{i}": x for i, x in enumerate(leaves[150:])},
        }
        back = same(tree)
        assert list(back) == list(tree) and [type(v) for v in back.values()] == [list, tuple, dict]
        assert list(back["dict"]) == list(tree["dict"])
        found = [*back["list"], *back["tuple"], *back["dict"].values()]
        assert [y.tolist() for y in found] == [x.tolist() for x in leaves]
        kept.append(found)
    for step, found in enumerate(kept):
        for i, y in enumerate(found):
            assert (y == i + step).all()
            y[...] = -1
    assert all((y == -1).all() for found in kept for y in found)
    is_planned = {"page": size <= 100, "socket": size <= 10, "zmq": True}[os.environ["GRADWIRE_LANE"]]
    assert planned(worker) == before + is_planned


def test_what_changes_between_calls_changes_the_results(worker: gw.Worker) -> None:
    """Shapes, dtypes, layouts, keywords, sizes around every limit: in any order, twice and more."""
    many = worker.function("any_framework:many")
    sizes = [0, 1, 7, 1000, 1024, 1025, 4096, 4097, 16_000, 70_000]
    kinds: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda x: x,
        lambda x: x.astype("i8"),
        lambda x: x[::2],
        lambda x: x[::-1],
        lambda x: np.stack([x, x]).T,
        lambda x: np.stack([x, x]),
        lambda x: x.astype(">f4"),
        lambda x: x > 1,
    ]
    chance = np.random.default_rng(0)
    cases = [(n, k, c) for n in sizes for k in range(len(kinds)) for c in (1, 2)] * 3
    for n, k, count in chance.permutation(cases):
        x = kinds[k](np.arange(n, dtype="f4") + chance.integers(100))
        for i, y in enumerate(many(x, int(count))):
            np.testing.assert_array_equal(y, x + i)
            assert y.flags.writeable


def test_results_of_another_shape_than_last_time(worker: gw.Worker) -> None:
    vary = worker.function("in_numpy:vary")
    for n in (3, 3, 3, 0, 5, 5, 5000, 5000, 20_000, 20_000, -1, -1, 3, -2, 3, 3, -3, 3):
        y = vary(np.array(n))
        if n >= 0:
            np.testing.assert_array_equal(y, np.arange(n, dtype="f4"))
        elif n == -1:
            assert y == {"nothing": None}
        elif n == -2:
            np.testing.assert_array_equal(y, np.arange(6).reshape(2, 3).T)
        else:
            assert [type(z) for z in y] == [np.ndarray, np.ndarray] and y[1].dtype == np.int64


def test_errors_do_not_end_a_plan(worker: gw.Worker) -> None:
    bad_at = worker.function("in_numpy:bad_at")
    for i in range(12):
        if i % 3 == 1:
            with pytest.raises(ValueError, match="bad 1"):
                bad_at(np.array(1.0))
        else:
            assert bad_at(np.array(0.0 + i % 3)) == i % 3


def test_more_kinds_than_a_line_has_plans(worker: gw.Worker) -> None:
    identity = worker.function("any_framework:identity")
    for _ in range(3):
        for n in range(1, MAX_PLANS + 40):
            for _ in range(2):
                assert identity(np.full(n, n, "i4")).tolist() == [n] * n
    assert planned(worker) == MAX_PLANS


def test_results_are_the_callers_own(worker: gw.Worker) -> None:
    identity = worker.function("any_framework:identity")
    for n in (3, 900, 30_000):
        results = [identity(np.full(n, i, "f4")) for i in range(8)]
        results[3][...] = -1
        assert [int(y[0]) for y in results] == [0, 1, 2, -1, 4, 5, 6, 7]


def test_arguments_that_the_worker_keeps(worker: gw.Worker) -> None:
    keep = worker.function("any_framework:keep")
    first = keep(np.full(5, 1.0)).copy()
    for i in range(6):
        np.testing.assert_array_equal(keep(np.full(5, float(i))), first)


def test_a_late_answer_of_a_planned_call_is_nobodys(worker: gw.Worker) -> None:
    nap = worker.function("in_numpy:nap_for")
    for _ in range(4):
        assert nap(np.array(0.0)) == 0
    hasty = nap.options(timeout=0.3)
    planned = 0
    while planned < 3:
        with contextlib.suppress(gw.DeadlineError):  # a busy machine: that answer is late as well
            assert hasty(np.array(0.001)) == 0.001
            planned += 1
    with pytest.raises(gw.DeadlineError):
        hasty(np.array(0.8))
    for i in range(4):
        assert nap(np.array(0.001 * i)) == 0.001 * i
        assert hasty.options(timeout=60)(np.array(0.001 * i)) == 0.001 * i


def test_threads_have_plans_of_their_own(worker: gw.Worker) -> None:
    many, failures = worker.function("any_framework:many"), []

    def run(number: int) -> None:
        for i in range(150):
            for n in (1 + number, 3000, 9000):
                x = np.full(n, number * 1000 + i, "f4")
                if not all((y == x + j).all() for j, y in enumerate(many(x, 1 + i % 3))):
                    failures.append((number, i))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_memory_comes_back(worker: gw.Worker) -> None:
    identity = worker.function("any_framework:identity")
    x = np.zeros(100_000, "f4")
    for _ in range(50):
        identity(x)
    gc.collect()
    exchange = worker._connection.exchange
    identity(x)
    with exchange._memory.lock:
        exchange.settle()
    assert len(exchange.loans) <= 1


def test_another_life_of_the_worker_knows_no_plans() -> None:
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[TARGETS])
        double = worker.function("any_framework:double")
        for life in range(3):
            for i in range(5):
                assert double(np.array(float(i + life))) == 2 * (i + life)
            worker.restart()


def test_modes_states_and_options_of_a_module(worker_of: Callable[[str], gw.Worker]) -> None:
    """What a planned call must notice: train and eval, new parameters, another seed, a proxy's other options."""
    net = worker_of("torch").module("in_torch:make_dropout")
    x = np.ones((4, 6), "f4")
    local = {name: value.copy() for name, value in net.state_dict().items()}

    def expected() -> np.ndarray:
        return x @ local["0.weight"].T + local["0.bias"]

    for scale in (1.0, 2.0):
        local = {name: value * np.float32(scale) for name, value in local.items()}
        net.load_state_dict(local)
        net.eval()
        for _ in range(4):
            np.testing.assert_allclose(net(x), expected(), rtol=1e-5)
        net.train()
        drawn = [net(x) for _ in range(4)]
        assert not all(np.array_equal(drawn[0], y) for y in drawn[1:]), "dropout draws each time"
        assert all((y == 0).any() for y in drawn)
        one, other = net.options(seed=1), net.options(seed=2)
        same, different = [one(x) for _ in range(4)], [other(x) for _ in range(4)]
        assert all(np.array_equal(same[0], y) for y in same)
        assert not np.array_equal(same[0], different[0])


def test_pullbacks_by_plan(worker_of: Callable[[str], gw.Worker]) -> None:
    cube = worker_of("torch").function("in_torch:cube")
    for n in (3, 3, 3, 3, 2000, 2000, 2000, 30_000, 30_000, 30_000):
        x = np.linspace(-1, 1, n)
        y, pullback = cube.vjp(x)
        for factor in (1.0, 2.0):
            (bar,) = pullback(np.asarray(factor, y.dtype))
            np.testing.assert_allclose(bar, factor * 3 * x**2)
    del pullback
    gc.collect()
    kept = [cube.vjp(np.array([float(i)])) for i in range(30)]
    for i, (y, pullback) in enumerate(kept):
        assert y == float(i) ** 3 and pullback(np.ones((), y.dtype))[0] == 3.0 * i * i
