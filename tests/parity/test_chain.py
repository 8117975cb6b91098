"""JAX linear → torch block → Keras block → JAX linear, trained 50 steps, equals the model that is all in one process.

In both modes: the workers own their parameters and step them by their own optimizers, or the JAX program owns all of
them. The model to compare with is torch's own, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradwire as gw

STEPS, RATE = 50, 1 / 16  # exact in float32, in which Keras keeps it
TARGETS = Path(__file__).parent / "targets"
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 4)), RNG.normal(size=(16, 2))
Parameters = dict[str, np.ndarray]
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


@pytest.fixture(scope="module")
def workers(torch_python: Path, tensorflow_python: Path) -> Iterator[tuple[gw.Worker, gw.Worker]]:
    with gw.connect() as bridge:
        yield (
            bridge.worker("torch", python=torch_python, path=[TARGETS], threads=1),
            bridge.worker("tensorflow", python=tensorflow_python, path=[TARGETS], threads=1),
        )


def ends(dtype: str) -> Parameters:
    """The program's own linear layers, first and last."""
    rng = np.random.default_rng(3)
    shapes = {"first": (4, 6), "first_bias": (6,), "last": (3, 2), "last_bias": (2,)}
    return {name: (rng.normal(size=shape) / 2).astype(dtype) for name, shape in shapes.items()}


class AllLocal(torch.nn.Module):
    """The same model in one process and float64, from the values the parts begin with."""

    def __init__(self, own: Parameters, block: Parameters, dense: Parameters) -> None:
        super().__init__()
        self.own = torch.nn.ParameterDict({name: _parameter(x) for name, x in own.items()})
        layers = torch.nn
        self.block = layers.Sequential(
            layers.Linear(6, 8), layers.BatchNorm1d(8), layers.Tanh(), layers.Linear(8, 5)
        ).double()
        with torch.no_grad():
            for name, p in self.block.named_parameters():
                p.copy_(torch.tensor(block[name]))
        self.dense = torch.nn.ParameterList([_parameter(x) for x in dense.values()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernel, bias, kernel_2, bias_2 = self.dense
        h = self.block(x @ self.own["first"] + self.own["first_bias"])
        h = torch.tanh(h @ kernel + bias) @ kernel_2 + bias_2
        return h @ self.own["last"] + self.own["last_bias"]


def _parameter(x: np.ndarray) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(x, dtype=torch.float64))


def trained_locally(own: Parameters, block: Parameters, dense: Parameters) -> tuple[Parameters, ...]:
    model = AllLocal(own, block, dense)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((model(torch.tensor(X)) - torch.tensor(Y)) ** 2).mean().backward()
        optimizer.step()
    return (
        {name: p.detach().numpy() for name, p in model.own.items()},
        {name: p.detach().numpy() for name, p in model.block.named_parameters()},
        {name: p.detach().numpy() for name, p in zip(dense, model.dense, strict=True)},
    )


def loss_of(own: Any, block: Callable[..., Any], dense: Callable[..., Any], dtype: str) -> Any:
    x, y = X.astype(dtype), Y.astype(dtype)
    h = dense(block(x @ own["first"] + own["first_bias"]))
    return ((h @ own["last"] + own["last_bias"] - y) ** 2).mean()


def descended(parameters: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)


def trained_by_workers(own: Any, block: gw.Remote, dense: gw.Remote, dtype: str) -> tuple[Parameters, ...]:
    apply, anchor = gw.jax.functional(block, owner="worker")
    apply_dense, anchor_dense = gw.jax.functional(dense, owner="worker")
    optimizers = (
        block.optimizer("torch.optim:SGD", lr=RATE),
        dense.optimizer("keras.optimizers:SGD", learning_rate=RATE),
    )

    def loss(own: Any, anchors: Any) -> Any:
        return loss_of(own, lambda x: apply(anchors[0], x), lambda x: apply_dense(anchors[1], x), dtype)

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    for _ in range(STEPS):
        own_bar, _ = gradient(own, (anchor, anchor_dense))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        own = descended(own, own_bar)
    return own, block.parameters(), dense.parameters()


def trained_by_caller(own: Any, block: gw.Remote, dense: gw.Remote, dtype: str) -> tuple[Parameters, ...]:
    apply, of_block = gw.jax.functional(block)
    apply_dense, of_dense = gw.jax.functional(dense)

    def loss(all_: Any) -> Any:
        own, p, q = all_
        return loss_of(own, lambda x: apply(p, x), lambda x: apply_dense(q, x), dtype)

    step = jax.jit(lambda all_: descended(all_, jax.grad(loss)(all_)))
    all_ = (own, of_block, of_dense)
    for _ in range(STEPS):
        all_ = step(all_)
    unchanged = block.parameters()
    for name, value in of_block.items():
        np.testing.assert_array_equal(unchanged[name], value)  # the worker's own are as they were
    return all_


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("trained", [trained_by_workers, trained_by_caller])
def test_every_parameter_is_that_of_the_local_model(
    workers: tuple[gw.Worker, gw.Worker], trained: Callable[..., Any], dtype: str
) -> None:
    own = ends(dtype)
    with jax.enable_x64(dtype == "float64"):
        block = workers[0].module("torch_block:make_block", dtype).train()
        dense = workers[1].module("keras_block:make_block", dtype)
        wanted = trained_locally(own, block.parameters(), dense.parameters())
        found = trained({k: jnp.asarray(v) for k, v in own.items()}, block, dense, dtype)
        assert block.buffers()["1.num_batches_tracked"] == STEPS
        for part, expected in zip(found, wanted, strict=True):
            assert part.keys() == expected.keys()
            for name, value in expected.items():
                assert part[name].dtype == dtype
                np.testing.assert_allclose(
                    part[name], value, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], err_msg=name
                )
