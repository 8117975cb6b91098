"""What stands for the parameters that the worker owns: a scalar whose gradient is always zero.

Through it a call has a differentiable operand even where it is the first stage, so that ``loss.backward()``
reaches the worker. It is made once and used by every later call, so nothing of what is around the first
one may be in it: a transform of torch.func, a mode (fake tensors, make_fx) or a default device.
"""

from __future__ import annotations

import threading
from functools import cache

import torch

from gradwire.torch.nodes import is_quiet

__all__ = ["anchor", "leaf"]


@cache
def anchor() -> torch.Tensor:
    """Not a leaf: a node can be asked whether it will be reached."""
    return _made_outside()[1]


def leaf() -> torch.Tensor:
    """A leaf, for a compiled graph takes it as an input."""
    return _made_outside()[0]


def _made_outside() -> tuple[torch.Tensor, torch.Tensor]:
    """Both of them, plain: by another thread where something is around this one."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make() -> None:
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
            made.append((x, x.clone()))

    if is_quiet():
        make()
    else:
        thread = threading.Thread(target=make, name="gradwire-anchor")
        thread.start()
        thread.join()
    return made[0]
