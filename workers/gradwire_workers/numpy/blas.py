"""How many threads numpy's matrix products use: the pool of OpenBLAS, which numpy's own builds carry with them.

numpy has no function for it. The library is loaded already; it is found among this process's mappings, and asked by
the name that this build of it has for the question. Other libraries keep what the environment told them.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Optional

__all__ = ["resize", "size"]

_PREFIXES = ("scipy_openblas", "openblas")
_SUFFIXES = ("64_", "_64", "_", "")


def size() -> Optional[int]:
    """Threads of the pool; None where it cannot be asked."""
    ask = _function("get_num_threads")
    return int(ask()) if ask else None


def resize(threads: int) -> None:
    """Give the pool that size, if it can be told."""
    tell = _function("set_num_threads")
    if tell:
        tell(ctypes.c_int(threads))


def _function(verb: str) -> Any:
    for prefix in _PREFIXES:
        for suffix in _SUFFIXES:
            found = getattr(_library(), f"{prefix}_{verb}{suffix}", None)
            if found is not None:
                return found
    return None


@functools.lru_cache(maxsize=None)
def _library() -> Any:
    """The OpenBLAS that is loaded, or None."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(None, 5)[5].strip() for line in maps if "openblas" in line}
        return ctypes.CDLL(min(paths)) if paths else None
    except (OSError, IndexError):
        return None
