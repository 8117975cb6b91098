"""R39: Keras on either side of a remote call."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradwire as gw
from tests.integration.keras_alike import as_numpy, assert_layers_as_in_process

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


@pytest.fixture(scope="module")
def with_backend(shared_bridge: gw.Bridge) -> Iterator[Workers]:
    """The worker of a framework whose Keras has that backend, started when it is first asked for."""
    made: dict[str, gw.Worker] = {}

    def worker(backend: str) -> gw.Worker:
        if backend not in made:
            options: dict[str, Any] = {"python": sys.executable, "path": [TARGETS], "threads": 1}
            made[backend] = shared_bridge.worker(backend, env={"KERAS_BACKEND": backend}, **options)
            assert made[backend].function("keras_alone:backend")() == backend
        return made[backend]

    yield worker
    for one in made.values():
        one.close()


@pytest.mark.slow
def test_r39_two_backends_in_two_workers(with_backend: Workers) -> None:
    y, x_bar = wanted_of(X)
    models = {}
    for backend in ("jax", "torch"):
        models[backend] = model = with_backend(backend).function("in_keras:apply")
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


@pytest.mark.slow
def test_r39_keras_with_the_torch_backend_in_a_worker(with_backend: Workers, worker_of: Workers) -> None:
    """The same model and weights as in a TensorFlow worker: results, gradients, statistics, mode and seeds."""
    worker = with_backend("torch")
    net = worker.module("keras_models:make_noisy")
    twin = worker_of("tensorflow").module("keras_models:make_noisy")
    state = (
        net.state_dict()
    )  # KerasModule's places are of torch, but named as Keras names them in every worker
    assert next(iter(net.parameters())) == "dense/kernel" and len(state) == 8
    twin.load_state_dict(state)
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    assert net.spec(x).shape == (16, 3) and net.training is True

    net.eval()
    layers = [gw.keras.Layer(remote) for remote in (net, twin)]
    found = []
    for layer in layers:
        variables = [v.value for v in layer.trainable_weights]
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(layer(tf.constant(x)) ** 2)
        found.append([y, *tape.gradient(y, variables)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, 1e-4, 1e-4)

    one, two = (as_numpy(layers[0](x, training=True)) for _ in range(2))
    for _ in range(2):
        layers[1](x, training=True)
    assert (one != two).any()  # dropout
    for name, value in net.buffers().items():
        np.testing.assert_allclose(value, twin.buffers()[name], 1e-5, 1e-6, err_msg=name)
    net.train()
    seeded = net.options(seed=5)
    assert (seeded(x) == seeded(x)).all()
    optimizer, before = net.optimizer("torch.optim:SGD", lr=0.1), net.parameters()
    y, pullback = net.vjp(x)
    pullback(y)
    optimizer.step()
    assert all((net.parameters()[name] != value).any() for name, value in before.items() if "kernel" in name)
    assert_layers_as_in_process(worker)


def check_noisy_layer(layer: Any, net: gw.Remote) -> None:
    """(batch, 4) to (batch, 3) with BatchNorm and dropout: the mode is honoured, every weight learns, fit and evaluate."""
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    before = net.buffers()
    one, two = (as_numpy(layer(x, training=True)) for _ in range(2))
    still, same = as_numpy(layer(x)), as_numpy(layer(x, training=False))
    assert (one != two).any() and (still == same).all()
    moved = net.buffers()
    assert any((moved[name] != value).any() for name, value in before.items())
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.02), "mse")
    weights = [as_numpy(v).copy() for v in layer.trainable_weights]
    losses = model.fit(x, x[:, :1], epochs=8, batch_size=16, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert all((as_numpy(v) != w).any() for v, w in zip(layer.trainable_weights, weights, strict=True))
    counted = net.buffers()
    assert model.evaluate(x, x[:, :1], verbose=0) == model.evaluate(x, x[:, :1], verbose=0)
    assert all((net.buffers()[name] == value).all() for name, value in counted.items())


def test_a_flax_module_as_a_keras_layer(worker_of: Workers) -> None:
    net = worker_of("jax").module("keras_flax:make_classifier")
    layer = gw.keras.Layer(net)
    assert sorted(v.name for v in layer.weights) == sorted(n.replace(".", "_") for n in net.parameters())
    check_noisy_layer(layer, net)


@pytest.mark.slow
def test_r39_keras_with_the_jax_backend_in_a_worker(with_backend: Workers) -> None:
    worker = with_backend("jax")
    net = worker.module("keras_models:make_noisy")
    assert (
        net.training is False and next(iter(net.parameters())) == "dense/kernel" and len(net.buffers()) == 2
    )
    check_noisy_layer(gw.keras.Layer(net), net)
    net.train()
    x = np.ones((5, 4), "float32")
    seeded = net.options(seed=5)
    assert (seeded(x) == seeded(x)).all() and (net(x) != net(x)).any()
    optimizer, before = net.optimizer("optax:sgd", learning_rate=0.1), net.parameters()
    y, pullback = net.vjp(np.random.default_rng(0).normal(size=(16, 4)).astype("float32"))
    pullback(y)
    optimizer.step()
    assert all((net.parameters()[name] != value).any() for name, value in before.items() if "kernel" in name)
    assert_layers_as_in_process(worker)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_constraint_is_refused_where_no_keras_optimizer_would_apply_it(
    with_backend: Workers, backend: str
) -> None:
    net = with_backend(backend).module("keras_models:make_constrained")
    for form in (gw.keras.Layer, gw.torch.Module, gw.jax.functional):
        with pytest.raises(gw.UsageError, match=r"kernel has a constraint \(NonNeg\)"):
            form(net)(X)
    net.requires_grad_(False, ["dense/kernel"])
    assert as_numpy(gw.keras.Layer(net)(X)).shape == (len(X), 3)


@pytest.mark.slow
def test_a_keras_module_that_assigns_to_its_parameters_is_refused_in_a_torch_worker(
    with_backend: Workers,
) -> None:
    net = with_backend("torch").module("keras_models:make_spectral")
    before = net.state_dict()
    for call in (net.train(), gw.torch.Module(net)):
        with pytest.raises(gw.UsageError, match=r"assigns to its parameter .*kernel.* SpectralNormalization"):
            call(torch.tensor(X))
    for name, x in net.state_dict().items():
        np.testing.assert_array_equal(before[name], x)
    assert net.eval()(X).shape == (len(X), 3)
