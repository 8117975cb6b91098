"""What comes with a call, as tensors of the worker's framework."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.errors import DtypeError, UnsupportedTensorError
from gradwire_wire.messages import Call, Plan, Spec
from gradwire_workers.asked import name_of_operand
from gradwire_workers.program import Engine
from gradwire_workers.scratch import Scratch

__all__ = ["Operands"]


class Operands:
    """Adopts carriers. ``adopter``: the engine's own, for fresh copies; None where it has none."""

    def __init__(self, engine: Engine) -> None:
        self._adopt, self.adopter = engine.adopt_operand, engine.adopter
        self._scratch = Scratch()

    def adopted(self, call: Call | Plan, carriers: list[Carrier | None]) -> list[Any]:
        """The operands as the framework's tensors; None where the client left one out.

        A kept forward must not refer to memory that somebody may still write: then it is copied.
        """
        operands: list[Any] = []
        for carrier in carriers:
            if carrier is not None and call.keep and not carrier.owned:
                carrier = Carrier(self._scratch.copy(carrier.array), carrier.dtype)
            try:
                operands.append(None if carrier is None else self._adopt(carrier))
            except (DtypeError, UnsupportedTensorError) as error:
                raise type(error)(f"{name_of_operand(call, len(operands))}: {error}") from None
        carriers.clear()  # the caller of this still has the list, and must not keep what the call let go
        return operands

    def refuse(self, spec: Spec, avals: Sequence[Aval]) -> None:
        """Raise for the first operand of a type that the framework here does not take, by its name."""
        for i, (_, dtype) in enumerate(avals):
            try:
                self._adopt(Carrier(np.empty(0, dtype.carrier), dtype))
            except DtypeError as error:
                raise DtypeError(f"{name_of_operand(spec, i)}: {error}") from None
