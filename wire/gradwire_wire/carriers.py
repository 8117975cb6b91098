"""A tensor of any framework as numpy memory: what every conversion meets in the middle."""

from __future__ import annotations

from operator import attrgetter
from typing import Iterator, NamedTuple, Sequence, overload

import numpy as np

from gradwire_wire.dtypes import DType

__all__ = ["Aval", "Carrier", "Columns", "arrays_of", "plain_avals"]


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


_shape_of, _is_dense = attrgetter("shape"), attrgetter("flags.c_contiguous")
_ALL_CARRIERS = {Carrier}


class Columns(Sequence[Carrier]):
    """Carriers, owned, each of which is made when somebody looks at it: for trees with many leaves.

    arrays, dtypes: of all of them, in order.
    """

    __slots__ = ("arrays", "dtypes")

    def __init__(self, arrays: Sequence[np.ndarray], dtypes: Sequence[DType]) -> None:
        self.arrays, self.dtypes = arrays, dtypes if type(dtypes) is tuple else tuple(dtypes)

    def __len__(self) -> int:
        return len(self.arrays)

    @overload
    def __getitem__(self, i: int) -> Carrier: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Carrier]: ...
    def __getitem__(self, i: int | slice) -> Carrier | Sequence[Carrier]:
        if isinstance(i, slice):
            return Columns(self.arrays[i], self.dtypes[i])
        return Carrier(self.arrays[i], self.dtypes[i], True)

    def __iter__(self) -> Iterator[Carrier]:
        return map(Carrier, self.arrays, self.dtypes)


def arrays_of(carriers: Sequence[Carrier]) -> Sequence[np.ndarray]:
    """The array of each."""
    return carriers.arrays if type(carriers) is Columns else [carrier[0] for carrier in carriers]


def plain_avals(
    carriers: Sequence[Carrier | None],
) -> tuple[tuple[tuple[int, ...], ...], tuple[DType, ...]] | None:
    """All shapes and all dtypes. None where a carrier is missing, or an array is not C-contiguous."""
    if type(carriers) is Columns:
        arrays, dtypes = carriers.arrays, carriers.dtypes
    elif set(map(type, carriers)) == _ALL_CARRIERS:
        arrays, dtypes, _ = zip(*carriers)
    else:
        return None
    return (tuple(map(_shape_of, arrays)), dtypes) if all(map(_is_dense, arrays)) else None
