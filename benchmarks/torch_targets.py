"""Modules that the benchmarks train in their torch workers."""

from __future__ import annotations

import torch


def mlp() -> torch.nn.Module:
    """The MLP of the design: 64→128→32."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))


class WithLoss(torch.nn.Module):
    """A module with the loss that it is trained by."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.net(x) - y).pow(2).mean()


def mlp_with_loss() -> torch.nn.Module:
    """The same MLP, whose result is its loss."""
    return WithLoss(mlp())


def wide() -> torch.nn.Module:
    """10 M parameters in one layer."""
    torch.manual_seed(0)
    return torch.nn.Linear(3163, 3163, bias=False)
