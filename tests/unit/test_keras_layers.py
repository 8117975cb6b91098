"""What Keras counts by process is called the same in every process; frozen calls leave the layers as they were."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from gradwire_wire.errors import UsageError
from gradwire_workers.keras_layers import called_in_layer, frozen, is_keras_layer, regularized, stable_paths

layers = keras.layers


class Built(keras.Model):  # type: ignore[misc]
    """Parts that were built outside of it, variables without names, and a part that has parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = layers.Dense(2), layers.Dense(2), layers.Dense(2, name="head")
        self.inner = keras.Sequential([layers.Dense(2), layers.Dense(2)])
        for part in (self.second, self.first, self.head, self.inner):
            part.build((None, 2))
        self.free = [self.add_weight(shape=(2,)) for _ in range(2)]

    def call(self, x: Any) -> Any:
        return self.inner(self.head(self.second(self.first(x + self.free[0] * self.free[1]))))


def functional() -> Any:
    x = keras.Input((3, 4))
    y = layers.Bidirectional(layers.LSTM(2))(x)
    return keras.Model(x, layers.Dense(1)(layers.Dense(2, name="dense_of_mine")(y)))


def sequential() -> Any:
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3),
            layers.BatchNormalization(),
            layers.Dense(3),
            layers.BatchNormalization(),
        ]
    )


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_model_of_another_backend_says_how_to_start_the_worker(framework: str) -> None:
    program = importlib.import_module(f"gradwire_workers.{framework}").program
    with pytest.raises(UsageError, match=rf"tensorflow backend.*KERAS_BACKEND.*{framework}"):
        program(sequential(), is_module=True)


@pytest.mark.parametrize("make", [Built, functional, sequential])
def test_names_are_those_of_the_architecture(make: Callable[[], Any]) -> None:
    first = make()
    layers.Dense(2), layers.LSTM(2), keras.Sequential(), layers.BatchNormalization()
    second = make()
    names = [stable_paths(model, model.weights) for model in (first, second)]
    assert names[0] == names[1]
    assert [v.path for v in first.weights] != [v.path for v in second.weights], "or this shows nothing"


def test_names_that_were_given_stay_and_the_root_is_left_out() -> None:
    model = sequential()
    first = stable_paths(model, model.weights)
    assert first[:2] == ["dense/kernel", "dense/bias"] and "batch_normalization_1/gamma" in first
    model = functional()
    assert "dense_of_mine/kernel" in stable_paths(model, model.weights)
    net = keras.Sequential([keras.Input((2,)), layers.Dense(1)], name="mine")
    assert stable_paths(net, net.weights) == ["dense/kernel", "dense/bias"]
    layer = layers.Dense(1)
    layer.build((None, 2))
    assert stable_paths(layer, layer.weights) == ["kernel", "bias"]


def test_frozen_for_a_call_and_as_it_was_afterwards() -> None:
    net = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, kernel_regularizer="l2"), layers.BatchNormalization()]
    )
    net.layers[0].trainable = False
    x, before = np.ones((5, 4), "float32"), [v.numpy() for v in net.non_trainable_weights]
    learning = [v.path for v in net.trainable_weights]
    with pytest.raises(ZeroDivisionError), frozen([net]):
        assert not net.layers[1].trainable
        net(x, training=True)
        raise ZeroDivisionError
    for v, value in zip(net.non_trainable_weights, before, strict=True):
        np.testing.assert_array_equal(v, value)
    assert [v.path for v in net.trainable_weights] == learning and not net.layers[0].trainable
    net(x, training=True)
    assert any((v.numpy() != value).any() for v, value in zip(net.non_trainable_weights, before, strict=True))


def test_losses_come_with_the_result() -> None:
    net = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l2")]
    )
    x = np.ones((5, 4), "float32")
    assert (
        is_keras_layer(net) and regularized(net) == [net.layers[0].name] and regularized(sequential()) == []
    )
    _, losses, _ = called_in_layer([net], True, net, [x], {})
    np.testing.assert_array_equal(losses, net.losses)
    assert len(losses) == 2 and len(called_in_layer([net], False, net, [x], {})[1]) == 1


class Penalised(layers.Layer):  # type: ignore[misc]
    def __init__(self, helper: Callable[[Any, Any], None] | None = None) -> None:
        super().__init__(name="penalised")
        self.helper = helper

    def call(self, x: Any) -> Any:
        if self.helper is not None:
            self.helper(self, x)
        return x


class PenalisedByItself(Penalised):
    def call(self, x: Any) -> Any:
        def penalise(y: Any) -> None:
            self.add_loss(keras.ops.sum(y))

        penalise(x)
        return x


def test_losses_that_a_layer_adds_are_known_by_its_code_or_after_a_call() -> None:
    x = np.ones((5, 4), "float32")
    assert regularized(keras.Sequential([Penalised(), layers.Dense(2)])) == []
    assert regularized(keras.Sequential([PenalisedByItself(), layers.Dense(2)])) == ["penalised"]
    net = keras.Sequential([Penalised(lambda layer, x: layer.add_loss(keras.ops.sum(x))), layers.Dense(2)])
    assert regularized(net) == []
    net(x)
    assert regularized(net) == ["penalised"]
