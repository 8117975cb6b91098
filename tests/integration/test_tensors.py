"""R15 and R16 with real workers and tensors large enough to be shared: 100,000 elements and more."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable

import numpy as np
import pytest

import gradwire as gw

WORKERS = ("numpy", "torch", "tensorflow", "jax")
Workers = Callable[[str], gw.Worker]
TARGETS = pathlib.Path(__file__).parent / "targets"


def large(seed: int, n: int = 120_000) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n // 100, 100)).astype(np.float32)


@pytest.mark.parametrize("framework", WORKERS)
def test_r16_a_kept_result_stays_as_it_was(worker_of: Workers, framework: str) -> None:
    double = worker_of(framework).function("any_framework:double")
    first = double(large(0))
    for i in range(1, 101):
        np.testing.assert_array_equal(double(large(i)), large(i) * 2)
    np.testing.assert_array_equal(first, large(0) * 2)


@pytest.mark.parametrize("framework", WORKERS)
def test_r16_a_kept_argument_stays_as_it_was(worker_of: Workers, framework: str) -> None:
    keep = (
        worker_of(framework)
        .function("any_framework:keep")
        .options(compile=False if framework in ("jax", "tensorflow") else "auto")
    )
    first = large(1000)
    for i in range(1000, 1030):
        np.testing.assert_array_equal(keep(large(i)), first)


@pytest.mark.parametrize("framework", WORKERS)
def test_r16_one_array_passed_twice(worker_of: Workers, framework: str) -> None:
    x = large(5)
    total, triple = worker_of(framework).function("any_framework:both")(x, x)
    np.testing.assert_array_equal(total, x + x)
    np.testing.assert_array_equal(triple, x * np.float32(3))


@pytest.mark.parametrize("family", ["jax", "torch", "tensorflow"])
@pytest.mark.parametrize("framework", WORKERS)
def test_r16_results_in_every_caller(worker_of: Workers, framework: str, family: str) -> None:
    """The caller's framework may alias the memory: an older result must not change under it."""
    spec = gw.ShapeDtype((1200, 100), "float32")
    double = worker_of(framework).function("any_framework:double").options(family=family, out_spec=spec)
    results = [double(large(i)) for i in range(30)]
    for i, result in enumerate(results):
        np.testing.assert_array_equal(np.asarray(result), large(i) * 2)


def test_r16_results_outlive_the_bridge() -> None:
    with gw.connect() as bridge:
        double = bridge.worker("numpy", path=[TARGETS]).function("any_framework:double")
        results = [double(large(i)) for i in range(3)]
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, large(i) * 2)
        result += 1  # and they are the caller's own
        np.testing.assert_array_equal(result, large(i) * 2 + 1)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("shared", [False, True])
def test_r15_read_only_inputs_and_in_place_functions(
    worker_of: Workers, shared_bridge: gw.Bridge, framework: str, shared: bool
) -> None:
    x = large(3)
    if shared:
        lent = shared_bridge.empty(x.shape, x.dtype)
        lent[...] = x
        x = lent
    x.flags.writeable = False
    before = x.copy()
    remote = worker_of(framework).function(f"in_{framework}:add_in_place")
    expected = before + 1 if framework == "numpy" else (before + 1) * 2
    for _ in range(5):
        result = remote(x)
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(x, before)
        assert result.flags.writeable
        result[...] = -1


def test_r13_layouts_element_by_element_inside_the_worker(worker_of: Workers) -> None:
    describe = worker_of("numpy").function("in_numpy:describe")
    base = np.random.default_rng(0).normal(size=(20, 30, 40))
    views = [
        base.transpose(axes) for axes in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    ]
    views += [
        base[:, ::2],
        base[::-1],
        np.asfortranarray(base),
        np.broadcast_to(base[:1], (3, 30, 40)),
        base[1:, 1:, 1:],
    ]
    for view in views:
        elements, strides, writeable = describe(view)
        np.testing.assert_array_equal(elements, np.array([view[i] for i in np.ndindex(view.shape)]))
        assert writeable and len(strides) == 3
    dense = describe(base.transpose(2, 0, 1))[1]
    assert tuple(dense) == base.transpose(2, 0, 1).strides  # permuted but dense: kept as it is


def test_a_result_passed_on_is_not_copied_and_right(worker_of: Workers) -> None:
    numpy_double = worker_of("numpy").function("any_framework:double")
    torch_double = worker_of("torch").function("any_framework:double")
    x = large(9)
    y = numpy_double(x)
    before = worker_of("torch").stats()["copied_bytes"]
    np.testing.assert_array_equal(torch_double(y), x * 4)
    assert worker_of("torch").stats()["copied_bytes"] == before
    y[0] = 0  # written here: what is passed on now must be what is seen here
    np.testing.assert_array_equal(torch_double(y), np.concatenate([np.zeros_like(x[:1]), (x * 4)[1:]]))


def test_an_array_of_the_bridge_is_not_copied(worker_of: Workers, shared_bridge: gw.Bridge) -> None:
    double = worker_of("numpy").function("any_framework:double")
    x = shared_bridge.empty((1000, 100), np.float32)
    before = worker_of("numpy").stats()["copied_bytes"]
    for i in range(5):
        x[...] = i
        np.testing.assert_array_equal(double(x), np.full_like(x, 2 * i))
    assert worker_of("numpy").stats()["copied_bytes"] == before


@pytest.mark.parametrize("framework", WORKERS)
def test_arguments_are_returned_with_the_reply(worker_of: Workers, framework: str) -> None:
    """Nothing in the worker waits for its garbage collector to let go of a call's arguments."""
    worker = worker_of(framework)
    double = worker.function("any_framework:double")
    double(large(0))
    before = worker.stats()["lent"]
    for i in range(10):
        double(large(i))
    assert worker.stats()["lent"] <= before + 1  # JAX lets go of an argument at its next call


def test_refilled_between_forward_and_pullback(worker_of: Workers, shared_bridge: gw.Bridge) -> None:
    """What a forward keeps must not be memory that the caller can still write."""
    cube = worker_of("torch").function("in_torch:cube")
    x = shared_bridge.empty((400, 300), np.float64)
    x[...] = 2
    _, pullback = cube.vjp(x)
    x[...] = 5
    (x_bar,) = pullback(1.0)
    np.testing.assert_array_equal(x_bar, np.full(x.shape, 12.0))


def test_r02_a_worker_started_after_jax_and_threads() -> None:
    """Nothing forks: no warning of JAX's about it, and no hang, with XLA's threads and eight others running."""
    program = textwrap.dedent(
        f"""
        import threading, time, jax, numpy as np, gradwire as gw
        jax.jit(lambda x: x + 1)(np.ones(10)).block_until_ready()
        for _ in range(8):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        with gw.connect() as bridge:
            for _ in range(3):
                double = bridge.worker("numpy", path=[{str(TARGETS)!r}]).function("any_framework:double")
                assert (double(np.ones(100_000)) == 2).all()
        print("done")
        """
    )
    run = subprocess.run(
        [
            *(sys.executable, "-W", "error::RuntimeWarning", "-W", "error::DeprecationWarning:gradwire"),
            *("-c", program),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0 and run.stdout.strip() == "done", run.stderr
    assert "fork" not in run.stderr
