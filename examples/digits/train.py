"""One JAX program trains a torch encoder and a Keras head, each in its own process and environment.

The loss and its gradient are JAX's; both halves are stepped by optimizers of their own framework where
they live. This program's own environment has JAX and neither torch nor TensorFlow.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

import gradwire as gw

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BATCH = 64


def digits(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Train and test set: images (n, 1, 8, 8) float32 in 0..1, labels (n,) int32. A fifth is for testing."""
    data = load_digits()
    images = (data.images[:, None] / 16).astype(np.float32)
    labels = data.target.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(images))
    cut = len(order) * 4 // 5
    train, test = order[:cut], order[cut:]
    return (images[train], labels[train]), (images[test], labels[test])


def batches(
    images: np.ndarray, labels: np.ndarray, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One epoch of shuffled full batches."""
    order = rng.permutation(len(images))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        chosen = order[start : start + BATCH]
        yield images[chosen], labels[chosen]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy of logits (batch, classes) and labels (batch,)."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def check_input_gradient(encoder: gw.Remote, head: gw.Remote, image: np.ndarray, label: np.ndarray) -> None:
    """Compare the gradient through both workers with a central difference along its own direction."""

    def loss(x: jax.Array) -> jax.Array:
        return cross_entropy(head(encoder(x)), label)

    x = jnp.asarray(image)
    gradient = jax.grad(loss)(x)
    direction = gradient / jnp.linalg.norm(gradient)
    slope = float(jnp.vdot(gradient, direction))
    eps = 1e-2
    measured = (float(loss(x + eps * direction)) - float(loss(x - eps * direction))) / (2 * eps)
    error = abs(measured - slope) / abs(slope)
    print(
        f"input gradient through both workers: {slope:.6f}; central difference: {measured:.6f} (relative error {error:.1e})"
    )
    if error > 1e-2:
        sys.exit("the input gradient does not agree with central differences")


def start(bridge: gw.Bridge, framework: str, python: str) -> gw.Worker:
    """A worker in its own environment, with one thread: there are two of them, and this program."""
    return bridge.worker(framework, python=python, path=[HERE], threads=1)


def show_environments(bridge: gw.Bridge) -> None:
    """Three interpreters, three sets of packages."""
    absent = [name for name in ("torch", "tensorflow", "keras") if importlib.util.find_spec(name) is None]
    print(
        f"program  {sys.executable}: jax {jax.__version__}, numpy {np.__version__}; not installed: {', '.join(absent)}"
    )
    for worker in bridge.workers():
        info = worker.info
        print(
            f"worker   {info['executable']}: {info['framework']} {info['version']}, numpy {info['numpy']}, "
            f"python {info['python']}, {info['threads']} thread(s), pid {worker.pid}"
        )


def show_time(bridge: gw.Bridge, before: dict[str, dict[str, Any]], seconds: float, steps: int) -> None:
    """Milliseconds per step: in the workers' frameworks, at the boundary, and in this program."""
    waited = computed = 0.0
    for name, figures in bridge.stats().items():
        waited += figures["waited_s"] - before[name]["waited_s"]
        computed += figures["compute_s"] - before[name]["compute_s"]
    per = 1000 / steps
    print(
        f"time per step {seconds * per:.2f} ms: {computed * per:.2f} computing in the workers, "
        f"{(waited - computed) * per:.2f} at the boundary, {(seconds - waited) * per:.2f} in this program (JAX, data)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", default=str(ROOT / ".envs/torch/bin/python"))
    parser.add_argument("--tensorflow-python", default=str(ROOT / ".envs/tensorflow/bin/python"))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    (train_x, train_y), (test_x, test_y) = digits(args.seed)
    with gw.connect() as bridge:
        encoder = start(bridge, "torch", args.torch_python).module("encoder:make_encoder", args.seed)
        head = start(bridge, "tensorflow", args.tensorflow_python).module("head:make_head", args.seed)
        show_environments(bridge)

        optimizers = [
            encoder.optimizer("torch.optim:Adam", lr=2e-3),
            head.optimizer("keras.optimizers:Adam", learning_rate=2e-3),
        ]
        encode, encoder_anchor = gw.jax.functional(encoder, owner="worker")
        classify, head_anchor = gw.jax.functional(head, owner="worker")

        @jax.jit
        def gradients(anchors: tuple[jax.Array, jax.Array], images: jax.Array, labels: jax.Array) -> Any:
            def loss(anchors: tuple[jax.Array, jax.Array]) -> jax.Array:
                return cross_entropy(classify(anchors[1], encode(anchors[0], images)), labels)

            return jax.value_and_grad(loss)(anchors)

        def accuracy(images: np.ndarray, labels: np.ndarray) -> float:
            encoder.eval(), head.eval()
            return float((jnp.argmax(head(encoder(jnp.asarray(images))), -1) == labels).mean())

        anchors, rng = (encoder_anchor, head_anchor), np.random.default_rng(args.seed)
        steps, before, started = 0, bridge.stats(), time.perf_counter()
        for epoch in range(args.epochs):
            encoder.train(), head.train()
            bar = tqdm(
                batches(train_x, train_y, rng),
                total=len(train_x) // BATCH,
                desc=f"epoch {epoch + 1}/{args.epochs}",
                mininterval=0.5,
            )
            for images, labels in bar:
                loss, _ = gradients(anchors, images, labels)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                steps += 1
                bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
            bar.write(f"epoch {epoch + 1}: test accuracy {accuracy(test_x, test_y):.4f}")
        seconds = time.perf_counter() - started
        print(f"trained {steps} steps in {seconds:.1f} s")
        show_time(bridge, before, seconds, steps)
        check_input_gradient(encoder, head, test_x[:1], test_y[:1])
        reached = accuracy(test_x, test_y)
        print(f"test accuracy {reached:.4f}")
    if reached < 0.95:
        sys.exit("the test accuracy is below 0.95")


if __name__ == "__main__":
    main()
