"""What a structure consists of: the codes of its extensions, its holes, and how much of it there may be."""

from __future__ import annotations

from functools import lru_cache

import msgpack

from gradwire_wire.errors import ProtocolError

__all__ = [
    "COMPLEX",
    "DATACLASS",
    "INTEGER",
    "LEAF",
    "MAX_BYTES",
    "MAX_CACHED",
    "MAX_DEPTH",
    "NAMEDTUPLE",
    "ORDEREDDICT",
    "SCALAR",
    "TUPLE",
    "WEAK",
    "Leaf",
    "check_length",
    "hole",
]

LEAF, TUPLE, COMPLEX, INTEGER, SCALAR, NAMEDTUPLE, DATACLASS, ORDEREDDICT, WEAK = range(1, 10)
MAX_DEPTH = 100
MAX_BYTES = 16 << 20
MAX_CACHED = 64 << 10
"""Longer structures are not remembered: they hold text or bytes that may differ from call to call."""


class Leaf:
    """Stands for a tensor where a tree is looked at without its leaves."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@lru_cache(maxsize=1024)
def hole(index: int) -> msgpack.ExtType:
    return msgpack.ExtType(LEAF, msgpack.packb(index))


def check_length(structure: bytes) -> None:
    if len(structure) > MAX_BYTES:
        raise ProtocolError(
            f"it has {len(structure)} bytes beside its tensors, more than {MAX_BYTES}; send long bytes as an array, "
            "numpy.frombuffer(data, 'uint8')"
        )
