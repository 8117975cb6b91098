"""What Keras does for a layer beside calling it, for the tests of layers in workers with any backend of Keras."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf

import gradwire as gw
from tests.integration.targets import keras_models

X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")


def as_numpy(x: Any) -> np.ndarray:
    return np.asarray(x.numpy())


def assert_layers_as_in_process(worker: gw.Worker) -> None:
    """It reaches the one in the worker: frozen parts, losses, masks, and weights by their names."""
    x = tf.constant(X[:, :4])
    local = keras_models.make_regularized()
    remote = worker.module("keras_models:make_regularized")
    for buffers in ("worker", "explicit"):
        layer = gw.keras.Layer(remote, buffers=buffers)
        for mine, value in zip(layer.trainable_weights, local.trainable_weights, strict=True):
            mine.assign(value)
        before = [as_numpy(v) for v in local.non_trainable_weights]
        remote.load_state_dict(dict(zip(remote.buffers(), before, strict=True)), strict=False)
        for model in (local, layer):
            model.trainable = False
        np.testing.assert_allclose(layer(x, training=True), local(x, training=True), 1e-5, 1e-5)
        assert len(layer.losses) == len(local.losses) == 1, "no weight is regularised that does not learn"
        for model in (local, layer):
            model.trainable = True
        assert all((value == b).all() for value, b in zip(remote.buffers().values(), before, strict=True))

        def losses_of(model: Any) -> list[Any]:
            with tf.GradientTape() as tape:
                y = model(x, training=True)
                loss = tf.reduce_sum(y) + 10 * tf.add_n(model.losses)
            assert len(model.losses) == 2
            return [y, loss, *tape.gradient(loss, [v.value for v in model.trainable_weights])]

        for got, wanted in zip(tf.function(losses_of)(layer), losses_of(local), strict=True):
            np.testing.assert_allclose(got, wanted, 1e-4, 1e-4)
    again = worker.module("keras_models:make_regularized", seed=1)
    again.load_state_dict(remote.state_dict())
    np.testing.assert_array_equal(again(x), remote(x))
    _assert_masks_cross(worker)
    _assert_loaded_statistics_count(worker)
    _assert_states_go_on(worker)


def _assert_masks_cross(worker: gw.Worker) -> None:
    """A mask of the caller's reaches the module, one of the module's the layers and the loss behind it."""
    x = np.where(X[:8, :, None] > 0.5, 0.0, X[:8, :, None] * [1, 2]).astype("float32")
    for masking in (False, True):
        local = keras_models.make_recurrent(masking)
        layer = gw.keras.Layer(worker.module("keras_models:make_recurrent", masking))
        layer.set_weights(local.get_weights())
        losses = []
        for part in (layer, local):
            before = [] if masking else [keras.layers.Masking()]
            model = keras.Sequential([keras.Input((6, 2)), *before, part])
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=masking)
            losses.append([float(model.train_on_batch(x, np.ones((8, 6, 3)))) for _ in range(2)])
            y = model(x)
            assert (as_numpy(y._keras_mask) == (x != 0).any(-1)).all()
        np.testing.assert_allclose(*losses, 1e-5)


def _assert_states_go_on(worker: gw.Worker) -> None:
    """Those of stateful RNNs, which Keras has in no list, also in evaluation mode; and they are saved and loaded."""
    x = np.random.default_rng(1).normal(size=(3, 2, 5, 3)).astype("float32")
    local, remote = keras_models.make_stateful(), worker.module("keras_models:make_stateful")
    remote.eval()
    assert list(remote.buffers()) == ["lstm/rnn_state", "lstm/rnn_state_1", "gru/rnn_state"]
    remote.load_state_dict(dict(zip(remote.parameters(), local.get_weights(), strict=True)), strict=False)
    for chunk in x[:2]:
        remote.spec(chunk)
        np.testing.assert_allclose(remote(chunk), as_numpy(local(chunk)), 1e-5, 1e-6)
    state = remote.state_dict()
    y, pullback = remote.vjp(x[2])
    assert np.isfinite(pullback(np.ones_like(y))[0]).all()
    np.testing.assert_allclose(y, as_numpy(local(x[2])), 1e-5, 1e-6)
    remote.load_state_dict(state)
    np.testing.assert_array_equal(remote(x[2]), y)
    remote.load_state_dict(state)
    twice = jax.jit(lambda x: remote(x) - remote(x))(x[2])  # two equal calls that are not one
    np.testing.assert_allclose(twice, y - as_numpy(local(x[2])), 1e-4, 1e-6)
    layer = gw.keras.Layer(remote, buffers="explicit")
    for chunk in x[:2]:
        np.testing.assert_allclose(as_numpy(layer(chunk)), as_numpy(local(chunk)), 1e-5, 1e-6)


def _assert_loaded_statistics_count(worker: gw.Worker) -> None:
    """Adapted layers compute with tensors made of their variables, which must follow these: in the worker and beside the caller."""
    x = X[:, :3]
    one, other = (worker.module("keras_models:make_normalized", spread) for spread in (1, 5))
    wanted, before = one(x), other(x)
    assert np.abs(wanted - before).max() > 0.1
    local = keras_models.make_normalized(1)
    np.testing.assert_allclose(wanted, as_numpy(local(x)), 1e-5, 1e-5)
    explicit = gw.keras.Layer(other, buffers="explicit")
    np.testing.assert_allclose(as_numpy(explicit(x)), before, 1e-5, 1e-5)
    explicit.set_weights([*one.parameters().values(), *one.buffers().values()])
    np.testing.assert_allclose(as_numpy(explicit(x)), wanted, 1e-5, 1e-5)
    np.testing.assert_array_equal(other(x), before)
    other.load_state_dict(one.state_dict())
    np.testing.assert_array_equal(other(x), wanted)
    np.testing.assert_array_equal(other.vjp(x)[0], wanted)
