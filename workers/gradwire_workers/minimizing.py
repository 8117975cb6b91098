"""A whole training step as one call: a module's loss, its gradient, and an optimizer's step by it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Callable, Sequence

import numpy as np

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BY_NAME, DType
from gradwire_wire.errors import UsageError
from gradwire_wire.structures import leaf_paths
from gradwire_wire.words import pullback_op
from gradwire_workers.program import Engine, Optimizer, Program, Result, WorkerSite

__all__ = ["minimize"]

_PLACES = ("result", "result.loss", "result['loss']", "result[0]")
"""Where a result has its loss: a tensor alone is it; of more, the one of that name, or the first."""
_ONE_OF_BFLOAT16 = 0x3F80  # as the whole number that it travels as


def minimize(
    engine: Engine,
    program: Program,
    site: WorkerSite,
    operands: Sequence[Any],
    optimizer: Optimizer,
    clip_norm: float | None,
    settle: Callable[[], None],
) -> Result:
    """The module's result, by whose loss the optimizer has made a step. No gradients are left, whatever is raised: those of half a
    backward pass, or of a step that was refused, would be added to the next one's.

    settle: called before what must not be interrupted. UsageError where the result has no loss.
    """
    loss = _Loss(engine, program, site, operands)
    try:
        if optimizer.search is not None:
            optimizer.search(loss.accumulate, clip_norm)
            return loss.first
        loss.accumulate()
        settle()
        optimizer.step(clip_norm)
    except BaseException:
        optimizer.zero_grad()
        raise
    optimizer.zero_grad()
    return loss.first


class _Loss:
    """Of a module at these operands, which are constants. ``first``: the result of its first evaluation."""

    first: Result

    def __init__(self, engine: Engine, program: Program, site: WorkerSite, operands: Sequence[Any]) -> None:
        self._engine, self._program, self._site, self._operands = engine, program, site, operands
        self._is_first, self._at = True, 0

    def accumulate(self) -> Any:
        """Its value, when its gradient was added to the module's own."""
        result = self._program.add_gradient(self._site, list(self._operands), self._place)
        if result is None:
            result = self._by_anchor()
        if self._is_first:
            self.first, self._is_first = result, False
        return result.tensors[self._at]

    def _by_anchor(self) -> Result:
        """As a caller's own autodiff does it where a module is the first stage."""
        anchor = _full(self._engine, 0, BY_NAME["float32"])
        result, residual = self._program.keep(_of_constants(self._site), (), [anchor, *self._operands])
        place = self._place(result)
        avals = list(map(self._engine.aval, result.tensors))
        is_loss = [i == place for i, a in enumerate(avals) if a.dtype.is_inexact]
        one = _full(self._engine, 1, avals[place].dtype)
        residual.derive(pullback_op((), is_loss), [one], keep=False, accumulate=True)
        return result

    def _place(self, result: Result) -> int:
        place = _place_of_loss(result.structure)
        if place is not None and _is_real_number(self._engine.aval(result.tensors[place])):
            self._at = place
            return place
        avals = map(self._engine.aval, result.tensors)
        shown = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in avals) or "no tensor"
        raise UsageError(
            f"minimize(): the result of {self._program.name} must be its loss, one real number, or have it as its first item or as "
            f"'loss', and is {shown}. Load a module that calls this one and then the loss; or make the step in three: call, "
            "backward(), step(zero_grad=True)"
        )


def _is_real_number(aval: Aval) -> bool:
    return aval.shape == () and aval.dtype.is_real


@lru_cache(maxsize=1024)
def _place_of_loss(structure: bytes) -> int | None:
    paths = leaf_paths(structure, argument_names=False)
    return next((paths.index(place) for place in _PLACES if place in paths), None)


@lru_cache(maxsize=4096)
def _of_constants(site: WorkerSite) -> WorkerSite:
    """With an anchor before its operands, which alone is differentiated."""
    return replace(site, accumulate=True, anchored=True, alone=True)


def _full(engine: Engine, value: int, dtype: DType) -> Any:
    if value and dtype.name == "bfloat16":
        value = _ONE_OF_BFLOAT16
    return engine.adopt(Carrier(np.asarray(value, dtype.carrier), dtype, True))
