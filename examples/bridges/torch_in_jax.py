"""torch modules in a JAX pipeline: a Linear as ``apply, params``, and an encoder with BatchNorm under jit, with optax.

This program has JAX and optax; the worker has torch. No example output is given anywhere.
"""

from __future__ import annotations

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradwire as gw

HERE = pathlib.Path(__file__).resolve().parent


def fit_linear(linear: gw.Remote, steps: int = 100) -> list[float]:
    """Learn a known linear map with the parameters in this program; the loss at each step."""
    apply, params = gw.jax.functional(linear)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 3)).astype(np.float32)
    y = x @ np.array([[1.0, -2.0], [0.5, 0.0], [3.0, 1.0]], np.float32) + 0.25

    @jax.jit
    def step(params: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        loss, gradient = jax.value_and_grad(lambda p: ((apply(p, x) - y) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss

    losses = []
    for _ in range(steps):
        params, loss = step(params)
        losses.append(float(loss))
    return losses


def signals(n: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Noisy sine waves (n, 1, 16) of two frequencies, and which (n,)."""
    rng, y = np.random.default_rng(1), np.arange(n) % 2
    phase = rng.uniform(0, 6, (n, 1, 1))
    waves = np.sin((1 + y[:, None, None]) * np.linspace(0, 6, 16) + phase)
    return (waves + 0.1 * rng.normal(size=waves.shape)).astype(np.float32), y


def fit_encoder(encoder: gw.Remote, steps: int = 60) -> tuple[list[float], float]:
    """Encoder and a linear head trained by optax, all parameters in this program. Losses, and accuracy in evaluation."""
    encoder.train()
    apply, params = gw.jax.functional(encoder)
    head = {"weight": jnp.zeros((8, 2)), "bias": jnp.zeros(2)}
    x, y = signals()
    optimizer = optax.adam(3e-2)

    def loss_of(trained: tuple[dict[str, jax.Array], ...]) -> jax.Array:
        params, head = trained
        logits = apply(params, x) @ head["weight"] + head["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(trained: tuple, state: tuple) -> tuple[tuple, tuple, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(trained)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(trained, updates), state, loss

    trained = (params, head)
    state, losses = optimizer.init(trained), []
    for _ in range(steps):
        trained, state, loss = step(trained, state)
        losses.append(float(loss))
    encoder.eval()
    params, head = trained
    logits = jax.jit(apply)(params, x) @ head["weight"] + head["bias"]
    return losses, float((logits.argmax(1) == y).mean())


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--python", default=str(HERE.parent.parent / ".envs/torch/bin/python"))
    chosen = options.parse_args()
    with gw.connect() as bridge:
        worker = bridge.worker("torch", python=chosen.python, path=[HERE], threads=1)
        losses = fit_linear(worker.module("models_torch:make_linear"))
        print(f"linear: loss {losses[0]:.3f} -> {losses[-1]:.6f}")
        losses, accuracy = fit_encoder(worker.module("models_torch:make_encoder"))
        print(f"encoder: loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
