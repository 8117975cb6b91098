"""Conversion inside one process: ``gw.to_jax``, ``gw.to_torch``, ``gw.to_tf``, ``gw.to_numpy``, over trees."""

from __future__ import annotations

from typing import Any

from gradwire.families import family_of, is_leaf, tensors_named
from gradwire_wire.structures import fill, flatten

__all__ = ["to_jax", "to_numpy", "to_tf", "to_torch"]


def to_jax(tree: Any) -> Any:
    """The tree with every tensor of any framework as a `jax.Array`.

    The same memory where JAX can take it (aligned to 64 bytes, dense), else a copy; JAX arrays are passed
    through as they are. Dtypes are kept: 64 bits without x64 are a DtypeError. Memory that is shared must not
    be written afterwards, since JAX takes its arrays for immutable.
    """
    return _converted(tree, "jax")


def to_torch(tree: Any) -> Any:
    """The tree with every tensor as a `torch.Tensor`, of the same memory where its layout allows; detached.

    torch tensors are detached too. Memory that JAX owns, or that numpy shows as read-only, is shared as well: write to a clone.
    """
    return _converted(tree, "torch")


def to_tf(tree: Any) -> Any:
    """The tree with every tensor as a `tf.Tensor`: the same memory where it is dense and aligned, else a copy."""
    return _converted(tree, "tensorflow")


def to_numpy(tree: Any) -> Any:
    """The tree with every tensor as a numpy array of the same memory; bfloat16 and float8 by ml_dtypes."""
    return _converted(tree, "numpy")


def _converted(tree: Any, family: str) -> Any:
    structure, leaves = flatten(tree, is_leaf, "the tree")
    adopt = tensors_named(family).adopt
    return fill(structure, [_as_family(x, family, adopt) for x in leaves])


def _as_family(x: Any, family: str, adopt: Any) -> Any:
    own = family_of(x)
    if own == family == "jax":
        return x
    return adopt(tensors_named(own).export(x))
