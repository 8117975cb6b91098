"""The user's callable as a function of its tensor operands alone, under any framework's tracing."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from gradwire_wire.structures import fill_call, flatten, positional_count
from gradwire_workers.program import WorkerSite

__all__ = ["Flat"]


class Flat:
    """Calls ``target(*args, **kwargs)`` with the operands put into the site's argument tree.

    Results come back flat; ``structure`` is the result tree of the latest run or trace. numpy arrays
    in a result are leaves too: the framework's file converts them.
    """

    def __init__(
        self, target: Callable[..., Any], site: WorkerSite, is_tensor: Callable[[Any], bool]
    ) -> None:
        self._target, self._site, self._is_tensor = target, site, is_tensor
        self._first = int(site.anchored)  # of the operands that the target sees
        self._count = positional_count(site.structure)
        self.structure = b""

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        given = operands[self._first :]
        if self._count == len(given):
            tree = self._target(*given)
        else:
            args, kwargs = fill_call(self._site.structure, given)
            tree = self._target(*args, **kwargs)
        self.structure, leaves = flatten(tree, self._is_leaf, "the result")
        return tuple(leaves)

    def _is_leaf(self, x: Any) -> bool:
        return isinstance(x, np.ndarray) or self._is_tensor(x)
