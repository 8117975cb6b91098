"""JAX arrays as wire tensors: see `gradwire_wire.tensors.TensorFamily`.

JAX on CPU aliases numpy memory that lies at a multiple of 64 bytes, here as wanted: the array keeps the
carrier, and with it the lease. What lies elsewhere, or is strided, JAX copies.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import ml_dtypes
import numpy as np

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BOOL, DType, dtype_named
from gradwire_wire.errors import DtypeError, UnsupportedTensorError
from gradwire_wire.structures import on_stand_in, on_struct_sequence

__all__ = [
    "NAME",
    "adopt",
    "aval",
    "element_type",
    "export",
    "is_tensor",
    "is_weak",
    "numpy_view",
    "weakened",
]

NAME = "jax"
_NUMBERS = {"i": int, "f": float, "c": complex}
try:  # there is no public name for it
    from jax._src.lax.lax import _convert_element_type as _convert
except ImportError:
    _convert = None


def is_tensor(x: Any) -> bool:
    """Whether x is a `jax.Array`: tracers are, and so are key arrays, which `export` refuses. Or one of numpy's that JAX has typed.

    Where it differentiates with respect to a numpy array, JAX (of 0.8 and later) has such an array of its own for its value: `stop_gradient` gives it, and
    the rules of a `custom_vjp` are given it.
    """
    return isinstance(x, jax.Array) or (
        isinstance(x, np.ndarray) and type(x).__module__.partition(".")[0] == NAME
    )


def export(x: Any) -> Carrier:
    """The array's memory, read-only and not copied (from an accelerator or several devices: a copy).

    Waits until the values are there.
    """
    if isinstance(x, jax.core.Tracer):
        raise UnsupportedTensorError(
            f"{x} is a value that JAX is still tracing: it has no bytes to send. Make the call outside of jit, "
            "grad and vmap, or through a gradwire proxy, which JAX can trace"
        )
    dtype, carrier = _kind(x.dtype)
    array = np.asarray(x)
    return Carrier(array if carrier is None else array.view(carrier), dtype)


def adopt(carrier: Carrier) -> Any:
    """The carrier as an uncommitted array on the default device: the same memory if it is aligned and dense."""
    return jax.device_put(numpy_view(carrier))


def numpy_view(carrier: Carrier) -> np.ndarray:
    """The carrier as a numpy array that JAX can take as it is, of the same memory (bool: a copy).

    Raises DtypeError where JAX would narrow it. A bool of any nonzero byte is True, for XLA computes with the byte.
    """
    array, dtype, _ = carrier
    element = element_type(dtype)
    if dtype == BOOL:
        return np.asarray(np.not_equal(array.view(np.uint8), 0))
    return array if array.dtype == element else array.view(element)


def aval(x: Any) -> Aval:
    """Shape and dtype of an array, a tracer or a `jax.ShapeDtypeStruct`."""
    return Aval(tuple(x.shape), _wire_dtype(x.dtype))


def is_weak(x: Any) -> bool:
    """Whether an array, a tracer or an abstract value stands for a Python number: of JAX's weak type."""
    return bool(getattr(getattr(x, "aval", x), "weak_type", False))


def weakened(x: Any) -> Any:
    """The same of weak type; as it is where Python's numbers are of another dtype here (x64), or JAX has no way to say so."""
    number = _NUMBERS.get(x.dtype.kind)
    if number is None or _convert is None or x.dtype != jax.dtypes.canonicalize_dtype(number):
        return x
    return _convert(x, weak_type=True)


def element_type(dtype: DType) -> np.dtype:
    """The numpy dtype under which JAX takes the bits as they are. Raises DtypeError where it would narrow them."""
    return _element_type(dtype, bool(jax.config.jax_enable_x64))


@lru_cache(maxsize=None)
def _wire_dtype(element: Any) -> DType:
    if jax.dtypes.issubdtype(element, jax.dtypes.prng_key):
        raise UnsupportedTensorError(
            f"a PRNG key array ({element}) cannot be sent: send jax.random.key_data(key), "
            "and make it a key again on the other side by jax.random.wrap_key_data"
        )
    if element == jax.dtypes.float0:
        raise UnsupportedTensorError("a float0 array has no values: it is the zero tangent of an integer")
    dtype = dtype_named(element.name)
    if dtype is None:
        raise UnsupportedTensorError(
            f"a JAX array of dtype {element.name} cannot be sent: convert it by .astype(...)"
        )
    return dtype


@lru_cache(maxsize=None)
def _kind(element: Any) -> tuple[DType, np.dtype | None]:
    """An array's type on the wire, and its carrier's where that is another (to ask a dtype for its name takes 5 µs)."""
    dtype = _wire_dtype(element)
    return dtype, None if element.name == dtype.carrier else np.dtype(dtype.carrier)


@lru_cache(maxsize=None)
def _element_type(dtype: DType, x64: bool) -> np.dtype:
    element = np.dtype(getattr(ml_dtypes, dtype.name, None) or dtype.name)
    kept = jax.dtypes.canonicalize_dtype(element)
    if kept != element:
        raise DtypeError(
            f"this JAX process has 64-bit types switched off and would narrow {dtype.name} to {kept.name}. "
            "Convert it yourself, or switch them on: where JAX is the worker by bridge.worker('jax', x64=True), "
            "where it is the caller by jax.config.update('jax_enable_x64', True)"
        )
    try:
        jax.device_put(np.zeros(0, element))
    except TypeError as error:
        raise UnsupportedTensorError(f"jax {jax.__version__} has no {dtype.name} arrays: {error}") from error
    return element


def _register(cls: Any) -> None:
    """JAX walks what stands for a dataclass as it does a namedtuple."""
    jax.tree_util.register_pytree_node(cls, cls.parts, lambda keys, values: cls.of(values, keys))


on_stand_in(_register)


def _register_sequence(cls: Any) -> None:
    """So does it a struct sequence, which it would take for a leaf of its own: what ``torch.max`` gives, where torch is loaded here too."""
    try:
        jax.tree_util.register_pytree_node(cls, lambda x: (tuple(x), None), lambda _, values: cls(values))
    except ValueError:  # the program has told JAX itself
        pass


on_struct_sequence(_register_sequence)
