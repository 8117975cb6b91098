"""TensorFlow tensors: eager and symbolic ones, `tf.Variable`, `keras.Variable`, `tf.IndexedSlices`.

TensorFlow never writes to a buffer that somebody else holds (variables copy on write), so an exported view
stays as it was. The other way round, it aliases by DLPack only what is dense and aligned, and **aborts the
process** where an aliased buffer is not aligned as its kernels want: everything else is copied. So is all of it where
numpy's own end of DLPack would crash the process (before 1.24).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BOOL, BY_NAME, DType
from gradwire_wire.errors import DtypeError, UnsupportedTensorError
from gradwire_wire.structures import on_stand_in

__all__ = ["NAME", "adopt", "aval", "export", "is_tensor", "tf_dtype"]

NAME = "tensorflow"

# What Eigen asks for in the widest build (AVX-512). The kernels check it with an abort, not with an error.
ALIGNMENT = 64

# TensorFlow lets go of a tensor's memory without the interpreter's lock. numpy before 1.24 does not take it to let go of
# its array (numpy#22507), and what lent the memory has a finalizer in Python.
_NUMPY_TAKES_THE_LOCK = tuple(map(int, np.__version__.split(".")[:2])) >= (1, 24)

_from_dlpack = tf.experimental.dlpack.from_dlpack
_REFUSED = {
    "SparseTensor": "a tf.SparseTensor: use tf.sparse.to_dense, or send its indices and values",
    "RaggedTensor": "a tf.RaggedTensor: use .to_tensor(), or send its values and row splits",
}


def is_tensor(x: Any) -> bool:
    """See `TensorFamily`; sparse and ragged ones count, and are refused by name where they would be sent."""
    return tf.is_tensor(x)


def export(x: Any) -> Carrier:
    """See `TensorFamily`. A read-only view of the tensor's own memory, or of its copy from another device."""
    dtype = _dtype_of(x)
    if isinstance(x, tf.IndexedSlices) or not hasattr(x, "_numpy"):
        x = tf.convert_to_tensor(x)
    if not hasattr(x, "_numpy"):
        raise UnsupportedTensorError(
            f"a symbolic TensorFlow tensor ({x.name!r}, inside a tf.function or a Keras graph) has no values "
            "yet; call the remote function with it, instead of converting it"
        )
    if dtype.carrier == dtype.name:
        return Carrier(np.asarray(x), dtype)
    array = np.asarray(x._numpy()).view(dtype.carrier)  # (np.asarray(x) fails where it is 0-d)
    array.flags.writeable = False
    return Carrier(array, dtype)


def aval(x: Any) -> Aval:
    """See `TensorFamily`. A symbolic tensor must have its whole shape."""
    dtype = _dtype_of(x)
    shape = x.shape
    if isinstance(shape, tf.TensorShape) and not shape.is_fully_defined():
        raise UnsupportedTensorError(
            f"a symbolic tensor of shape {shape} has no size yet; give the tf.function an input_signature, "
            "or the tensor a shape (set_shape)"
        )
    return Aval(tuple(int(n) for n in shape), dtype)


def adopt(carrier: Carrier) -> Any:
    """See `TensorFamily`. Raises DtypeError for a float8 kind that this TensorFlow does not have."""
    array, dtype, _ = carrier
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if dtype == BOOL:
        array = _clean_bool(array)
    if dtype.bits == 8 and dtype.carrier != dtype.name:
        return tf.constant(array.view(tf_dtype(dtype).as_numpy_dtype))  # tf.bitcast has no float8
    tensor = _alias(array)
    if tensor is None:
        tensor = tf.constant(array)
    return tensor if dtype.carrier == dtype.name else tf.bitcast(tensor, tf_dtype(dtype))


def _alias(array: np.ndarray) -> Any:
    """A tensor over the array's memory, which it keeps alive; None where TensorFlow cannot have one."""
    flags = array.flags
    if not (_NUMPY_TAKES_THE_LOCK and flags.c_contiguous and flags.writeable) or array.size == 0:
        return None  # (numpy exports no read-only array as the DLPack kind that TensorFlow reads)
    if array.__array_interface__["data"][0] % ALIGNMENT:
        return None
    try:
        return _from_dlpack(array.__dlpack__())
    except (AttributeError, BufferError, TypeError, tf.errors.OpError):
        return None  # an older numpy or TensorFlow that has no DLPack for this dtype


def _clean_bool(array: np.ndarray) -> np.ndarray:
    """Bytes other than 0 and 1 mean True, and must not reach kernels that count or compare them."""
    raw = array.view(np.uint8)
    return raw != 0 if raw.size and raw.max() > 1 else array


def _dtype_of(x: Any) -> DType:
    kind = _REFUSED.get(type(x).__name__)
    if kind is None:
        dtype = getattr(x, "dtype", None)
        name = dtype if isinstance(dtype, str) else getattr(dtype, "name", type(x).__name__)
        found = BY_NAME.get(name)
        if found is not None:
            return found
        kind = f"a TensorFlow tensor of dtype {name}: convert it (tf.cast, tf.strings.to_number, ...)"
    raise UnsupportedTensorError(f"cannot send {kind}")


def tf_dtype(dtype: DType) -> Any:
    """TensorFlow's own; DtypeError where this version has none."""
    try:
        return tf.as_dtype(dtype.name)
    except TypeError:
        raise DtypeError(
            f"TensorFlow {tf.__version__} has no {dtype.name}; convert the tensor before the call, to bfloat16 or float32"
        ) from None


def _register(cls: Any) -> None:
    """TensorFlow walks what stands for a dataclass, by the methods that it asks for. (A mapping it walks anyway.)"""
    cls.__tf_flatten__ = lambda x: (None, cls.parts(x)[0])
    cls.__tf_unflatten__ = classmethod(lambda cls, _, values: cls.of(values, None))


on_stand_in(_register)
