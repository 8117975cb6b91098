"""Tensors of every family made from given bits, and read back as bits, by each framework's own means.

What the tests compare with must not come from the code they test: nothing here is gradwire's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorflow as tf
import torch

CALLERS = ("numpy", "torch", "jax", "tensorflow")
WORKERS = ("numpy", "torch", "tensorflow", "jax")

PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
INEXACT = ("float16", "float32", "float64", "complex64", "complex128")
SMALL = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3b11fnuz",
    "float8_e4m3",
    "float8_e3m4",
    "float8_e8m0fnu",
)
DTYPES = (*PLAIN, *INEXACT, *SMALL)


def numpy_dtype(name: str) -> np.dtype:
    """numpy's own, or that of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name) if name in SMALL else name)


def has(framework: str, name: str) -> bool:
    """Whether the framework has tensors of that type."""
    if framework == "torch":
        return hasattr(torch, name)
    if framework == "jax":
        return hasattr(jnp, name)
    if framework == "tensorflow":
        return hasattr(tf.dtypes, name) or hasattr(tf.dtypes.experimental, name)
    return True


@contextlib.contextmanager
def wide(family: str) -> Iterator[None]:
    """64-bit types where the family has to be told so."""
    with jax.enable_x64(True) if family == "jax" else contextlib.nullcontext():
        yield


def patterned(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """An array of that dtype with random bits, which are NaNs, infinities, subnormals among the rest."""
    dtype = numpy_dtype(name)
    count = int(np.prod(shape)) * dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 256, count, np.uint8)
    return bits.view(dtype).reshape(shape)


def every_small(name: str) -> np.ndarray:
    """All values that a type of 8 or 16 bits has: zeros of both signs, subnormals, infinities, every NaN."""
    dtype = numpy_dtype(name)
    return np.arange(1 << 8 * dtype.itemsize, dtype=f"uint{8 * dtype.itemsize}").view(dtype)


def as_family(family: str, x: np.ndarray) -> Any:
    """A numpy array as the family's tensor of the same bits and dtype; torch keeps the layout, others make it dense."""
    if family == "numpy":
        return x
    if family == "torch":
        if x.dtype.name in SMALL:
            return torch.from_numpy(x.view(f"int{8 * x.itemsize}")).view(getattr(torch, x.dtype.name))
        return torch.from_numpy(x)
    if family == "jax":
        return jax.device_put(x.copy())  # others compile a program for each shape and dtype
    return tf.constant(np.ascontiguousarray(x).reshape(x.shape))


def bits_of(family: str, x: Any) -> tuple[tuple[int, ...], str, bytes]:
    """Shape, dtype's name and bytes in C order of a tensor that must be of that family."""
    kind = {"numpy": np.ndarray, "torch": torch.Tensor, "jax": jax.Array, "tensorflow": tf.Tensor}[family]
    assert isinstance(x, kind), type(x)
    if family == "torch":
        name = str(x.dtype).removeprefix("torch.")
        x = x.detach().clone(memory_format=torch.contiguous_format)
        size = x.element_size()
        if name in SMALL or name == "bool":
            x = x.view(torch.int8 if size == 1 else torch.int16)
        return tuple(x.shape), name, x.numpy().tobytes()
    if family == "tensorflow":
        raw = x._numpy() if x.shape.rank == 0 else x.numpy()
        return tuple(x.shape), x.dtype.name, np.asarray(raw).tobytes()
    array = np.asarray(x)
    return array.shape, array.dtype.name, array.tobytes()


def assert_same_bits(family: str, x: Any, expected: np.ndarray) -> None:
    """The tensor is of that family and has the array's shape, dtype and every bit of it."""
    shape, name, raw = bits_of(family, x)
    assert (shape, name) == (expected.shape, expected.dtype.newbyteorder("=").name)
    assert raw == expected.astype(expected.dtype.newbyteorder("="), copy=False).tobytes()
