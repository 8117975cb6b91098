"""numpy scalars as keys of dicts, as `numpy.unique` gives them, where numpy scalars are tensors otherwise: a key is no tensor."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from gradwire_wire.structures.format import Leaf
from gradwire_wire.structures.reading import unpack
from gradwire_wire.structures.values import children, is_record

__all__ = ["Key", "has_leaf_keys", "with_plain_keys"]


class Key:
    """Stands for a numpy scalar that is a key."""

    __slots__ = ("scalar",)

    def __init__(self, scalar: np.generic) -> None:
        self.scalar = scalar


@lru_cache(maxsize=256)
def has_leaf_keys(structure: bytes) -> bool:
    """Whether a leaf stands where a key of a dict is."""
    trees = [unpack(structure, Leaf)]
    while trees:
        tree = trees.pop()
        if isinstance(tree, dict) and any(map(_holds_leaf, tree)):
            return True
        trees.extend(children(tree).values())
    return False


def _holds_leaf(key: Any) -> bool:
    return any(map(_holds_leaf, key)) if isinstance(key, tuple) else isinstance(key, Leaf)


def with_plain_keys(tree: Any) -> Any:
    """The tree with a `Key` for each scalar in a key; what is in dataclasses stays."""
    if is_record(tree):
        return tree
    if isinstance(tree, dict):
        return type(tree)((_plain_key(key), with_plain_keys(value)) for key, value in tree.items())
    if isinstance(tree, list):
        return [with_plain_keys(item) for item in tree]
    if isinstance(tree, tuple):
        return tuple.__new__(type(tree), map(with_plain_keys, tree))
    return tree


def _plain_key(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple.__new__(type(key), map(_plain_key, key))
    return Key(key) if isinstance(key, np.generic) else key
