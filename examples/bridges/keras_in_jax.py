"""A Keras model whose output has three dimensions, in a JAX program, under jit and differentiated."""

from __future__ import annotations

import argparse
import pathlib

import jax
import numpy as np

import gradwire as gw

HERE = pathlib.Path(__file__).resolve().parent


def smoothest(model: gw.Remote, x: np.ndarray, steps: int = 40) -> tuple[jax.Array, list[float]]:
    """An input near x for which the model's output changes little over time, by gradient descent on the input."""

    @jax.jit
    def step(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(z: jax.Array) -> jax.Array:
            y = model(z)  # (batch, time, 2)
            return ((y[:, 1:] - y[:, :-1]) ** 2).sum() + 0.01 * ((z - x) ** 2).sum()

        value, gradient = jax.value_and_grad(loss)(z)
        return z - 0.2 * gradient, value

    z, losses = jax.numpy.asarray(x), []
    for _ in range(steps):
        z, value = step(z)
        losses.append(float(value))
    return z, losses


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--python", default=str(HERE.parent.parent / ".envs/tensorflow/bin/python"))
    chosen = options.parse_args()
    with gw.connect() as bridge:
        worker = bridge.worker("tensorflow", python=chosen.python, path=[HERE])
        model = worker.module("models_keras:make_recurrent")
        x = np.random.default_rng(0).normal(size=(2, 7, 3)).astype(np.float32)
        z, losses = smoothest(model, x)
        print(f"output {jax.jit(model)(z).shape}; roughness {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
