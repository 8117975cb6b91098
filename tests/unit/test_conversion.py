"""Conversion inside one process: same values, same dtype, the same memory where the layout allows."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradwire as gw

Point = namedtuple("Point", "x y")
CONVERT = {"jax": gw.to_jax, "torch": gw.to_torch, "tf": gw.to_tf, "numpy": gw.to_numpy}
KINDS = {"jax": jnp.ndarray, "torch": torch.Tensor, "tf": tf.Tensor, "numpy": np.ndarray}
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16", "float32", "complex64"]


def address(x: Any) -> int:
    """Of the first element."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, np.ndarray):
        return x.__array_interface__["data"][0]
    return (
        x.unsafe_buffer_pointer()
        if isinstance(x, jnp.ndarray)
        else np.asarray(memoryview(x)).__array_interface__["data"][0]
    )


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 128."""
    raw = np.zeros(values.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    made = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    made[...] = values
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", CONVERT)
@pytest.mark.parametrize("source", CONVERT)
def test_every_pair_keeps_values_and_dtype(source: str, to: str, dtype: str) -> None:
    values = jnp.asarray(np.arange(-6, 6).reshape(3, 4) % 5, dtype)
    x = CONVERT[source](values)
    y = CONVERT[to](x)
    assert isinstance(x, KINDS[source]) and isinstance(y, KINDS[to])
    assert gw.to_numpy(y).dtype == np.asarray(values).dtype
    np.testing.assert_array_equal(gw.to_numpy(y), np.asarray(values))


def test_the_same_memory_where_the_layout_allows() -> None:
    x = aligned(np.random.default_rng(0).normal(size=(300, 400)).astype(np.float32))
    there = {name: convert(x) for name, convert in CONVERT.items()}
    assert {name: address(y) == address(x) for name, y in there.items() if name != "tf"} == {
        "jax": True,
        "torch": True,
        "numpy": True,
    }
    for name, y in there.items():
        assert address(gw.to_numpy(y)) == address(y), name
    t = torch.from_numpy(x)
    assert address(gw.to_torch(t.T)) == address(t) and gw.to_torch(t.T).stride() == (1, 400)
    assert address(gw.to_numpy(t)) == t.data_ptr() and address(gw.to_jax(t)) == t.data_ptr()


def test_trees_and_gradients() -> None:
    w = torch.ones(3, requires_grad=True)
    tree = OrderedDict(a=[w, Point(np.zeros(2, np.float32), None)], b=(1, "s", 2.5))
    out = gw.to_jax(tree)
    assert type(out) is OrderedDict and type(out["a"][1]) is Point and out["b"] == (1, "s", 2.5)
    assert isinstance(out["a"][0], jnp.ndarray) and isinstance(out["a"][1].x, jnp.ndarray)
    assert not gw.to_torch(w).requires_grad and w.requires_grad


def test_refusals() -> None:
    with pytest.raises(gw.DtypeError, match="x64"):
        gw.to_jax(np.ones(3))
    with pytest.raises(gw.UnsupportedTensorError):
        gw.to_numpy(torch.ones(3, 3).to_sparse())
    with pytest.raises(gw.UnsupportedTensorError):
        gw.to_torch({1, 2})
