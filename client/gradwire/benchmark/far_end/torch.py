"""The default targets in torch; see numpy.py."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np
import torch


def identity(x: Any) -> Any:
    """See numpy.py."""
    return x


def make_mlp() -> torch.nn.Module:
    """See numpy.py."""
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)).eval()


def compiled(target: Callable[..., Any]) -> Callable[..., Any]:
    """Eager, without a tape: as a call that nobody differentiates."""

    def call(*args: Any) -> Any:
        with torch.no_grad():
            return target(*args)

    return call


def tensors(arrays: Sequence[np.ndarray]) -> list[Any]:
    """See numpy.py."""
    return [torch.from_numpy(x) for x in arrays]


def to_array(tensor: Any) -> np.ndarray:
    """See numpy.py."""
    return tensor.detach().cpu().numpy()
