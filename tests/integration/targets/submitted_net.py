"""A module whose result is its mode."""

from __future__ import annotations

import torch


class Net(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.0 * x.sum() + float(self.training)


def make() -> Net:
    return Net()
