"""numpy's arrays. See `gradwire_wire.tensors.TensorFamily` for what each function promises.

bfloat16 and the float8 kinds are arrays of the package ml_dtypes, which is imported when such a
tensor arrives. Numpy scalars are no tensors: they travel inside the argument tree.
"""

from __future__ import annotations

from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from gradwire_wire.carriers import Aval, Carrier, Columns
from gradwire_wire.dtypes import BOOL, BY_NAME, DType, dtype_named
from gradwire_wire.errors import DtypeError, UnsupportedTensorError

__all__ = ["NAME", "adopt", "adopt_all", "adopter", "aval", "export", "export_all", "is_tensor"]

NAME = "numpy"


class _Kind(NamedTuple):
    """What becomes of arrays of one numpy dtype: first the native byte order, then the carrier's dtype."""

    wire: DType
    native: np.dtype
    carrier: np.dtype


_PLAIN = {
    np.dtype(name): _Kind(wire, np.dtype(name), np.dtype(name))
    for name, wire in BY_NAME.items()
    if wire.carrier == name
}
_UINT8 = np.dtype("uint8")
MANY = 2
_AS_THEY_ARE = {id(kind.carrier): kind.wire for kind in _PLAIN.values() if kind.wire is not BOOL}
"""By the identity of numpy's own dtypes (which `_PLAIN` keeps): arrays of these need nothing done to them."""
_SAME_HERE = {wire for wire in BY_NAME.values() if wire.carrier == wire.name}
_ARRAYS_ALONE, _dtype_of = {np.ndarray}, attrgetter("dtype")
_carrier = partial(tuple.__new__, Carrier)


def is_tensor(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def export(x: Any) -> Carrier:
    wire = _AS_THEY_ARE.get(id(x.dtype))
    if wire is not None and type(x) is np.ndarray:
        return _carrier((x, wire, True))
    kind = _PLAIN.get(x.dtype) or _other_kind(x.dtype)
    array = x if type(x) is np.ndarray else _plain(x)
    if array.dtype is not kind.carrier:
        if array.dtype != kind.native or not array.dtype.isnative:
            array = array.astype(kind.native)
        array = array.view(kind.carrier)
    if kind.wire is BOOL and array.size and array.view(_UINT8).max() > 1:
        array = array.view(_UINT8) != 0  # numpy takes any byte but 0 for True; others take 1 alone
    return Carrier(array, kind.wire)


def export_all(xs: Sequence[Any]) -> Sequence[Carrier]:
    """`export` of each, for trees with many leaves: where all are plain arrays it costs a tenth of it."""
    if len(xs) == 1:
        return [export(xs[0])]
    if len(xs) >= MANY and set(map(type, xs)) == _ARRAYS_ALONE:
        wires = list(map(_AS_THEY_ARE.get, map(id, map(_dtype_of, xs))))
        if None not in wires:
            return Columns(xs, wires)  # type: ignore[arg-type]
    return [export(x) for x in xs]


@lru_cache(maxsize=256)
def _other_kind(dtype: np.dtype) -> _Kind:
    wire = None if dtype.names else dtype_named(dtype.name)
    if wire is None:
        raise UnsupportedTensorError(f"a numpy array of dtype {dtype} cannot be sent. {_remedy(dtype)}")
    return _Kind(wire, dtype.newbyteorder("="), np.dtype(wire.carrier))


def _remedy(dtype: np.dtype) -> str:
    if dtype.names == ("float0",):
        return "It is what JAX has for the gradient of an integer, and has no values"
    if dtype.names:
        return "It is structured: send its fields as a dict of arrays"
    if dtype.kind in "mM":
        return "Send x.astype('int64') and say the unit in an argument of its own"
    if dtype.kind in "SUT":
        return "Send a list of its strings, x.tolist(), or numbers that stand for them"
    if dtype.kind == "O":
        return "It holds Python objects: convert it, say with x.astype('float64'), or send a list: of arrays, or of text (x.tolist())"
    if dtype.kind in "fc":
        return (
            "Convert it to a type every framework has, say with x.astype('float64') or x.astype('complex128')"
        )
    return f"Convert it to one of {', '.join(BY_NAME)}"


def _plain(x: np.ndarray) -> np.ndarray:
    """The array without its class, where the class is about memory (memmap) and not about meaning."""
    kind = type(x)
    if isinstance(x, np.ma.MaskedArray):
        raise UnsupportedTensorError(
            "a masked array cannot be sent: its masked values would be taken for real ones. "
            "Send x.filled(value), or x.data and x.mask as two arguments"
        )
    if isinstance(x, np.matrix) or kind.__array_ufunc__ is not np.ndarray.__array_ufunc__:
        raise UnsupportedTensorError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent: it computes in its own way (units, matrix product), "
            "which would be lost. Send numpy.asarray(x) if the plain numbers are what you mean"
        )
    return x.view(np.ndarray)


def adopt(carrier: Carrier) -> Any:
    if carrier.dtype.carrier == carrier.dtype.name:
        return carrier.array
    return carrier.array.view(_extension(carrier.dtype))


def adopt_all(carriers: Sequence[Carrier | None]) -> list[Any]:
    """`adopt` of each, None where there is none."""
    if type(carriers) is Columns and _SAME_HERE.issuperset(carriers.dtypes):
        return list(carriers.arrays)
    return [None if carrier is None else adopt(carrier) for carrier in carriers]


def adopter(dtype: DType) -> Callable[[np.ndarray], Any] | None:
    """What `adopt` does to arrays that are fresh copies in C order: one function for all of them. None: nothing shorter."""
    return _same if dtype.carrier == dtype.name else None


def _same(array: np.ndarray) -> np.ndarray:
    return array


@lru_cache(maxsize=None)
def _extension(dtype: DType) -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        raise DtypeError(
            f"a {dtype.name} tensor as a numpy array needs the package ml_dtypes: pip install ml_dtypes. "
            "Or convert it to float32 where it comes from"
        ) from error
    found = getattr(ml_dtypes, dtype.name, None)
    if found is None:
        raise DtypeError(
            f"ml_dtypes {ml_dtypes.__version__} has no {dtype.name}. A newer one has: pip install -U ml_dtypes"
        )
    return np.dtype(found)


def aval(x: Any) -> Aval:
    kind = _PLAIN.get(x.dtype) or _other_kind(x.dtype)
    if type(x) is not np.ndarray:
        _plain(x)
    return Aval(x.shape, kind.wire)
