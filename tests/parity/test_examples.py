"""What the bridges inside one process show in their examples, across a process boundary: see examples/bridges."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw

BRIDGES = Path(__file__).parent.parent.parent / "examples" / "bridges"
MODULES = [path.stem for path in BRIDGES.glob("*.py")]


@pytest.fixture(scope="module")
def worker_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], gw.Worker]]:
    made: dict[str, gw.Worker] = {}
    with gw.connect() as bridge:

        def worker(framework: str) -> gw.Worker:
            if framework not in made:
                python = request.getfixturevalue(f"{framework}_python")
                made[framework] = bridge.worker(framework, python=python, path=[BRIDGES], threads=1)
            return made[framework]

        yield worker


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """An example's module, as a program of its folder sees it."""
    monkeypatch.syspath_prepend(str(BRIDGES))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


def test_a_jax_model_as_a_torch_module(worker_of: Any, example: Any) -> None:
    import jax
    import jax.numpy as jnp
    import torch

    jax_model_in_torch, models_jax = example("jax_model_in_torch"), example("models_jax")
    net = gw.torch.Module(worker_of("jax").module("models_jax:make_sequential"))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    losses = jax_model_in_torch.train(net.train(), 60)
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:5])
    assert all((p != before[name]).any() for name, p in net.named_parameters())
    x, _ = jax_model_in_torch.data()
    assert (net(x) != net(x)).any()  # dropout's masks
    net.eval()
    assert torch.equal(net(x), net(x))
    x.requires_grad_()
    (x_bar,) = torch.autograd.grad((net(x) ** 2).sum(), x)
    weights = [jnp.asarray(p.detach().numpy()) for _, p in sorted(net.named_parameters())]
    expected = jax.grad(lambda x: (models_jax.sequential(weights, x) ** 2).sum())(x.detach().numpy())
    np.testing.assert_allclose(x_bar, expected, rtol=1e-5, atol=1e-6)


def test_a_jax_model_as_a_keras_layer(worker_of: Any, example: Any) -> None:
    jax_model_in_keras = example("jax_model_in_keras")
    layer = gw.keras.Layer(worker_of("jax").module("models_jax:make_sequential"))
    model, (x, y) = jax_model_in_keras.model_around(layer), jax_model_in_keras.data()
    untrained = model.evaluate(x, y, verbose=0)
    history = model.fit(x, y, epochs=20, batch_size=16, verbose=0).history
    assert history["loss"][-1] < 0.6 * history["loss"][0]
    assert model.evaluate(x, y, verbose=0)[0] < 0.6 * untrained[0]
    assert (np.asarray(layer(x, training=True)) != np.asarray(layer(x, training=True))).any()
    np.testing.assert_array_equal(layer(x, training=False), layer(x, training=False))


def test_a_torch_classifier_is_trained_from_numpy_alone(worker_of: Any, example: Any) -> None:
    classifier = worker_of("torch").module("models_torch:make_classifier")
    losses, accuracy = example("torch_from_numpy").fit(classifier)
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:5])
    assert accuracy > 0.8
    _, logits = classifier(*example("torch_from_numpy").signals())
    assert logits.shape == (48, 2)


def test_a_torch_linear_as_apply_and_params(worker_of: Any, example: Any) -> None:
    import jax
    import torch

    linear = worker_of("torch").module("models_torch:make_linear")
    losses = example("torch_in_jax").fit_linear(linear)
    assert losses[-1] < 1e-3 * losses[0]
    apply, params = gw.jax.functional(linear)
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    value, gradient = jax.jit(jax.value_and_grad(lambda p: (apply(p, x) ** 2).sum()))(params)
    local = example("models_torch").make_linear()
    loss = (local(torch.from_numpy(x)) ** 2).sum()
    loss.backward()
    np.testing.assert_allclose(value, loss.detach(), rtol=1e-5)
    for name, p in local.named_parameters():
        np.testing.assert_allclose(gradient[name], p.grad, rtol=1e-5, err_msg=name)


def test_a_torch_module_in_a_jax_pipeline(worker_of: Any, example: Any) -> None:
    encoder = worker_of("torch").module("models_torch:make_encoder")
    losses, accuracy = example("torch_in_jax").fit_encoder(encoder)
    assert losses[-1] < 0.2 * losses[0] and accuracy > 0.9
    assert encoder.buffers()["1.num_batches_tracked"] == len(losses)


def test_a_keras_model_with_an_output_of_three_dimensions(worker_of: Any, example: Any) -> None:
    import jax

    model = worker_of("tensorflow").module("models_keras:make_recurrent")
    x = np.random.default_rng(0).normal(size=(2, 7, 3)).astype(np.float32)
    z, losses = example("keras_in_jax").smoothest(model, x)
    assert jax.jit(model)(z).shape == (2, 7, 2) and losses[-1] < 0.5 * losses[0]
    local = example("models_keras").make_recurrent()
    np.testing.assert_allclose(jax.jit(model)(x), local(x), rtol=1e-5, atol=1e-6)


def test_a_flax_classifier_inside_a_torch_sequential(worker_of: Any, example: Any) -> None:
    flax_in_torch = example("flax_in_torch")
    model = flax_in_torch.make_model(worker_of("jax").module("models_jax:make_classifier"))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    losses, accuracy = flax_in_torch.train(model)
    assert losses[-1] < 0.3 * losses[0] and accuracy > 0.9
    assert all((x != before[name]).any() for name, x in model.state_dict().items())
