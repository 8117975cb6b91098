"""Kept forwards under tokens, bounded by bytes. Pure: no clock, no framework.

Eager callers release a token when they drop it. Compiled programs cannot, and may pull one token
twice; so a token stays until it is released or bytes run short, and then those that were pulled
already go first, the least recently used of them first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Iterable, NamedTuple

__all__ = ["Kept", "Residuals"]

TOKENS = (1 << 32) - 1


class Kept(NamedTuple):
    """A residual, whose it is, and the module generation it belongs to."""

    residual: Any
    remote: int
    owner: bytes
    generation: int


class Residuals:
    """The store. ``first`` seeds the numbers, so that those of a former incarnation mean nothing here.

    limit: bytes of all residuals; those already pulled may have a quarter of it.
    """

    def __init__(self, limit: int, first: int) -> None:
        self._limit = limit
        self._next = first % TOKENS
        self._fresh: OrderedDict[int, Kept] = OrderedDict()
        self._pulled: OrderedDict[int, Kept] = OrderedDict()
        self._fresh_bytes = self._pulled_bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._fresh) + len(self._pulled)

    @property
    def nbytes(self) -> int:
        """Bytes of everything kept."""
        return self._fresh_bytes + self._pulled_bytes

    def add(self, kept: Kept) -> int:
        """Keep it; its token (1 .. 2**32 - 1). May evict others, never what was just added."""
        self._next = self._next % TOKENS + 1
        token = self._next
        self._fresh[token] = kept
        self._fresh_bytes += kept.residual.nbytes
        self._evict(token)
        return token

    def find(self, token: int, remote: int) -> Kept | None:
        """The kept forward of that token and remote, or None; it counts as used."""
        for shelf in (self._fresh, self._pulled):
            kept = shelf.get(token)
            if kept is not None and kept.remote == remote:
                shelf.move_to_end(token)
                return kept
        return None

    def note_pulled(self, token: int) -> None:
        """This token has served a pullback: it may go before those that have not."""
        kept = self._fresh.pop(token, None)
        if kept is not None:
            self._fresh_bytes -= kept.residual.nbytes
            self._pulled[token] = kept
            self._pulled_bytes += kept.residual.nbytes
            while self._pulled_bytes > self._limit // 4 and len(self._pulled) > 1:
                self._drop_oldest_pulled()

    def release(self, tokens: Iterable[int], owner: bytes) -> None:
        """Their owner will not name them again; others' tokens are left alone."""
        for token in tokens:
            if token in self._fresh and self._fresh[token].owner == owner:
                self._fresh_bytes -= self._fresh.pop(token).residual.nbytes
            elif token in self._pulled and self._pulled[token].owner == owner:
                self._pulled_bytes -= self._pulled.pop(token).residual.nbytes

    def end(self, owner: bytes) -> None:
        """The owner is gone, and so is everything of its."""
        self.release(
            [t for shelf in (self._fresh, self._pulled) for t, k in shelf.items() if k.owner == owner], owner
        )

    def _evict(self, but: int) -> None:
        while self.nbytes > self._limit and self._pulled:
            self._drop_oldest_pulled()
        while self.nbytes > self._limit and next(iter(self._fresh)) != but:
            _, kept = self._fresh.popitem(last=False)
            self._fresh_bytes -= kept.residual.nbytes
            self.evicted += 1

    def _drop_oldest_pulled(self) -> None:
        _, kept = self._pulled.popitem(last=False)
        self._pulled_bytes -= kept.residual.nbytes
        self.evicted += 1
