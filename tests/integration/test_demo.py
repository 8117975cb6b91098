"""The main job: the demo's two halves train as they would in one process, and the demo itself runs."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from tests.conftest import users_environment

ROOT = pathlib.Path(__file__).parent.parent.parent
DIGITS = ROOT / "examples" / "digits"
RNG = np.random.default_rng(0)
IMAGES, LABELS = RNG.random((32, 1, 8, 8), np.float32), RNG.integers(0, 10, 32).astype(np.int32)


def loss_and_cotangent(logits: np.ndarray) -> tuple[float, np.ndarray]:
    """JAX's half of the program on its own: the loss, and its gradient in the logits."""
    import jax
    import jax.numpy as jnp

    def loss(logits: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], 1).mean()

    value, bar = jax.value_and_grad(loss)(jnp.asarray(logits))
    return float(value), np.asarray(bar)


def local_gradients(monkeypatch: pytest.MonkeyPatch) -> tuple[float, dict[str, np.ndarray], list[np.ndarray]]:
    """Loss and gradients of encoder and head with all three frameworks in this process."""
    monkeypatch.syspath_prepend(str(DIGITS))
    import encoder
    import head
    import tensorflow as tf
    import torch

    net, classifier = encoder.make_encoder(0), head.make_head(0)
    features = net(torch.tensor(IMAGES))
    with tf.GradientTape() as tape:
        x = tf.constant(features.detach().numpy())
        tape.watch(x)
        logits = classifier(x, training=False)  # without dropout's mask, which is random
    value, bar = loss_and_cotangent(logits.numpy())
    x_bar, *head_bars = tape.gradient(
        logits, [x, *classifier.trainable_variables], output_gradients=tf.constant(bar)
    )
    features.backward(torch.tensor(x_bar.numpy()))
    for name in ("encoder", "head"):
        sys.modules.pop(name, None)
    return value, {n: p.grad.numpy() for n, p in net.named_parameters()}, [b.numpy() for b in head_bars]


def test_r44_both_halves_get_the_all_local_gradients(
    torch_python: str, tensorflow_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax
    import jax.numpy as jnp

    value, encoder_bars, head_bars = local_gradients(monkeypatch)
    with gw.connect() as bridge:
        encoder = bridge.worker("torch", python=torch_python, path=[DIGITS], threads=1).module(
            "encoder:make_encoder", 0
        )
        head = bridge.worker("tensorflow", python=tensorflow_python, path=[DIGITS], threads=1).module(
            "head:make_head", 0
        )
        encode, encoder_anchor = gw.jax.functional(encoder, owner="worker")
        classify, head_anchor = gw.jax.functional(head, owner="worker")

        @jax.jit
        def step(anchors: Any) -> Any:
            def loss(anchors: Any) -> Any:
                logits = classify(anchors[1], encode(anchors[0], IMAGES))
                return -jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], 1).mean()

            return jax.value_and_grad(loss)(anchors)

        before = encoder.parameters()
        optimizer = encoder.optimizer("torch.optim:Adam", lr=1e-2)
        got, _ = step((encoder_anchor, head_anchor))
        np.testing.assert_allclose(got, value, rtol=1e-5)
        grads = encoder.grads()
        for name, wanted in encoder_bars.items():
            np.testing.assert_allclose(grads[name], wanted, rtol=1e-3, atol=1e-6, err_msg=name)
        for grad, wanted in zip(head.grads().values(), head_bars, strict=True):
            np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-7)
        optimizer.step()
        after = encoder.parameters()
        assert all((before[n] != after[n]).any() for n in before if n.endswith("weight"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo(torch_python: str, tensorflow_python: str) -> None:
    python = ROOT / ".envs" / "demo" / "bin" / "python"
    if not python.exists():
        pytest.skip("the demo's environment is not built: make setup")
    run = subprocess.run(
        [python, DIGITS / "train.py", "--epochs", "4"],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
        env=users_environment(),
    )
    assert run.returncode == 0, run.stderr[-3000:]
    *lines, last = run.stdout.strip().splitlines()
    said, _, accuracy = last.rpartition(" ")
    assert said == "test accuracy" and float(accuracy) >= 0.95
    assert any("not installed: torch, tensorflow, keras" in line for line in lines)
    assert any(line.startswith("input gradient through both workers") for line in lines)
