"""A tensor of any framework as numpy memory: what every conversion meets in the middle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradwire_wire.dtypes import DType

__all__ = ["Aval", "Carrier"]


class Carrier(NamedTuple):
    """Memory plus its element type.

    array: numpy array of ``dtype.carrier``, any strides. A view or a copy, as its maker says.
    dtype: what the bits mean.
    owned: nobody else will ever write this memory while the array lives. False for memory passed
        by reference (``bridge.empty``): who keeps such a carrier past the call copies it first.
    """

    array: np.ndarray
    dtype: DType
    owned: bool = True


class Aval(NamedTuple):
    """Abstract value: shape and element type of a tensor that is not there (yet)."""

    shape: tuple[int, ...]
    dtype: DType
