"""What numpy keeps alive under an array: an object that exports the memory, and holds whatever must live as long."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["holder_of", "plain_exporter", "span_exporter"]


@lru_cache(maxsize=None)
def plain_exporter(nbytes: int) -> Any:
    """The exporter under plain views of an own segment of this size."""
    return type("_Memory", (ctypes.c_char * nbytes,), {"__slots__": ("segment",)})


@lru_cache(maxsize=None)
def span_exporter(nbytes: int) -> Any:
    """The exporter under views of a segment of this size; its ``held`` lives as long as any alias.

    Whatever is held refers to the segment, and so keeps the addresses mapped.
    """
    return type("_Span", (ctypes.c_char * nbytes, _Held), {"__slots__": ("held",)})


class _Held:
    """Marks the exporters of this file among all objects that can be under an array."""

    __slots__ = ()
    held: Any


def holder_of(array: np.ndarray) -> Any:
    """What keeps an array's memory: a `Lease`, the holder given to `held_array`, or None for other memory."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return base.held if isinstance(base, _Held) else None
