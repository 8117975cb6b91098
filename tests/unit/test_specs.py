"""Tensors that are not there: whatever has a shape and a dtype, of whichever framework, says what `Remote.spec` asks."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import gradwire as gw
from gradwire.background import Background
from gradwire.remote import Remote
from gradwire.specs import is_described, spec_result
from tests.doubles.torch_handle import TorchHandle


@pytest.fixture
def double() -> Iterator[Remote]:
    handle = TorchHandle(lambda x, scale=None: x + x)
    yield Remote(handle, Background("double"))  # type: ignore[arg-type]
    handle.close()


def described(dtype: Any, shape: Any = (3, 2)) -> Any:
    return SimpleNamespace(shape=shape, dtype=dtype)


# What stands for a float32 of (3, 2), by the framework that it is of.
STANDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "ours": ("numpy", lambda _: gw.ShapeDtype((3, 2), "float32")),
    "ours, numpy's dtype": ("numpy", lambda np: gw.ShapeDtype((3, 2), np.float32)),
    "ours, torch's dtype": ("torch", lambda torch: gw.ShapeDtype((3, 2), torch.float32)),
    "numpy": ("numpy", lambda np: np.zeros((3, 2), np.float32)),
    "big-endian": ("numpy", lambda np: described(np.dtype(">f4"))),
    "torch": ("torch", lambda torch: torch.zeros(3, 2)),
    "torch, meta": ("torch", lambda torch: torch.empty(3, 2, device="meta")),
    "torch's size and dtype": ("torch", lambda torch: described(torch.float32, torch.Size([3, 2]))),
    "jax": ("jax", lambda jax: jax.ShapeDtypeStruct((3, 2), np.float32)),
    "jax, its type": ("jax", lambda jax: described(jax.numpy.float32)),
    "tensorflow": ("tensorflow", lambda tf: tf.TensorSpec([3, 2])),
    "keras": ("keras", lambda keras: keras.KerasTensor((3, 2), "float32")),
}


@pytest.mark.parametrize("what", STANDS)
def test_whatever_has_a_shape_and_a_dtype_is_taken(double: Remote, what: str) -> None:
    framework, make = STANDS[what]
    x = make(pytest.importorskip(framework))
    assert double.spec(x, scale=3) == gw.ShapeDtype((3, 2), "float32")
    assert spec_result([x]).avals == spec_result([gw.ShapeDtype((3, 2), "float32")]).avals
    assert double.options(out_spec=x) is not None


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16, "bfloat16"]
)
def test_a_dtype_that_numpy_has_not_is_the_same_by_each_name(double: Remote, dtype: Any) -> None:
    assert double.spec(described(dtype)).dtype == "bfloat16"


@dataclass
class Settings:
    shape: tuple[int, ...]
    dtype: str


Meta = namedtuple("Meta", ["shape", "dtype"])


@pytest.mark.parametrize(
    "x",
    [
        Settings((2,), "float32"),
        Meta((2,), "float32"),
        np.float32(1),
        1.0,
        Settings,
        {"shape": 1, "dtype": 2},
    ],
)
def test_what_is_part_of_the_tree_itself_stands_for_no_tensor(x: Any) -> None:
    assert not is_described(x)


BAD: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "text": ("numpy", lambda np: described(np.dtype("U3")), "not a dtype that can be sent; there are bool"),
    "nothing": ("numpy", lambda _: described(None), "None is not a dtype that can be sent"),
    "another name": ("numpy", lambda _: described("float33"), "'float33' is not a dtype"),
    "quantised": ("torch", lambda torch: described(torch.qint8), "torch.qint8 is not a dtype"),
    "strings": ("tensorflow", lambda tf: tf.TensorSpec([3], tf.string), "tf.string is not a dtype"),
    "unknown size": ("tensorflow", lambda tf: tf.TensorSpec([None, 3]), "a shape is a natural number"),
    "unknown rank": ("tensorflow", lambda tf: tf.TensorSpec(None), "a shape is a natural number"),
    "batch": ("keras", lambda keras: keras.Input((3,)), "a shape is a natural number"),
    "negative": ("numpy", lambda _: described("float32", (-1,)), "a shape is a natural number"),
    "a key": ("jax", lambda jax: described(jax.eval_shape(jax.random.key, 0).dtype), "is not a dtype"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_sent_is_refused_with_the_arguments_name(double: Remote, what: str) -> None:
    framework, make, says = BAD[what]
    x = make(pytest.importorskip(framework))
    with pytest.raises(gw.UsageError, match=rf"^args\[1\]\['x'\]: .*{says}"):
        double.spec(np.zeros(2), {"x": x})
    with pytest.raises(gw.UsageError, match=rf"^result\['x'\]: .*{says}"):
        double.options(out_spec={"x": x})
