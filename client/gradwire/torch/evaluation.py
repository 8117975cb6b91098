"""One evaluation of a derived function at torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradwire.derived import Derived
from gradwire.exits import end_daemon
from gradwire.torch.tokens import named_by, token_tensor
from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import ClosedError
from gradwire_wire.messages import KEEP_ROWS
from gradwire_wire.tensors.torch import adopt, aval, export, torch_dtype

__all__ = ["evaluate", "zeros_like_result"]


_ANCHOR = Carrier(np.zeros((), np.float32), BY_NAME["float32"])
"""What every anchor is."""


def evaluate(fn: Derived, token: Any, operands: Sequence[Any]) -> tuple[list[Any], Any]:
    """Ask the worker. Returns the results (None: an operand is unused) and the token tensor or None.

    Blocks. ``token``: a token tensor or None. The results are over the memory that came back, private to
    this process and writable. Raises what `Handle.invoke` raises.
    """
    name = named_by(token)
    carriers: Sequence[Carrier]
    if type(name) is not int or name:
        carriers = _Exported(operands)
    elif fn.site.anchored:
        carriers = [_ANCHOR, *map(export, operands[1:])]
    else:
        carriers = list(map(export, operands))
    try:
        outcome = fn.invoke(carriers, name)
    except ClosedError:
        end_daemon()  # in a backward pass there is nobody of ours around it
        raise
    if fn.only_accumulates:
        return [None], None
    results = outcome.adopted(adopt)
    if not fn.keep:
        return results, None
    rows = results[0].shape[0] if fn.keep == KEEP_ROWS and results else None
    return results, token_tensor(fn.handle, outcome.token, rows)


def zeros_like_result(fn: Derived, index: int, operands: Sequence[Any]) -> Any:
    """Zeros like a result that is None, which only pullbacks have."""
    shape, dtype = fn.result_avals([aval(x) for x in operands])[index]
    return torch.zeros(shape, dtype=torch_dtype(dtype))


class _Exported(Sequence[Carrier]):
    """Operands as carriers, each made when it is looked at: at a kept token the primals are not."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        found = self._tensors[index]
        return [export(x) for x in found] if isinstance(index, slice) else export(found)
