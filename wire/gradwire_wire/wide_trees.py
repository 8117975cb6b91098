"""Trees with many leaves, quickly: what `structures` does leaf by leaf, done for a whole container at once.

A list of 200 tensors has the same structure each time, so its bytes are made once and remembered by where the numbering
begins; and it is filled by a slice of the leaves. Here are only the containers that allow it (list, tuple and dict with
text as keys, of scalars and leaves); everything else answers None, and is then done the general way. Pure.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Sequence

import msgpack

__all__ = ["MIN_WIDTH", "Filling", "filling_of", "pack_wide"]

MIN_WIDTH, MAX_WIDTH = 8, 4096
"""Containers of fewer items are as quick the general way; bytes of longer ones are not worth remembering."""
MAX_DEPTH, LOOK_DEPTH = 6, 3
LEAF, TUPLE = 1, 2
Filling = Callable[[Sequence[Any]], Any]
_CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SCALARS = frozenset({type(None), bool, float, str})


def pack_wide(tree: Any, is_leaf: Callable[[Any], bool], leaves: list[Any]) -> bytes | None:
    """The structure of a tree with a wide container of leaves, which are appended; None where there is none.

    ``leaves`` is then as it was. is_leaf: goes by a value's type alone.
    """
    if not _is_wide(tree, LOOK_DEPTH):
        return None
    before = len(leaves)
    packed = _pack(tree, is_leaf, leaves, MAX_DEPTH)
    if packed is None:
        del leaves[before:]
    return packed


def _is_wide(x: Any, depth: int) -> bool:
    """Whether there is a wide container in it, not far down."""
    kind = type(x)
    if kind is not list and kind is not tuple and kind is not dict:
        return False
    if len(x) >= MIN_WIDTH:
        return True
    if depth:
        for item in x.values() if kind is dict else x:
            if _is_wide(item, depth - 1):
                return True
    return False


def _pack(x: Any, is_leaf: Callable[[Any], bool], leaves: list[Any], depth: int) -> bytes | None:
    kind: Any = type(x)
    if kind is list or kind is tuple:
        items, names = x, None
    elif kind is dict:
        items, names = list(x.values()), tuple(x)
        if not all([type(name) is str for name in names]):
            return None
    elif kind in _SCALARS:
        scalar: bytes = msgpack.packb(x)
        return scalar
    else:
        if kind in _CONSTANTS or not is_leaf(x):
            return None
        leaves.append(x)
        return _holes(len(leaves) - 1, 1, list, None)[1:]
    if not depth:
        return None
    if items and len(items) <= MAX_WIDTH:
        (first, *others) = set(map(type, items))
        if not others and first not in _NO_LEAVES and is_leaf(items[0]):
            leaves.extend(items)
            return _holes(len(leaves) - len(items), len(items), kind, names)
    return _pack_each(items, names, kind, is_leaf, leaves, depth)


_NO_LEAVES = _CONSTANTS | {list, tuple, dict}


def _pack_each(
    items: Any, names: Any, kind: type, is_leaf: Callable[[Any], bool], leaves: list[Any], depth: int
) -> bytes | None:
    parts: list[bytes] = []
    for item in items:
        part = _pack(item, is_leaf, leaves, depth - 1)
        if part is None:
            return None
        parts.append(part)
    return _joined(parts, kind, names)


def _joined(parts: Sequence[bytes], kind: type, names: Any) -> bytes:
    packer = msgpack.Packer(autoreset=False)
    if kind is dict:
        packer.pack_map_header(len(parts))
        keyed = [piece for name, part in zip(names, parts) for piece in (msgpack.packb(name), part)]
        return packer.bytes() + b"".join(keyed)
    packer.pack_array_header(len(parts))
    body: bytes = packer.bytes() + b"".join(parts)
    if kind is tuple:
        body = msgpack.packb(msgpack.ExtType(TUPLE, body))
    return body


@lru_cache(maxsize=256)
def _holes(start: int, count: int, kind: Any, names: Any) -> bytes:
    """The structure of a container with nothing but ``count`` leaves, numbered from ``start``."""
    holes = [msgpack.packb(msgpack.ExtType(LEAF, msgpack.packb(start + i))) for i in range(count)]
    return _joined(holes, kind, names)


def filling_of(tree: Any, leaf: type) -> Filling | None:
    """How to make a tree like this one again and again, where each ``leaf`` in it (with its ``index``) is filled.

    Containers are new each time. None for a tree with other things in it than lists, tuples, dicts and constants.
    """
    kind = type(tree)
    if kind is leaf:
        index = tree.index
        return lambda leaves: leaves[index]
    if kind in _CONSTANTS:
        return lambda leaves: tree
    if kind is dict:
        if not all(type(name) in _CONSTANTS for name in tree):
            return None
        names, inner = tuple(tree), filling_of(list(tree.values()), leaf)
        return None if inner is None else _dict_filling(names, inner)
    if kind is tuple:
        inner = filling_of(list(tree), leaf)
        return None if inner is None else _tuple_filling(inner)
    return _list_filling(tree, leaf) if kind is list else None


def _dict_filling(names: tuple[Any, ...], inner: Filling) -> Filling:
    return lambda leaves: dict(zip(names, inner(leaves)))


def _tuple_filling(inner: Filling) -> Filling:
    return lambda leaves: tuple(inner(leaves))


def _list_filling(items: list[Any], leaf: type) -> Filling | None:
    if items and all(type(x) is leaf for x in items):
        start, stop = items[0].index, items[0].index + len(items)
        if [x.index for x in items] == list(range(start, stop)):
            return lambda leaves: list(leaves[start:stop])
    fillings: list[Filling] = []
    for x in items:
        filling = filling_of(x, leaf)
        if filling is None:
            return None
        fillings.append(filling)
    return lambda leaves: [filling(leaves) for filling in fillings]
