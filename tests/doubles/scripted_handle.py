"""A `Handle` that answers as a test says, and writes down what it was asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from gradwire.caches import Cached
from gradwire.site import Outcome, Site, SpecResult
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.structures import Leaf, flatten
from gradwire_wire.tensors.numpy import aval, export
from gradwire_wire.words import Word, linear_count


class Message(NamedTuple):
    """One call. ``carriers`` hold copies."""

    site: Site
    word: Word
    carriers: list[Carrier]
    keep: int
    token: Any

    @property
    def arrays(self) -> list[np.ndarray]:
        return [c.array for c in self.carriers]

    @property
    def linear(self) -> list[np.ndarray]:
        """The tangents or cotangents."""
        return self.arrays[len(self.carriers) - linear_count(self.word) :]

    @property
    def verb(self) -> str:
        """ "forward", or the letters of the word; with a + where the worker is told to accumulate."""
        verb = "".join(op[0] for op in self.word) or "forward"
        return verb + "+" * self.site.accumulate


class ScriptedHandle(Cached):
    """See `gradwire.handle.Handle`.

    answer: Message → the results, as numpy arrays, carriers or None. announce: avals of the operands → avals of the
    results, or what to raise. structure: bytes of the result tree; a tuple of the results if it is None.
    """

    moves_in_evaluation, why_it_moves = False, "is in training mode"
    link = SimpleNamespace(recorder=None)

    def __init__(
        self,
        answer: Callable[[Message], Sequence[Any]],
        announce: Callable[[Sequence[Aval]], Sequence[Aval]] = lambda avals: avals,
        structure: bytes | None = None,
    ) -> None:
        self.name = "scripted/double.py:f"
        self.answer, self.announce, self.structure = answer, announce, structure
        self.messages: list[Message] = []
        self.changes = 0
        self.kept: set[int] = set()
        self._tokens = itertools.count(1)

    def invoke(
        self,
        site: Site,
        word: Word,
        carriers: Sequence[Carrier],
        *,
        keep: int = 0,
        token: int | np.ndarray = 0,
        token_ops: int = 0,
    ) -> Outcome:
        message = Message(site, word, [c._replace(array=c.array.copy()) for c in carriers], keep, token)
        self.messages.append(message)
        results = [x if x is None or isinstance(x, Carrier) else export(x) for x in self.answer(message)]
        number = next(self._tokens) if keep else 0
        self.kept |= {number} - {0}
        return Outcome(results, self._structure(len(results)), number)

    def spec(self, site: Site, avals: tuple[Aval, ...]) -> SpecResult:
        results = tuple(self.announce(avals[site.anchored :]))
        return SpecResult(results, self._structure(len(results)))

    def release(self, token: int) -> None:
        self.kept.discard(token)

    def _structure(self, results: int) -> bytes:
        return positional_result(results) if self.structure is None else self.structure

    @property
    def verbs(self) -> list[str]:
        return [m.verb for m in self.messages]


def positional_result(count: int) -> bytes:
    """A list of so many tensors, as a result tree."""
    return flatten([Leaf(i) for i in range(count)], lambda x: type(x) is Leaf)[0]


def like(*arrays: np.ndarray) -> list[Aval]:
    return [aval(x) for x in arrays]
