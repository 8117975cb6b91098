"""Structures back into trees, whatever they hold; and how many holes they have."""

from __future__ import annotations

import struct
from collections import OrderedDict
from functools import lru_cache, partial
from typing import Any, Callable

import msgpack

from gradwire_wire.errors import ProtocolError, shown
from gradwire_wire.interruption import came_from_parsing
from gradwire_wire.structures.format import (
    COMPLEX,
    DATACLASS,
    INTEGER,
    LEAF,
    MAX_BYTES,
    MAX_CACHED,
    MAX_DEPTH,
    NAMEDTUPLE,
    ORDEREDDICT,
    SCALAR,
    TUPLE,
    WEAK,
    Leaf,
    check_length,
)
from gradwire_wire.structures.values import as_dataclass, as_namedtuple, children, unpack_scalar

__all__ = ["leaf_count", "unpack"]


def unpack(packed: bytes, leaf: Callable[[int], Any], depth: int = 0) -> Any:
    """The tree, with ``leaf(number)`` in each hole. ProtocolError where these bytes are not well formed."""
    check_length(packed)
    if depth > MAX_DEPTH:
        raise ProtocolError(f"it has more than {MAX_DEPTH} levels")
    read = msgpack.unpackb if depth < 4 else _unpack_on_heap
    try:
        return read(packed, ext_hook=partial(_extension, leaf, depth), strict_map_key=False, raw=False)
    except ProtocolError:
        raise
    except Exception as error:
        if not came_from_parsing(error):
            raise
        if isinstance(error, TypeError) and "unhashable" in str(error):
            raise ProtocolError(
                f"a dict in it has a tensor as a key ({error}): send it with plain numbers as keys"
            ) from error
        raise ProtocolError(f"a structure is not well formed: {type(error).__name__}: {error}") from error


def _unpack_on_heap(packed: bytes, **settings: Any) -> Any:
    """What unpackb does, with 40 KiB of working memory in an object instead of on the stack of this thread."""
    unpacker = msgpack.Unpacker(None, read_size=len(packed) or 1, max_buffer_size=MAX_BYTES, **settings)
    unpacker.feed(packed)
    value = unpacker.unpack()
    if unpacker.tell() != len(packed):
        raise ValueError("trailing bytes")
    return value


def _extension(leaf: Callable[[int], Any], depth: int, code: int, payload: bytes) -> Any:
    """What an extension stands for. A plain function: a closure that calls itself would be a reference
    cycle, and would hold the leaves (and their leases) until the garbage collector comes by."""
    if code == LEAF:
        index = msgpack.unpackb(payload)
        if type(index) is not int or index < 0:
            raise ProtocolError("a hole's number must be a natural number")
        return leaf(index)
    if code == COMPLEX:
        return complex(*struct.unpack(">dd", payload))
    if code == INTEGER:
        return int.from_bytes(payload, "big", signed=True)
    value = unpack(payload, leaf, depth + 1)
    if not isinstance(value, list):
        raise ProtocolError(f"extension {code} must hold an array")
    if code == TUPLE:
        return tuple(value)
    if code == ORDEREDDICT:
        return OrderedDict(value)
    if code == SCALAR:
        return unpack_scalar(*value)
    if code in (NAMEDTUPLE, DATACLASS):
        return (as_namedtuple if code == NAMEDTUPLE else as_dataclass)(*value)
    if code == WEAK:
        return _marked(value)
    raise ProtocolError(f"unknown extension type {code}")


def _marked(value: list[Any]) -> Any:
    """The tree of a structure that says more of its leaves (`structures.weak`)."""
    if len(value) != 2 or type(value[0]) is not list:
        raise ProtocolError("which leaves are numbers is said beside the tree")
    places, tree = value
    if not all(type(i) is int for i in places) or any(a >= b for a, b in zip([-1, *places], places)):
        raise ProtocolError("leaves that are numbers must be ascending natural numbers")
    return tree


def leaf_count(structure: bytes) -> int:
    """How many holes a structure has. Checks it whole: ProtocolError where it is not well formed."""
    return (_cached_count if len(structure) <= MAX_CACHED else _count)(structure)


def _count(structure: bytes) -> int:
    seen: list[int] = []

    def note(index: int) -> Leaf:
        seen.append(index)
        return Leaf(index)

    _check_depth(unpack(structure, note))
    if sorted(seen) != list(range(len(seen))):
        raise ProtocolError(f"the holes of a structure are not numbered 0..n-1: {shown(seen)}")
    return len(seen)


_cached_count = lru_cache(maxsize=512)(_count)


def _check_depth(tree: Any) -> None:
    """Whoever walks a tree may recurse."""
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for x in level for child in children(x).values()]
        if not level:
            return
    raise ProtocolError(f"it has more than {MAX_DEPTH} levels")
