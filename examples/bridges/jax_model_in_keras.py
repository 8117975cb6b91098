"""A JAX model as a Keras layer, trained by model.fit. This program has Keras over TensorFlow; the worker has JAX."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import keras
import numpy as np

import gradwire as gw

HERE = pathlib.Path(__file__).resolve().parent


def data(n: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Points (n, 4) in two clouds, and which (n,)."""
    y = np.arange(n) % 2
    x = np.random.default_rng(0).normal(size=(n, 4)) + 1.5 * (2 * y[:, None] - 1)
    return x.astype(np.float32), y


def model_around(layer: Any) -> Any:
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # XLA cannot call another process from TensorFlow
    )
    return model


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--python", default=str(HERE.parent.parent / ".envs/jax/bin/python"))
    chosen = options.parse_args()
    with gw.connect() as bridge:
        worker = bridge.worker("jax", python=chosen.python, path=[HERE])
        layer = gw.keras.Layer(worker.module("models_jax:make_sequential"))
        model, (x, y) = model_around(layer), data()
        history = model.fit(x, y, epochs=20, batch_size=16, verbose=0).history
        print(f"loss {history['loss'][0]:.3f} -> {history['loss'][-1]:.3f}")
        loss, accuracy = model.evaluate(x, y, verbose=0)
        print(f"evaluation, without dropout: loss {loss:.3f}, accuracy {accuracy:.3f}")
        assert (np.asarray(layer(x, training=True)) != np.asarray(layer(x, training=True))).any()
        assert (np.asarray(layer(x, training=False)) == np.asarray(layer(x, training=False))).all()


if __name__ == "__main__":
    main()
