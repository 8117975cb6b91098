"""What is sent instead of the right bytes: every mutation follows from the seed of its `random.Random`. Pure.

Half of the mutations are blind (bits, bytes, lengths); the others know msgpack and put a wrong value in the place of a
right one, which gets past the first checks.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import msgpack

__all__ = ["mutated", "other_value"]

_NUMBERS = [0, 1, -1, 2, 7, 127, 128, 255, 4095, 4096, 4097, 65023, 65024, 65535, 65536]
_NUMBERS += [s * 2**n + d for n in (31, 32, 40, 46, 62, 63) for d in (-1, 0) for s in (1, -1)] + [2**64 - 1]
_OTHERS = [
    None,
    True,
    False,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\udc80",
    b"",
    b"\0" * 16,
    b"\xc1",
    [],
    {},
]
_OTHERS += [
    [[]],
    [0] * 100,
    {"a": 1},
    {1: 2},
    {None: 1},
    {b"": ""},
    msgpack.ExtType(1, b"\0"),
    msgpack.ExtType(99, b"x"),
]


def other_value(chance: random.Random, old: Any) -> Any:
    """Something else: near the old value, or far from it, or of another type."""
    how = chance.random()
    if type(old) is int and how < 0.5:
        return old + chance.choice([-1, 1, 2, -2, 8, 4096, -4096, old, 1 << chance.randrange(64)])
    if type(old) is bytes and old and how < 0.6:
        return _blind(chance, old)
    if type(old) is list and old and how < 0.5:
        return chance.choice([old + old, old[:-1], old[1:], old * 40, [*old, chance.choice(_NUMBERS)], [old]])
    return chance.choice(_NUMBERS if how < 0.8 else _OTHERS)


def mutated(chance: random.Random, frame: bytes, others: Sequence[bytes] = ()) -> bytes:
    """The frame with one to three things wrong."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        if chance.random() < 0.6:
            frame = _structural(chance, frame)
        else:
            frame = _blind(chance, frame, others)
    return frame


def _structural(chance: random.Random, frame: bytes) -> bytes:
    try:
        tree = msgpack.unpackb(frame, strict_map_key=False, unicode_errors="surrogateescape")
        places = list(_places(tree))
        if not places:
            return _blind(chance, frame)
        tree = copy.deepcopy(tree)
        path = chance.choice(places)
        holder = tree
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = other_value(chance, holder[path[-1]])
        packed: bytes = msgpack.packb(tree, unicode_errors="surrogateescape")
    except Exception:  # no longer msgpack, or a number that it has no place for
        return _blind(chance, frame)
    return packed


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Any:
    items = enumerate(tree) if type(tree) is list else tree.items() if type(tree) is dict else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _blind(chance: random.Random, frame: bytes, others: Sequence[bytes] = ()) -> bytes:
    data = bytearray(frame) or bytearray(1)
    how = chance.randrange(7)
    at = chance.randrange(len(data))
    if how == 0:
        data[at] ^= 1 << chance.randrange(8)
    elif how == 1:
        data[at] = chance.randrange(256)
    elif how == 2:
        del data[at:]
    elif how == 3:
        del data[at : at + chance.randrange(1, 9)]
    elif how == 4:
        data[at:at] = chance.randbytes(chance.randrange(1, 9))
    elif how == 5:
        data[at:at] = data[: chance.randrange(len(data) + 1)]
    else:
        other = chance.choice(others) if others else chance.randbytes(20)
        data[at:] = other[chance.randrange(len(other) or 1) :]
    return bytes(data)
