"""R39: Keras on either side of a remote call."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradwire as gw

TARGETS = pathlib.Path(__file__).parent / "targets"
Workers = Callable[[str], gw.Worker]
RNG = np.random.default_rng(6)
X, W, V = (RNG.normal(size=shape).astype(np.float32) for shape in [(12, 4), (4, 3), (3, 2)])
Y = RNG.normal(size=(12, 2)).astype(np.float32)


def close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-5, atol=1e-6)


# ---- Keras and TensorFlow as the caller ----------------------------------------------------------------------------


def local(x: Any, w: Any, v: Any) -> Any:
    return tf.tanh(tf.tanh(x @ w) @ v)


class Stage(keras.layers.Layer):
    """A layer whose weight is here and whose function is anywhere."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.w = self.add_weight(shape=W.shape, initializer=keras.initializers.Constant(W))

    def call(self, x: Any) -> Any:
        return self.function(x, self.w, tf.constant(V))

    def compute_output_shape(self, shape: Any) -> Any:
        return (*shape[:-1], V.shape[-1])


def gradient(f: Callable[..., Any], x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(f(x, W, V) ** 2)
    return tape.gradient(y, x)


def trained(function: Callable[..., Any], jit: bool = False) -> tuple[list[float], Any]:
    """Losses and weight after three epochs of two batches, one of them smaller."""
    model = keras.Sequential([keras.Input((4,)), Stage(function), keras.layers.Rescaling(2.0)])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit)
    history = model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return history.history["loss"], model.layers[0].w.numpy()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_r39_keras_calls_a_remote(worker_of: Workers, framework: str) -> None:
    """Eager, in a tf.function that does not know the batch, and as a layer that is trained."""
    f = worker_of(framework).function(f"reports_{framework}:perceptron")
    close(f(tf.constant(X), W, V), local(X, W, V))
    close(gradient(f, tf.constant(X)), gradient(local, tf.constant(X)))
    signature = [tf.TensorSpec((None, 4), tf.float32)]
    graph = tf.function(lambda x: (f(x, W, V), gradient(f, x)), input_signature=signature)
    for n in (12, 1, 5):
        y, bar = graph(tf.constant(X[:n]))
        close(y, local(X[:n], W, V))
        close(bar, gradient(local, tf.constant(X[:n])))
    (losses, w), (wanted, w_wanted) = trained(f), trained(local)
    close(losses, wanted)
    close(w, w_wanted)
    assert np.abs(w - W).max() > 1e-3


def test_r39_jit_compile_is_refused_with_what_to_do(worker_of: Workers) -> None:
    f = worker_of("torch").function("reports_torch:perceptron")
    sentence = "gradwire_calls_another_process__use_jit_compile_False"
    with pytest.raises(tf.errors.InvalidArgumentError, match=sentence):
        tf.function(lambda x: f(x, W, V), jit_compile=True)(tf.constant(X))
    with pytest.raises(tf.errors.InvalidArgumentError, match=sentence):
        trained(f, jit=True)


# ---- Keras in the workers ------------------------------------------------------------------------------------------


def wanted_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The model of targets/in_keras.py by hand: the results, and the gradient of their sum."""
    random = np.random.default_rng(7)
    w1, b1, w2, b2 = (random.normal(size=s).astype(np.float32) for s in [(4, 5), (5,), (5, 3), (3,)])
    hidden = np.tanh(x @ w1 + b1)
    return hidden @ w2 + b2, ((1 - hidden**2) * w2.sum(1)) @ w1.T


@pytest.mark.slow
def test_r39_two_backends_in_two_workers(shared_bridge: gw.Bridge) -> None:
    y, x_bar = wanted_of(X)
    models = {}
    for backend in ("jax", "torch"):
        worker = shared_bridge.worker(
            backend, python=sys.executable, path=[TARGETS], threads=1, env={"KERAS_BACKEND": backend}
        )
        assert worker.function("in_keras:backend")() == backend
        models[backend] = model = worker.function("in_keras:apply")
        close(model(X), y)
        out, pull = model.vjp(X)
        close(pull(np.ones_like(out))[0], x_bar)
        close(jax.jit(jax.grad(lambda x, f=model: f(x).sum()))(jnp.asarray(X)), x_bar)
        leaf = torch.tensor(X, requires_grad=True)
        model(leaf).sum().backward()
        close(leaf.grad, x_bar)
        with tf.GradientTape() as tape:
            constant = tf.constant(X)
            tape.watch(constant)
            total = tf.reduce_sum(model(constant))
        close(tape.gradient(total, constant), x_bar)
    both = jax.jit(lambda x: models["torch"](x) - models["jax"](x))(jnp.asarray(X))
    close(both, np.zeros_like(y))
