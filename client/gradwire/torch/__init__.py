"""Remote functions for programs of PyTorch: `call` makes each an ordinary differentiable function.

See `gradwire.torch.nodes` for how a call becomes a node of the autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradwire.derived import Derived
from gradwire.handle import Handle
from gradwire.site import Site
from gradwire.torch.anchors import anchor
from gradwire.torch.compiled import traced
from gradwire.torch.nodes import apply, is_quiet, record, records_nothing
from gradwire_wire.errors import RemoteError, UsageError
from gradwire_wire.structures import fill
from gradwire_wire.tensors import numpy as numpy_tensors
from gradwire_wire.tensors.torch import adopt, export

if TYPE_CHECKING:
    from gradwire.torch.module import Module

__all__ = ["ACCUMULATES", "NAME", "Module", "call", "in_callers_modes", "is_plain", "traced", "undisturbed"]

NAME = "torch"
_is_any_autocast_enabled = getattr(torch._C, "_is_any_autocast_enabled", lambda: False)
_ABOUT_AUTOCAST = (
    "torch.autocast is on here and has no effect in the worker: tensors go in the dtypes that they have. Convert them, or the "
    "module, or use autocast in the worker's own code"
)
ACCUMULATES = True  # loss.backward() adds to a local module's gradients as well


def call(handle: Handle, site: Site, operands: list[Any]) -> Any:
    """The remote function at torch tensors and numpy arrays; its result tree with torch tensors.

    Blocks until the results are there. They are this process's own: private and writable, and recorded by
    whatever differentiates the operands; numpy arrays are constants. Raises gradwire's errors, in the
    backward pass too.
    """
    if torch.compiler.is_dynamo_compiling():
        return undisturbed(call, (handle, site, operands), {})
    _refuse_where_it_would_be_wrong(handle, site)
    tensors = [x if isinstance(x, torch.Tensor) else _constant(x) for x in operands]
    is_recorded = torch.is_grad_enabled()
    has_plain_graph = is_quiet()
    are_constants = has_plain_graph and not (is_recorded and any([x.requires_grad for x in tensors]))
    if site.accumulate and is_recorded:
        site = site.with_anchor_alone if are_constants else site.with_anchor
        tensors, are_constants = [anchor(), *tensors], False
    try:
        if are_constants:
            return handle.invoke(site, (), [export(x) for x in tensors]).tree(adopt)
        fn = Derived(handle, site)
        results = list(record(fn, tensors) if has_plain_graph else apply(fn, tensors))
    except RemoteError as error:
        if _is_any_autocast_enabled():
            error.add_note(_ABOUT_AUTOCAST)
        raise
    tree = fill(fn.structure, results)
    results.clear()  # the graph and its token must end with what the caller holds, not with a collection
    return tree


def _refuse_where_it_would_be_wrong(handle: Handle, site: Site) -> None:
    """UsageError in a trace, which would keep this result for ever, and where a backward pass repeats a stateful call."""
    if torch._C._is_tracing():
        raise UsageError(
            f"{handle.name}: torch.jit.trace would record the result of this call as a constant. "
            "Call the remote function outside of what is traced, or use torch.export or torch.compile"
        )
    if site.stateful and torch._C._current_graph_task_id() != -1 and site.seed is None and not site.seeded:
        raise UsageError(
            f"{handle.name} {handle.why_it_moves} and was called during a backward pass, as torch.utils.checkpoint does to "
            "compute a forward again: that would draw another dropout mask and move the state a second time. Take the "
            "call out of checkpoint (its graph is in the worker anyway), give options(seed=...), or call it in eval mode"
        )


def is_plain(site: Site, operands: list[Any]) -> bool:
    """See `gradwire.families.Face`: no graph, no transform, no mode would see the call."""
    return records_nothing(site.accumulate, [x for x in operands if isinstance(x, torch.Tensor)])


@torch._disable_dynamo
def undisturbed(act: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``act`` outside of what torch.compile compiles: a graph break. (See `traced` for the way without, which calls have.)"""
    return act(*args, **kwargs)


def in_callers_modes(act: Callable[..., Any]) -> Callable[..., Any]:
    """``act`` for a thread that has torch's default modes, in those of this one: gradients recorded or not, inference."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode()(act)
    return act if torch.is_grad_enabled() else torch.no_grad()(act)


def _constant(x: np.ndarray) -> torch.Tensor:
    """A numpy array as a tensor; a copy where a gradient may still need it after its owner changed it."""
    carrier = numpy_tensors.export(x)
    if torch.is_grad_enabled():
        carrier = carrier._replace(array=carrier.array.copy(order="K"))
    return adopt(carrier)


def __getattr__(name: str) -> Any:
    if name == "Module":
        from gradwire.torch.module import Module  # which calls what is here

        return Module
    raise AttributeError(f"module 'gradwire.torch' has no attribute {name!r}")
