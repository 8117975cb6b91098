"""Arrays without gaps: what travels, or lies in a slot, of an array with strides."""

from __future__ import annotations

import numpy as np

__all__ = ["dense_bytes", "dense_strides"]


def dense_bytes(array: np.ndarray) -> tuple[bytes, tuple[int, ...] | None]:
    """The elements without gaps, with the axes in memory as the array has them; and the strides of that."""
    strides = dense_strides(array)
    if strides is None:
        return array.tobytes(), None
    data = bytearray(array.nbytes)
    steps = tuple(s * array.itemsize for s in strides)
    np.copyto(np.ndarray(array.shape, array.dtype, data, strides=steps), array)
    return bytes(data), strides


def dense_strides(array: np.ndarray) -> tuple[int, ...] | None:
    """Strides in elements of a dense copy that keeps the order of axes in memory; None for C order."""
    if array.flags.c_contiguous or any(n > 1 and s == 0 for n, s in zip(array.shape, array.strides)):
        return None
    order = sorted(range(array.ndim), key=lambda i: -abs(array.strides[i]) if array.shape[i] > 1 else 0)
    strides = [0] * array.ndim
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= array.shape[axis]
    dense = tuple(strides)
    return None if dense == _c_strides(array.shape) else dense


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    step, strides = 1, []
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
