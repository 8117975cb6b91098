"""A JAX model as a `torch.nn.Module`, trained by torch.optim.SGD. This program has torch; the worker has JAX."""

from __future__ import annotations

import argparse
import pathlib

import torch

import gradwire as gw

HERE = pathlib.Path(__file__).resolve().parent


def data(n: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Points (n, 4) in two clouds, and which (n,)."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 2
    return torch.randn((n, 4), generator=generator) + 1.5 * (2 * y[:, None] - 1), y


def train(net: torch.nn.Module, steps: int) -> list[float]:
    """The loss at each step."""
    x, y = data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--python", default=str(HERE.parent.parent / ".envs/jax/bin/python"))
    chosen = options.parse_args()
    with gw.connect() as bridge:
        worker = bridge.worker("jax", python=chosen.python, path=[HERE])
        net = gw.torch.Module(worker.module("models_jax:make_sequential"))
        losses = train(net.train(), 60)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        x, _ = data()
        assert (net(x) != net(x)).any(), "dropout's masks differ between training calls"
        assert (net.eval()(x) == net(x)).all(), "and there are none in evaluation"
        x.requires_grad_()
        (x_bar,) = torch.autograd.grad(net(x).sum(), x)
        print(f"gradient of the input: {tuple(x_bar.shape)}; parameters: {list(net.state_dict())}")


if __name__ == "__main__":
    main()
