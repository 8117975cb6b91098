"""Derived functions on torch's own tape.

A call that will be differentiated runs with gradients enabled on *leaves*: detached operands that
require gradients. The user's code gets aliases of them that are no leaves (`entered`), so that an
in-place first layer works. Everything else is plain autograd on the graph that comes out:

    T  pullback   autograd.grad(results, operands, cotangents)
    J  tangent    the pullback is linear in its cotangents u; its own pullback with respect to u is J
    V  batch      torch.func.vmap of the user's function, and only of it

`torch.func` would be the shorter way for T and J, but under it train-mode BatchNorm and user code that
calls autograd raise. A word such as T, V is therefore computed with the batch innermost: V first, with every
operand that is differentiated expanded to one row each; rows do not mix, so the pullback of the batch
is the batch of pullbacks.
"""

from __future__ import annotations

import re
from typing import Any, Callable, NamedTuple, Protocol, Sequence

import torch
from torch.overrides import has_torch_function

from gradwire_wire.carriers import Aval
from gradwire_wire.errors import UsageError
from gradwire_wire.tensors.torch import torch_dtype, wire_dtype
from gradwire_wire.words import pulled_results
from gradwire_workers.torch import hooks

__all__ = [
    "add_gradient",
    "entered",
    "evaluate",
    "filled",
    "is_inexact",
    "leaves_of",
    "pull",
    "push",
    "row_operands",
]

_unsafe_view = torch.ops.aten._unsafe_view.default
_autograd_grad = torch.autograd.grad
_run_engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


class _Batch(NamedTuple):
    """A pending vmap: which of the operands have its axis, and its length."""

    axes: tuple[bool, ...]
    size: int


class Base(Protocol):
    """The user's function of flat operands.

    given_as_leaves: so many operands, the first ones, are parameters, which user code knows as leaves.
    """

    given_as_leaves: int

    def __call__(self, *operands: Any) -> Sequence[Any]:
        """Its results."""

    def avals(self, avals: Sequence[Aval]) -> list[Aval]:
        """Their shapes and dtypes."""


def is_inexact(x: Any) -> bool:
    return bool(x.is_floating_point() or x.is_complex())


def leaves_of(operands: Sequence[Any]) -> list[Any]:
    """The operands as leaves of a new graph; exact ones as they are. The same memory."""
    return [x.detach().requires_grad_() if is_inexact(x) else x for x in operands]


