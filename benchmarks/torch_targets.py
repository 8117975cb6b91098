"""Modules that the benchmarks train in their torch workers."""

from __future__ import annotations

import torch


def mlp() -> torch.nn.Module:
    """The MLP of the design: 64→128→32."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))


def wide() -> torch.nn.Module:
    """10 M parameters in one layer."""
    torch.manual_seed(0)
    return torch.nn.Linear(3163, 3163, bias=False)
