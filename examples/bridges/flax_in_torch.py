"""A Flax classifier inside `torch.nn.Sequential`, behind a layer of torch's own, trained by torch.optim.Adam."""

from __future__ import annotations

import argparse
import pathlib

import torch

import gradwire as gw

HERE = pathlib.Path(__file__).resolve().parent


def data(n: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    """Points (n, 5) around three centres, and which (n,)."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    centres = 2 * torch.randn((3, 5), generator=generator)
    return centres[y] + torch.randn((n, 5), generator=generator), y


def make_model(classifier: gw.Remote) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), gw.torch.Module(classifier))


def train(model: torch.nn.Module, steps: int = 60) -> tuple[list[float], float]:
    """Losses, and accuracy at the end."""
    x, y = data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--python", default=str(HERE.parent.parent / ".envs/jax/bin/python"))
    chosen = options.parse_args()
    with gw.connect() as bridge:
        worker = bridge.worker("jax", python=chosen.python, path=[HERE])
        model = make_model(worker.module("models_jax:make_classifier"))
        losses, accuracy = train(model)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {accuracy:.3f}")
        print(f"all parameters in one state_dict: {', '.join(model.state_dict())}")


if __name__ == "__main__":
    main()
