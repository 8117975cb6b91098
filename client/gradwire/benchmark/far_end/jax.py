"""The default targets in JAX; see numpy.py."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import jax
import numpy as np


def identity(x: Any) -> Any:
    """See numpy.py."""
    return x


def make_mlp() -> Callable[[Any], Any]:
    """See numpy.py."""
    rng = np.random.default_rng(2)
    k1 = jax.numpy.asarray(rng.normal(size=(64, 128)) / 8, dtype="float32")
    k2 = jax.numpy.asarray(rng.normal(size=(128, 32)) / 11, dtype="float32")
    return lambda x: jax.numpy.maximum(x @ k1, 0) @ k2


def compiled(target: Callable[..., Any]) -> Callable[..., Any]:
    """By jit."""
    program = jax.jit(target)
    return lambda *args: jax.block_until_ready(program(*args))


def tensors(arrays: Sequence[np.ndarray]) -> list[Any]:
    """See numpy.py."""
    return [jax.numpy.asarray(x) for x in arrays]


def to_array(tensor: Any) -> np.ndarray:
    """See numpy.py."""
    return np.asarray(tensor)
