"""A torch classifier trained by a program that has numpy alone, each step in one message; then saved, and read without torch.

The model's result has its loss, so a step is `optimizer.minimize`: forward, backward, step and zero_grad in the worker.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile

import numpy as np

import gradwire as gw

HERE = pathlib.Path(__file__).resolve().parent


def signals(n: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Noisy sine waves (n, 1, 16) of two frequencies, and which (n,)."""
    rng, labels = np.random.default_rng(1), np.arange(n) % 2
    phase = rng.uniform(0, 6, (n, 1, 1))
    waves = np.sin((1 + labels[:, None, None]) * np.linspace(0, 6, 16) + phase)
    return (waves + 0.1 * rng.normal(size=waves.shape)).astype(np.float32), labels


def fit(classifier: gw.Remote, steps: int = 80) -> tuple[list[float], float]:
    """Losses of batches of 16 signals, and the accuracy on all of them in evaluation."""
    x, labels = signals()
    optimizer = classifier.train().optimizer("torch.optim:AdamW", lr=1e-2)
    optimizer.schedule("torch.optim.lr_scheduler:CosineAnnealingLR", T_max=steps)
    rng, losses = np.random.default_rng(2), []
    for _ in range(steps):
        batch = rng.choice(len(x), 16, replace=False)
        loss, _ = optimizer.minimize(x[batch], labels[batch], clip_norm=1.0)
        losses.append(float(loss))
    _, logits = classifier.eval()(x, labels)
    return losses, float((logits.argmax(1) == labels).mean())


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--python", default=str(HERE.parent.parent / ".envs/torch/bin/python"))
    chosen = options.parse_args()
    with gw.connect() as bridge, tempfile.TemporaryDirectory() as folder:
        worker = bridge.worker("torch", python=chosen.python, path=[HERE], threads=1)
        classifier = worker.module("models_torch:make_classifier")
        losses, accuracy = fit(classifier)
        print(f"classifier: loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {accuracy:.3f}")
        path = pathlib.Path(folder) / "classifier.safetensors"
        classifier.save(path)
        weights = sum(x.size for x in classifier.parameters().values())
        print(f"saved: {weights} weights, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
