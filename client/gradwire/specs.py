"""Tensors that are not there: shapes and dtypes, as users write them and as other frameworks have them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradwire.families import family_of, is_leaf, tensors_named
from gradwire.orders import checked_shape
from gradwire.site import SpecResult
from gradwire_wire.carriers import Aval
from gradwire_wire.dtypes import BY_NAME, DType, dtype_named
from gradwire_wire.errors import UsageError
from gradwire_wire.structures import flatten, leaf_paths

__all__ = ["ShapeDtype", "avals_of", "is_described", "spec_result"]


class ShapeDtype(NamedTuple):
    """Shape and dtype (by name) of a tensor that is not there: in `Remote.spec` and ``options(out_spec=...)``."""

    shape: tuple[int, ...]
    dtype: str


_OF_TREES = (tuple, int, float, complex, np.generic, type)
"""What is part of an argument tree itself, or nothing that could stand for a tensor, whatever attributes it has."""


def is_described(x: Any) -> bool:
    """Whether a value is a tensor, or has the shape and dtype of one: `ShapeDtype`, jax.ShapeDtypeStruct, tf.TensorSpec and the like."""
    if is_leaf(x) or isinstance(x, ShapeDtype):
        return True
    if isinstance(x, _OF_TREES) or dataclasses.is_dataclass(x):
        return False
    return hasattr(x, "shape") and hasattr(x, "dtype")


def avals_of(leaves: Sequence[Any], structure: bytes, argument_names: bool = True) -> tuple[Aval, ...]:
    """Shape and dtype of each. UsageError names the one that has none that could be sent."""
    found: list[Aval] = []
    try:
        for x in leaves:
            found.append(_aval_of(x))
    except UsageError as error:
        path = leaf_paths(structure, argument_names=argument_names)[len(found)]
        raise type(error)(f"{path}: {error}") from None
    return tuple(found)


def _aval_of(x: Any) -> Aval:
    family = family_of(x)
    if family:
        aval: Aval = tensors_named(family).aval(x)
        return aval
    dtype = _dtype_of(x.dtype)
    if dtype is None:
        raise UsageError(f"{x.dtype!r:.80} is not a dtype that can be sent; there are {', '.join(BY_NAME)}")
    return Aval(checked_shape(x.shape), dtype)


def _dtype_of(dtype: Any) -> DType | None:
    """The wire's dtype of that name, whichever framework's it is: each calls it as numpy does, behind a dot or not."""
    name = str(getattr(dtype, "name", dtype))
    found = dtype_named(name.rpartition(".")[2])
    if found is None and not isinstance(dtype, str | None):
        with contextlib.suppress(
            Exception
        ):  # what numpy raises for what it knows nothing of is not always a TypeError
            found = dtype_named(np.dtype(dtype).name)  # of a type, such as np.float32 and jnp.float32
    return found


def spec_result(tree: Any) -> SpecResult:
    """What ``options(out_spec=tree)`` says of the results."""
    structure, leaves = flatten(tree, is_described, "out_spec")
    return SpecResult(avals_of(leaves, structure, argument_names=False), structure)
