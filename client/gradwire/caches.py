"""What a caller's framework has made of a target, to be found again: derived functions, compiled programs.

All of these name the target's handle, and as long as that is there the target stays in its worker. So they are nobody's but theirs who can call
it, its proxies, and go with the last: in a table they would keep every module that a program has ever called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

__all__ = ["Cached", "Caches"]

MOST = 1024


class Caches:
    """Of one target."""

    __slots__ = ("__weakref__", "_made")

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def of(self, make: Callable[..., Any]) -> Any:
        """``make``, which remembers what it has made of which arguments."""
        found = self._made.get(make)
        return self._made.setdefault(make, lru_cache(maxsize=MOST)(make)) if found is None else found


class Cached:
    """What has `Caches`, and does not keep them while anybody holds them."""

    _shared: Callable[[], Caches | None] | None = None
    _own: Caches | None = None

    def share_caches(self) -> Caches:
        """To be held by whoever can call the target."""
        found = None if self._shared is None else self._shared()
        if found is None:
            found = Caches()
            self._shared = weakref.ref(found)
        return found

    @property
    def caches(self) -> Caches:
        """Those that are held; where nobody can call the target any more, only derive what was called, its own."""
        found = None if self._shared is None else self._shared()
        if found is None:
            self._own = found = self.share_caches()
        return found
