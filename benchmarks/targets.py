"""What the benchmarks call in their workers."""

from __future__ import annotations

import time

import numpy as np

_RESULT = np.arange(64 << 20, dtype=np.uint8)


def identity(x: np.ndarray) -> np.ndarray:
    """The least a function can do."""
    return x


def swap_64_mib(x: np.ndarray) -> np.ndarray:
    """Takes 64 MiB and gives other 64 MiB: one copy a direction cannot be avoided."""
    assert x[0] == x[-1]
    return _RESULT


def square(x: np.ndarray) -> np.ndarray:
    """With a derivative of its own."""
    return x * x


square.vjp = lambda x: (x * x, lambda y_bar: (2 * x * y_bar,))  # type: ignore[attr-defined]


def fails(x: np.ndarray) -> np.ndarray:
    """Raises."""
    raise ValueError("as it should")


def nap(x: np.ndarray, seconds: float) -> np.ndarray:
    """Sleeps in C."""
    time.sleep(seconds)
    return x
