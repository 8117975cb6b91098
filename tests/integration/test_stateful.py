"""Calls that move state, and what would make or draw them another number of times: as written, or refused."""

from __future__ import annotations

import asyncio
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradwire as gw

Workers = Callable[[str], gw.Worker]
TARGETS = pathlib.Path(__file__).parent / "targets"
ONES = np.ones(4, np.float32)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loop", ["scan", "scan of jit", "fori_loop"])
def test_r41_a_call_stays_in_a_differentiated_loop(worker_of: Workers, loop: str, compiled: bool) -> None:
    """Its arguments do not depend on the loop's variables: JAX would move such a call out of the loop."""
    import jax
    import jax.numpy as jnp

    counter = worker_of("torch").module("in_torch:Counter")

    def by_scan(x: Any) -> Any:
        return jax.lax.scan(lambda c, i: (c + (i * counter(x)).sum(), None), 0.0, jnp.arange(1.0, 4.0))[0]

    def by_fori_loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda i, c: c + ((i + 1) * counter(x)).sum(), 0.0)

    def by_scan_of_jit(x: Any) -> Any:
        body = jax.jit(lambda c, i: (c + (i * counter(x)).sum(), None))
        return jax.lax.scan(body, 0.0, jnp.arange(1.0, 4.0))[0]

    loops = {"scan": by_scan, "scan of jit": by_scan_of_jit, "fori_loop": by_fori_loop}
    program = jax.value_and_grad(loops[loop])
    value, x_bar = (jax.jit(program) if compiled else program)(ONES)
    jax.effects_barrier()
    assert counter.buffers()["calls"] == 3
    assert value == 4 * (1 * 1 + 2 * 2 + 3 * 3)
    np.testing.assert_array_equal(x_bar, np.full(4, 14, np.float32))


def test_r40_a_forward_that_moves_state_is_not_recomputed(worker_of: Workers) -> None:
    counter = worker_of("torch").module("in_torch:Counter").options(residuals="recompute")
    with pytest.raises(gw.UsageError, match="training mode"):
        counter.vjp(ONES)
    assert counter.buffers()["calls"] == 0
    counter.eval()
    out, pullback = counter.vjp(ONES)
    assert pullback(np.ones_like(out))[0].shape == (4,)


def test_r34_torch_vmap_over_state_is_refused(worker_of: Workers) -> None:
    import torch

    counter = worker_of("torch").module("in_torch:Counter")
    with pytest.raises(gw.UsageError, match="sequential"):
        torch.func.vmap(counter)(torch.ones(3, 4))
    rows = torch.func.vmap(counter.options(vmap="sequential"))(torch.ones(3, 4))
    assert rows[:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("compiled", [False, True])
def test_r41_tensorflow_makes_no_row_twice(worker_of: Workers, compiled: bool) -> None:
    """`tf.vectorized_map` executes the row that it has traced besides all rows, where that has effects."""
    import tensorflow as tf

    rows = tf.constant(np.ones((3, 4), np.float32))
    counter = worker_of("torch").module("in_torch:Counter")
    wrapped = tf.function if compiled else lambda f: f
    with pytest.raises(
        gw.UsageError, match=r"moves state, cannot be made in tf.vectorized_map.* Use tf.map_fn"
    ):
        wrapped(lambda rows: tf.vectorized_map(counter, rows))(rows)
    assert counter.buffers()["calls"] == 0
    wrapped(lambda rows: tf.map_fn(counter, rows))(rows)
    assert counter.buffers()["calls"] == 3


def test_gradients_by_row_are_not_added_in_the_worker(worker_of: Workers) -> None:
    import tensorflow as tf

    net = worker_of("torch").module("in_torch:make_block", [4, 4]).eval()
    rows = tf.constant(np.ones((3, 4), np.float32))

    def gradient(row: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(row)
            y = tf.reduce_sum(net(row))
        return tape.gradient(y, row)

    with pytest.raises(
        gw.UsageError, match=r"adds to those in the worker, cannot be made in tf.vectorized_map"
    ):
        tf.vectorized_map(gradient, rows)
    assert set(net.grads().values()) == {None}
    tf.map_fn(gradient, rows)
    np.testing.assert_array_equal(net.grads()["0.weight"][:, 0], net.grads()["0.bias"])  # every input is 1


@pytest.mark.parametrize("caller", ["torch", "tensorflow"])
def test_a_module_without_parameters_is_called_where_gradients_are_recorded(
    worker_of: Workers, caller: str
) -> None:
    """As scikit-learn's are in a numpy worker: nothing accumulates in it, so it is asked for a derivative by its arguments alone."""
    model = worker_of("numpy").module("in_numpy:Mean")
    if caller == "torch":
        import torch

        x = torch.ones(4, 3)
        model("fit", x)
        result = model("predict", x)
        assert not result.requires_grad
        with pytest.raises(gw.UsageError, match="without a derivative"):
            model("predict", x.requires_grad_())
    else:
        import tensorflow as tf

        x = tf.ones((4, 3))
        with tf.GradientTape() as tape:
            tape.watch(x)
            model("fit", tf.stop_gradient(x))
            result = model("predict", tf.stop_gradient(x))
        assert tape.gradient(result, x) is None
        known = model.options(out_spec=gw.ShapeDtype((4, 3), "float32"))
        assert (tf.function(lambda x: known("predict", x))(x) == 0).numpy().all()
    assert (np.asarray(result) == 0).all()


def test_r59_an_iterator_that_runs_out(worker_of: Workers) -> None:
    """StopIteration is how a loop ends, not an error of the call's own: it must not end, or crash, the caller's."""
    remote = worker_of("numpy").function("in_numpy:run_out")
    with pytest.raises(gw.RemoteError, match="StopIteration"):
        remote(ONES)
    with pytest.raises(gw.RemoteError, match="StopIteration"):
        asyncio.run(remote.aio(ONES))


FORKED = """
import os, numpy as np, gradwire as gw
with gw.connect() as bridge:
    double = bridge.worker("numpy", path=[{targets!r}]).function("any_framework:double")
    double.submit(np.ones(4)).result(60)
    child = os.fork()
    if child == 0:
        try:
            double.submit(np.ones(4)).result(60)
        except gw.ForkedError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert (double.submit(np.ones(4)).result(60) == 2).all()
"""


def test_submit_in_a_forked_child() -> None:
    program = FORKED.format(targets=str(TARGETS))
    run = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr


def test_options_are_checked_and_dtypes_taken(worker_of: Workers) -> None:
    double = worker_of("torch").function("any_framework:double")
    with pytest.raises(gw.UsageError, match="timeout"):
        double.options(timeout="3")
    assert double.spec(gw.ShapeDtype((3, 4), np.float32)) == gw.ShapeDtype((3, 4), "float32")


def test_an_error_made_anew_keeps_its_text() -> None:
    assert str(gw.RemoteError("bad 42")) == "bad 42"
