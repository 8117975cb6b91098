"""Kept forwards under tokens, bounded by bytes. Pure: no clock, no framework.

Eager callers release a token when they drop it. Compiled programs cannot, and may pull one token
twice; so a token stays until it is released or bytes run short, and then those that were pulled
already go first, the least recently used of them first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Collection, Iterable, NamedTuple

from gradwire_workers.program import Residual

__all__ = ["Kept", "Residuals"]

TOKENS = (1 << 32) - 1
OVERHEAD = 16384
"""Bytes that a kept graph takes beside its tensors: without them ten thousand small ones would count as nothing."""
PULLED_SHARE = 8


class Kept(NamedTuple):
    """A residual, whose it is, and the module generation it belongs to."""

    residual: Residual
    remote: int
    owner: bytes
    generation: int


class Residuals:
    """The store. ``first`` seeds the numbers, so that those of a former incarnation mean nothing here.

    limit: bytes of all residuals; those already pulled may have an eighth of it.
    """

    def __init__(self, limit: int, first: int) -> None:
        self._limit = limit
        self._first = self._next = first % TOKENS
        self._fresh, self._pulled = _Shelf(), _Shelf()

    def __len__(self) -> int:
        return len(self._fresh.kept) + len(self._pulled.kept)

    @property
    def nbytes(self) -> int:
        """Bytes of everything kept."""
        return self._fresh.nbytes + self._pulled.nbytes

    def add(self, kept: Kept) -> int:
        """Keep it; its token (1 .. 2**32 - 1). May evict others, never what was just added."""
        token = self.issue()
        self.put(token, kept)
        return token

    def issue(self) -> int:
        """The token of what is `put` next."""
        token = self._next % TOKENS + 1
        while token in self._fresh.kept or token in self._pulled.kept:
            token = token % TOKENS + 1
        self._next = token
        return token

    def put(self, token: int, kept: Kept) -> None:
        """Keep it under a token that was issued for it. See `add`."""
        self._fresh.put(token, kept, kept.residual.settle() + OVERHEAD)
        self._evict()

    def was_issued(self, token: int) -> bool:
        """Whether a token can be one of this store's; one of a former incarnation's is not (but by a rare chance)."""
        return 0 < (token - self._first) % TOKENS <= (self._next - self._first) % TOKENS

    def find(self, token: int, remote: int) -> Kept | None:
        """The kept forward of that token and remote, or None; it counts as used."""
        for shelf in (self._fresh, self._pulled):
            entry = shelf.kept.get(token)
            if entry is not None and entry[0].remote == remote:
                shelf.kept.move_to_end(token)
                return entry[0]
        return None

    def note_pulled(self, token: int) -> None:
        """This token has served a pullback: it may go before those that have not."""
        if token in self._fresh.kept:
            self._pulled.put(token, *self._fresh.take(token))
            while self._pulled.nbytes > self._limit // PULLED_SHARE and len(self._pulled.kept) > 1:
                self._pulled.take(next(iter(self._pulled.kept)))

    def release(self, tokens: Iterable[int], owner: bytes) -> None:
        """Their owner will not name them again; others' tokens are left alone."""
        for token in tokens:
            for shelf in (self._fresh, self._pulled):
                entry = shelf.kept.get(token)
                if entry is not None and entry[0].owner == owner:
                    shelf.take(token)

    def forget(self, remotes: Collection[int]) -> None:
        """Nobody will name what was kept of these."""
        for shelf in (self._fresh, self._pulled):
            for token in [token for token, (kept, _) in shelf.kept.items() if kept.remote in remotes]:
                shelf.take(token)

    def end(self, owner: bytes) -> None:
        """The owner is gone, and so is everything of its."""
        self.release([*self._fresh.kept, *self._pulled.kept], owner)

    def _evict(self) -> None:
        while self.nbytes > self._limit and self._pulled.kept:
            self._pulled.take(next(iter(self._pulled.kept)))
        while self.nbytes > self._limit and len(self._fresh.kept) > 1:
            self._fresh.take(next(iter(self._fresh.kept)))


class _Shelf:
    """Entries in order of use, and their bytes as they were when they came."""

    def __init__(self) -> None:
        self.kept: OrderedDict[int, tuple[Kept, int]] = OrderedDict()
        self.nbytes = 0

    def put(self, token: int, kept: Kept, nbytes: int) -> None:
        self.kept[token] = (kept, nbytes)
        self.nbytes += nbytes

    def take(self, token: int) -> tuple[Kept, int]:
        kept, nbytes = self.kept.pop(token)
        self.nbytes -= nbytes
        return kept, nbytes
