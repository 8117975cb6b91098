"""Structures that say which of their leaves stand for Python numbers: what JAX calls weakly typed.

Such a tensor takes the dtype of what it meets, as the number itself would; who knows no such thing takes it as any other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Sequence, Tuple

import msgpack

from gradwire_wire.errors import ProtocolError
from gradwire_wire.structures.format import WEAK
from gradwire_wire.structures.reading import leaf_count

__all__ = ["weak_leaves", "with_weak"]

_PAIR = b"\x92"


def with_weak(structure: bytes, places: Sequence[int]) -> bytes:
    """The structure, which says nothing of it yet, with those of its leaves marked, in ascending order."""
    return msgpack.packb(msgpack.ExtType(WEAK, _PAIR + msgpack.packb(list(places)) + structure))


@lru_cache(maxsize=512)
def weak_leaves(structure: bytes) -> Tuple[int, ...]:
    """The places of those that are marked. ProtocolError where the structure is not well formed."""
    count = leaf_count(structure)
    outermost = msgpack.unpackb(structure, strict_map_key=False)
    if type(outermost) is not msgpack.ExtType or outermost.code != WEAK:
        return ()
    unpacker = msgpack.Unpacker()
    unpacker.feed(outermost.data)
    unpacker.read_array_header()
    places = tuple(unpacker.unpack())
    if places and places[-1] >= count:
        raise ProtocolError(f"leaf {places[-1]} of {count} is said to be a number")
    return places