class _Enter(torch.autograd.Function):
    """The leaf's memory with the leaf's strides as a tensor that is neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, leaf: Any, memory: list[Any]) -> Any:
        return memory[0].data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def entered(x: Any) -> Any:
    if not x.requires_grad:
        return x
    alias = _unsafe_view(x, x.shape)
    # It may choose other strides for dimensions of length 1, and these tell channels-last from contiguous.
    return alias if alias.stride() == x.stride() else _Enter.apply(x, [x])


# ---- Evaluation of a word -------------------------------------------------------------------------------------------


def evaluate(
    base: Base,
    word: tuple[Any, ...],
    operands: Sequence[Any],
    *,
    create_graph: bool = False,
    parameters: Sequence[Any] = (),
    batches: tuple[_Batch, ...] = (),
    outermost: bool = True,
) -> list[Any]:
    """The results of the derived function at operands that are leaves or computed from leaves.

    create_graph: the results will be differentiated. parameters: those whose gradients the last
    pullback accumulates. batches: vmaps still to be applied, innermost first.
    A result of an outermost T is None where the operand is not used.
    """
    if not word:
        return _run(base, batches, operands)
    op, inner = word[-1], word[:-1]
    if op[0] == "V":
        batches = (_batch(op[1], operands, batches), *batches)
        return evaluate(
            base, inner, operands, create_graph=create_graph, parameters=parameters, batches=batches
        )
    count = len(operands) - (len(op[1]) if op[0] == "J" else op[2])
    rows = [i in op[1] or i >= count for i in range(len(operands))]
    operands = [_expanded(x, i, batches) if rows[i] else x for i, x in enumerate(operands)]
    inner_batches = tuple(
        _Batch(tuple(a or r for a, r in zip(b.axes, rows))[:count], b.size) for b in batches
    )
    results = evaluate(
        base, inner, operands[:count], create_graph=True, batches=inner_batches, outermost=False
    )
    results = [y for y in results if is_inexact(y)]
    wrt = [operands[i] for i in op[1]]
    if op[0] == "J":
        return push(results, wrt, operands[count:], create_graph=create_graph)
    results = pulled_results(op, results)
    grads = pull(results, wrt, operands[count:], create_graph=create_graph, parameters=parameters)
    return grads if outermost and not batches else filled(grads, wrt)


def filled(grads: Sequence[Any], wrt: Sequence[Any]) -> list[Any]:
    """Cotangents with zeros in place of None."""
    return [torch.zeros_like(x, requires_grad=False) if g is None else g for g, x in zip(grads, wrt)]


def _batch(axes: tuple[bool, ...], operands: Sequence[Any], outer: tuple[_Batch, ...]) -> _Batch:
    at = axes.index(True)
    return _Batch(axes, operands[at].shape[sum(b.axes[at] for b in outer)])


def _expanded(x: Any, i: int, batches: tuple[_Batch, ...]) -> Any:
    """The operand with an axis for every pending batch, outermost first. No memory."""
    for dim, batch in enumerate(reversed(batches)):
        if not batch.axes[i]:
            x = x.unsqueeze(dim)
            x = x.expand(*x.shape[:dim], batch.size, *x.shape[dim + 1 :])
    return x


_ABOUT_VMAP = re.compile(r"vmap|functorch|atched tensor|atching rule|cannot register a hook")


def _run(base: Base, batches: tuple[_Batch, ...], operands: Sequence[Any]) -> list[Any]:
    if any(batch.size == 0 for batch in batches):  # vmap itself fails at many operations
        return _empty(base, batches, operands)
    call: Callable[..., Sequence[Any]] = base
    for batch in batches:
        in_dims = tuple(0 if mapped else None for mapped in batch.axes)
        call = torch.func.vmap(call, in_dims=in_dims, randomness="different")
    hooked = hooks.set_up()
    try:
        leaves = base.given_as_leaves
        results = list(call(*operands[:leaves], *[entered(x) for x in operands[leaves:]]))
        if batches and hooks.set_up() != hooked and any(x.requires_grad for x in operands):
            raise UsageError(
                "a module in this function has backward hooks, which torch leaves out under vmap, and its gradient is asked "
                'for in a batch (vmap of grad, jacrev). options(vmap="sequential") calls it once per row'
            )
        return results
    except RuntimeError as error:
        if batches and _ABOUT_VMAP.search(str(error)):
            raise UsageError(
                f'torch.func.vmap cannot batch this function: {error}. options(vmap="sequential") calls it once per row'
            ) from error
        raise


def _empty(base: Base, batches: tuple[_Batch, ...], operands: Sequence[Any]) -> list[Any]:
    sizes = [batch.size for batch in reversed(batches)]
    rows = [
        Aval(tuple(x.shape[sum(batch.axes[i] for batch in batches) :]), wire_dtype(x.dtype))
        for i, x in enumerate(operands)
    ]
    return [torch.empty((*sizes, *y.shape), dtype=torch_dtype(y.dtype)) for y in base.avals(rows)]


# ---- The two derivatives ---------------------------------------------------------------------------------------------


def pull(
    results: Sequence[Any],
    wrt: Sequence[Any],
    cotangents: Sequence[Any],
    *,
    create_graph: bool = False,
    parameters: Sequence[Any] = (),
    rows: bool = False,
) -> list[Any]:
    """Cotangents of ``wrt`` (None where unused), and gradients added to ``parameters``. Keeps the graph.

    rows: these are rows of cotangents, and so is what comes out; no parameters then.
    """
    pairs = [(y, c) for y, c in zip(results, cotangents) if y.requires_grad]
    inputs = [x for x in wrt if x.requires_grad]
    if not pairs or not (inputs or parameters):
        return [None] * len(wrt)
    ys, cts = zip(*pairs)
    if rows:
        grads = _grad_of_rows(ys, inputs, cts)
    elif not parameters:
        grads = _grad(ys, inputs, cts, create_graph)
    elif create_graph or not all(x.is_leaf for x in inputs):
        both = [*inputs, *parameters]
        grads = _autograd_grad(ys, both, cts, retain_graph=True, create_graph=create_graph, allow_unused=True)
        for p, g in zip(parameters, grads[len(inputs) :]):
            _accumulate(p, g)
    else:
        grads = _accumulating_grad(ys, inputs, cts, parameters)
    found = iter(grads)
    return [_dense(next(found)) if x.requires_grad else None for x in wrt]


def _is_plain(ys: Sequence[Any], cts: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether torch would find nothing to say about these before it runs its engine.

    What `torch.autograd` asks there takes as long as the backward pass of a small layer.
    """
    if _run_engine is None or has_torch_function((*ys, *cts, *inputs)):
        return False
    return all(y.dtype == c.dtype and not y.is_nested and y.shape == c.shape for y, c in zip(ys, cts))


