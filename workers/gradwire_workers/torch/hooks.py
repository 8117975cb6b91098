"""Whether a graph saves its tensors through hooks of the user's, as torch.utils.checkpoint does, and has backward hooks.

Looking at such a tensor runs user code: a checkpoint would compute its forward again, and move BatchNorm with it.
And what it computes depends on the parameters of that moment, not on those of the forward.
"""

from __future__ import annotations

from typing import Any

from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import BackwardHook

__all__ = ["entered", "set_up"]

_count = 0
_enter = saved_tensors_hooks.__enter__


def entered() -> int:
    """How often hooks were put in place since the start. (torch tells only whether there are some now.)"""
    return _count


def _counting_enter(self: Any) -> None:
    global _count
    _count += 1
    _enter(self)


saved_tensors_hooks.__enter__ = _counting_enter

_set_up = 0
_init = BackwardHook.__init__


def set_up() -> int:
    """How often a module with full backward hooks was called since the start."""
    return _set_up


def _counting_init(self: Any, *args: Any, **kwargs: Any) -> None:
    global _set_up
    _set_up += 1
    _init(self, *args, **kwargs)


BackwardHook.__init__ = _counting_init
