"""The default targets in numpy, and the few functions that `measure` needs of a framework: each file here has them."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np

WIDTHS = (64, 128, 32)


def identity(x: Any) -> Any:
    """The least a function can do."""
    return x


def mlp_weights() -> list[np.ndarray]:
    """Kernel (in, out) and bias (out,) of each layer of 64→128→32."""
    rng, made = np.random.default_rng(2), []
    for n, m in zip(WIDTHS, WIDTHS[1:]):
        made += [(rng.normal(size=(n, m)) / n**0.5).astype(np.float32), np.zeros(m, np.float32)]
    return made


def make_mlp() -> Callable[[Any], Any]:
    """The perceptron 64→128→32; called with (batch, 64) it gives (batch, 32)."""
    k1, b1, k2, b2 = mlp_weights()
    return lambda x: np.maximum(x @ k1 + b1, 0) @ k2 + b2


def compiled(target: Callable[..., Any]) -> Callable[..., Any]:
    """The target as its framework calls it fast. Returns when the result is there."""
    return target


def tensors(arrays: Sequence[np.ndarray]) -> list[Any]:
    """The arrays as the framework's tensors."""
    return list(arrays)


def to_array(tensor: Any) -> np.ndarray:
    """A tensor as an array."""
    return np.asarray(tensor)