def _grad(ys: Any, inputs: Sequence[Any], cts: Any, create_graph: bool) -> Sequence[Any]:
    if _is_plain(ys, cts, inputs):
        grads: Sequence[Any] = _run_engine(ys, cts, True, create_graph, tuple(inputs), True, False)
        return grads
    return _autograd_grad(ys, inputs, cts, retain_graph=True, create_graph=create_graph, allow_unused=True)


def _grad_of_rows(ys: Any, inputs: Sequence[Any], cts: Any) -> Sequence[Any]:
    """torch's engine under its vmap."""
    grads: Sequence[Any] = _autograd_grad(
        ys, inputs, cts, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    return grads


def _accumulating_grad(ys: Any, leaves: Sequence[Any], cts: Any, parameters: Sequence[Any]) -> list[Any]:
    """torch's own accumulation: it knows which gradients may be kept without a copy."""
    for x in leaves:
        x.grad = None
    inputs = (*leaves, *parameters)
    if _is_plain(ys, cts, inputs):
        _run_engine(ys, cts, True, False, inputs, True, True)
    else:
        torch.autograd.backward(ys, cts, retain_graph=True, inputs=inputs)
    grads = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    return grads


def add_gradient(loss: Any) -> None:
    """That of a real number to those of the leaves it depends on: ``loss.backward()``. Frees the graph."""
    if not loss.requires_grad:
        return
    ys, cts = (loss,), (torch.ones_like(loss),)
    if _is_plain(ys, cts, ()):
        _run_engine(ys, cts, False, False, (), True, True)
    else:
        torch.autograd.backward(ys, cts)


def _accumulate(p: Any, grad: Any) -> None:
    if grad is None:
        return
    if p.grad is None:
        p.grad = torch.empty_like(p).copy_(grad.detach())
    else:
        p.grad = p.grad + grad.detach()


def _dense(grad: Any) -> Any:
    return grad if grad is None or grad.layout is torch.strided else grad.to_dense()


def push(
    results: Sequence[Any],
    wrt: Sequence[Any],
    tangents: Sequence[Any],
    *,
    create_graph: bool = False,
    rows: bool = False,
) -> list[Any]:
    """Tangents of the results: the pullback's pullback with respect to its cotangents. Keeps the graph.

    rows: of tangents, for rows of results.
    """
    ys = [y for y in results if y.requires_grad]
    pairs = [(x, d) for x, d in zip(wrt, tangents) if x.requires_grad]
    found: dict[int, Any] = {}
    if ys and pairs:
        us = [torch.ones_like(y, requires_grad=True) for y in ys]
        xs, ds = zip(*pairs)
        grads = _autograd_grad(ys, xs, us, create_graph=True, allow_unused=True)
        used = [(g, d) for g, d in zip(grads, ds) if _depends(g)]
        if used:
            gs, ds = zip(*used)
            if rows:
                ts = _grad_of_rows(gs, us, ds)
            else:
                ts = _autograd_grad(
                    gs, us, ds, retain_graph=True, create_graph=create_graph, allow_unused=True
                )
            found = {id(y): t for y, t in zip(ys, ts) if t is not None}
    size = (tangents[0].shape[0],) if rows else ()
    return [found[id(y)] if id(y) in found else y.new_zeros((*size, *y.shape)) for y in results]


def _depends(grad: Any) -> bool:
    """Whether a gradient depends on the cotangents, which are ones; a constant other than zero cannot be right."""
    if grad is None or grad.requires_grad:
        return grad is not None
    if bool((grad != 0).any()):
        raise UsageError(
            "forward mode needs a backward that can itself be differentiated, and a torch.autograd.Function in this "
            "call has one that cannot (it detaches, or computes outside torch). Write its backward with torch operations"
        )
    return False


def row_operands(operands: Sequence[Any], axes: tuple[bool, ...]) -> tuple[list[Any], tuple[bool, ...], int]:
    """Operands and axes of a batch in which everything differentiable has a row of its own; its size."""
    batch = _batch(axes, operands, ())
    rows = [_expanded(x, i, (batch,)) if is_inexact(x) else x for i, x in enumerate(operands)]
    return rows, tuple(mapped or is_inexact(x) for x, mapped in zip(operands, axes)), batch.size
