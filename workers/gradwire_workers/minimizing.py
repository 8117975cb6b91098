"""A whole training step as one call: a module's loss, its gradient, and an optimizer's step by it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Sequence

import numpy as np

from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import BY_NAME, DType
from gradwire_wire.errors import UsageError
from gradwire_workers.program import Engine, Program, WorkerSite

__all__ = ["Loss"]

_ONE_OF_BFLOAT16 = 0x3F80  # as the whole number that it travels as


class Loss:
    """What a module gives at these operands, which are constants. Optimizers that look for their step evaluate it more than once."""

    def __init__(self, engine: Engine, program: Program, site: WorkerSite, operands: Sequence[Any]) -> None:
        self._engine, self._program, self._site = engine, program, _of_constants(site)
        self._operands = [_full(engine, 0, BY_NAME["float32"]), *operands]

    def accumulate(self) -> Any:
        """Its value, when its gradient was added to the module's own. UsageError where the module's result is no loss."""
        result, residual = self._program.keep(self._site, (), list(self._operands))
        avals = list(map(self._engine.aval, result.tensors))
        if len(avals) != 1 or avals[0].shape != () or not avals[0].dtype.is_real:
            shown = ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in avals) or "no tensor"
            raise UsageError(
                f"minimize(): the result of {self._program.name} must be its loss, one real number, and is {shown}. Load a module "
                "that calls yours and then the loss, or call this one and minimize in three steps: backward(), step(), zero_grad()"
            )
        residual.derive(("T", (), 1), [_full(self._engine, 1, avals[0].dtype)], keep=False, accumulate=True)
        return result.tensors[0]


@lru_cache(maxsize=4096)
def _of_constants(site: WorkerSite) -> WorkerSite:
    """With an anchor before its operands, which alone is differentiated."""
    return replace(site, accumulate=True, anchored=True, alone=True)


def _full(engine: Engine, value: int, dtype: DType) -> Any:
    if value and dtype.name == "bfloat16":
        value = _ONE_OF_BFLOAT16
    return engine.adopt(Carrier(np.asarray(value, dtype.carrier), dtype, True))
