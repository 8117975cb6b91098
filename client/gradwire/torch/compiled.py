"""What torch.compile sees of a remote call: one operator, and no graph break unless its results are no plain tree.

Dynamo reads Python. What it can follow is here, with no table, cache or foreign object in sight; what must
happen while it compiles, and gives a constant, is in functions marked so (`constant`). Trees cross between
the two as templates: nested tuples of strings and constants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from gradwire.torch import anchors, operator
from gradwire_wire.errors import UsageError
from gradwire_wire.structures import fill, leaf_count

__all__ = ["constant", "traced"]

_ANCHOR = anchors.leaf()
LEAF, CONSTANT, TUPLE, LIST, DICT = "leaf", "constant", "tuple", "list", "dict"


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, without loading the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traced(remote: Any, args: Any, kwargs: Any) -> Any:
    """A remote call while torch.compile traces its caller. What is no constant to Dynamo among the arguments, and no tensor, breaks the graph.

    remote: ``remote.described(args, kwargs)`` is called while compiling, with numpy arrays in place of tensors,
    for (handle, site); another value of ``remote.training`` compiles anew.
    """
    tensors: list[Any] = []
    constants: list[Any] = []
    template = _template([list(args), kwargs], tensors, constants)
    if not all([_is_constant(x) for x in constants]):
        return such_an_argument_ends_the_graph__pass_tensors_in_plain_containers(remote, args, kwargs)
    with_gradient = torch.is_grad_enabled()
    call, in_order, has_anchor = _described(remote, remote.training, template, with_gradient)
    if has_anchor:
        tensors = [_ANCHOR, *tensors]
    keep = int(with_gradient and any([x.requires_grad for x in tensors]))
    run = torch.ops.gradwire.call_in_order if in_order else torch.ops.gradwire.call
    results = run(call, "()", 0, False, keep, True, _held(call), tensors)
    wanted = _result_template(call)
    return _rebuilt(call, results) if wanted is None else _filled(wanted, results)


def _template(x: Any, tensors: list[Any], constants: list[Any]) -> tuple[Any, ...]:
    """The tree without its tensors, which are appended to ``tensors``; all else that is no container, to ``constants``."""
    if isinstance(x, torch.Tensor):
        tensors.append(x)
        return (LEAF, len(tensors) - 1)
    if type(x) is tuple or type(x) is list:
        items = tuple([_template(v, tensors, constants) for v in x])
        return (TUPLE if type(x) is tuple else LIST, items)
    if type(x) is dict:
        return (DICT, tuple([(k, _template(v, tensors, constants)) for k, v in x.items()]))
    constants.append(x)
    return (CONSTANT, x)


def _is_constant(x: Any) -> bool:
    """Whether Dynamo has a constant for it. Not so numbers that are inputs of the compiled function, and sizes of its inputs."""
    if x is None or type(x) is str or type(x) is bytes or type(x) is complex:
        return True
    if type(x) is int or type(x) is float or type(x) is bool:
        told = getattr(torch.fx.experimental.symbolic_shapes, "has_static_value", None)
        return told is None or told(x)
    if isinstance(x, tuple):  # a namedtuple
        return all([_is_constant(v) for v in x])
    return type(x) is OrderedDict and all([_is_constant(v) for v in x.values()])


@torch._disable_dynamo
def such_an_argument_ends_the_graph__pass_tensors_in_plain_containers(
    remote: Any, args: Any, kwargs: Any
) -> Any:
    """The call between two graphs. (Where that is refused, by ``fullgraph=True``, torch's error has this name.)"""
    return remote(*args, **kwargs)


def _filled(template: Any, leaves: Any) -> Any:
    """The tree again."""
    kind, content = template
    if kind == LEAF:
        return leaves[content]
    if kind == CONSTANT:
        return content
    if kind == DICT:
        return {k: _filled(v, leaves) for k, v in content}
    children = [_filled(v, leaves) for v in content]
    return tuple(children) if kind == TUPLE else children


class _Placeholders:
    """As many tensors as one likes."""

    def __getitem__(self, index: int) -> np.ndarray:
        return np.zeros(0)


@constant
def _described(
    remote: Any, training: bool | None, template: Any, with_gradient: bool
) -> tuple[str, bool, bool]:
    """The call's name, whether it is stateful, and whether it has an anchor."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise UsageError(
            f"{remote!r}: torch.func's transforms (grad, vjp, jvp, vmap) and forward_ad inside a compiled function "
            "cannot pass through a remote call. Put the transform outside, or its function under torch.compiler.disable"
        )
    args, kwargs = _filled(template, _Placeholders())
    handle, site = remote.described(args, kwargs)
    if site.accumulate and with_gradient:
        site = site.with_anchor
    operator.operator(site.stateful)
    return operator.name(handle, site), site.stateful, site.anchored


@constant
def _held(call: str) -> torch.Tensor:
    """A part of the graph, which knows the remote by a name alone: as long as the graph is there, so is what it calls."""
    return operator.hold(call, torch._guards.TracingContext.get())


@constant
def _result_template(call: str) -> tuple[Any, ...] | None:
    """None where a namedtuple, a dataclass or the like is among the results, which Dynamo does not make."""
    found = operator.structure(call)
    try:
        return _plain(fill(found, [_Leaf(i) for i in range(leaf_count(found))]))
    except _NotPlain:
        return None


@torch._disable_dynamo
def _rebuilt(call: str, results: Any) -> Any:
    """The tree again, between two graphs. (The last result is the token.)"""
    return fill(operator.structure(call), list(results[:-1]))


class _NotPlain(Exception):
    pass


class _Leaf(int):
    pass


def _plain(x: Any) -> tuple[Any, ...]:
    if type(x) is _Leaf:
        return (LEAF, int(x))
    if type(x) is tuple or type(x) is list:
        return (TUPLE if type(x) is tuple else LIST, tuple(_plain(v) for v in x))
    if type(x) is dict:
        return (DICT, tuple((k, _plain(v)) for k, v in x.items()))
    if x is None or isinstance(x, bool | int | float | complex | str | bytes):
        return (CONSTANT, x)
    raise _NotPlain
