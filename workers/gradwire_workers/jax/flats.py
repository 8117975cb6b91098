"""The user's callable as a function of its operands, with the weak types that JAX knows: see `gradwire_workers.flat`."""

from __future__ import annotations

from typing import Any, Callable

from gradwire_wire.structures import weak_leaves, with_weak
from gradwire_wire.tensors import jax as tensors
from gradwire_workers.flat import Flat
from gradwire_workers.program import WorkerSite

__all__ = ["JaxFlat"]


class JaxFlat(Flat):
    """What came for a Python number meets the target as one, and what comes out for one is told as such."""

    def __init__(self, target: Callable[..., Any], site: WorkerSite) -> None:
        super().__init__(target, site, tensors.is_tensor)
        self._weak = frozenset(i + self._first for i in weak_leaves(site.structure))

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        if self._weak:
            operands = tuple(tensors.weakened(x) if i in self._weak else x for i, x in enumerate(operands))
        leaves = super().__call__(*operands)
        weak = [i for i, x in enumerate(leaves) if tensors.is_weak(x)]
        if weak:
            self.structure = with_weak(self.structure, weak)
        return leaves
