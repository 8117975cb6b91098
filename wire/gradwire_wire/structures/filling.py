"""Trees again, with leaves in the holes of their structure."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Sequence

from gradwire_wire.errors import ProtocolError
from gradwire_wire.structures.flattening import LONE_LEAF, POSITIONAL
from gradwire_wire.structures.format import MAX_CACHED, Leaf
from gradwire_wire.structures.reading import leaf_count, unpack
from gradwire_wire.wide_trees import Filling, filling_of

__all__ = ["fill", "fill_call", "positional_count"]


def positional_count(structure: bytes) -> int | None:
    """How many tensors a call has as positional arguments and nothing else; None for other calls."""
    return POSITIONAL.get(structure)


def fill(structure: bytes, leaves: Sequence[Any]) -> Any:
    """The tree again, with ``leaves`` in its holes. Containers are new on each call."""
    if structure == LONE_LEAF and len(leaves) == 1:
        return leaves[0]
    if POSITIONAL.get(structure) == len(leaves):
        return [list(leaves), {}]
    count = leaf_count(structure)
    if count != len(leaves):
        raise ProtocolError(f"{len(leaves)} leaves for a structure with {count} holes")
    filling = _filling(structure) if len(structure) <= MAX_CACHED else None
    return unpack(structure, leaves.__getitem__) if filling is None else filling(leaves)


@lru_cache(maxsize=256)
def _filling(structure: bytes) -> Filling | None:
    """Of a structure that has been checked whole."""
    return filling_of(unpack(structure, Leaf), Leaf)


def fill_call(structure: bytes, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """`fill` for the structure of a call: its positional arguments and its keywords."""
    call = fill(structure, leaves)
    if type(call) is list and len(call) == 2 and type(call[0]) is list and type(call[1]) is dict:
        args, kwargs = call
        if all(type(name) is str for name in kwargs):
            return args, kwargs
    raise ProtocolError("a call must be [positional arguments, keywords]")
