"""Tokens of kept forwards as tensors, so that autograd's own rules say how long they live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from gradwire.handle import Handle

__all__ = ["holding_tensor", "named_by", "token_tensor"]


class _Tokens(np.ndarray):
    """The memory of a token tensor: gives the token back when the last tensor over it is gone.

    The memory, not the tensor object, for autograd, functorch and compiled graphs wrap, detach and alias
    the tensors they save. `Handle.release` may be called in any thread and in a finalizer.
    """

    handle: Handle | None = None
    token = 0

    def __del__(self) -> None:
        if self.handle is not None and self.token:
            self.handle.release(self.token)


def token_tensor(handle: Handle, token: int, rows: int | None = None) -> Any:
    """The token as an int64 tensor (token, row), or (rows, 2) for a batch whose rows were kept.

    Token 0 is none: whatever is derived with it is computed afresh from the primals. It holds the handle as well, for a
    compiled graph that names it.
    """
    if rows is None:
        memory = _Tokens((2,), np.int64)
        memory[0], memory[1] = token, 0
    else:
        memory = _Tokens((rows, 2), np.int64)
        memory[:, 0], memory[:, 1] = token, range(rows)
    memory.token, memory.handle = token, handle
    return torch.from_numpy(memory)


class _Held(np.ndarray):
    """The memory of the token of no forward."""

    handles: set[Handle]


def holding_tensor() -> tuple[Any, set[Handle]]:
    """Token 0, and what it holds, which may be added to. Of one number: that size is the one that no compiler takes for another's."""
    memory = _Held((1,), np.int64)
    memory[:], memory.handles = 0, set()
    return torch.from_numpy(memory), memory.handles


def named_by(token: Any) -> int | np.ndarray:
    """What a token tensor says to `Handle.invoke`: a number, or uint32 rows (batch, 2)."""
    if token is None:
        return 0
    if token.ndim == 1:
        return int(token.tolist()[0])
    rows: np.ndarray = token.numpy().astype(np.uint32)
    return rows if rows.size and rows[:, 0].all() else 0
