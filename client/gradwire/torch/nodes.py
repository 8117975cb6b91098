"""A remote call as a node of torch's autograd graph, to any order and in both directions.

`apply` evaluates a derived function and records how to differentiate it. The rules are the same wherever it
is recorded: the pullback of a function is its word with ('T', wrt, n) at the end, the tangent its word with
('J', wrt), both at the token of the function's own evaluation. There are three ways to record::

    _Node          plain autograd and forward_ad. An autograd.Function in the older form (forward gets ctx):
                   a third of the price of the newer one
    _Transformed   torch.func's transforms, which take only the newer form (setup_context), where the token
                   must be a result. Its vmap rule goes down a level with ('V', axes)
    (nothing)      nobody differentiates

Under a TorchDispatchMode (make_fx, fake tensors, flop counters) each of them evaluates through the operator
of `gradwire.torch.operator`, which such modes see; a Function's forward is Python that they would fold into a
constant. Dynamo is given the operator alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from gradwire.derived import Derived
from gradwire.torch import operator
from gradwire.torch.evaluation import evaluate, zeros_like_result
from gradwire.torch.symbols import at_this_size
from gradwire_wire.carriers import Aval
from gradwire_wire.errors import UsageError
from gradwire_wire.messages import KEEP_ROWS
from gradwire_wire.tensors.torch import aval, torch_dtype
from gradwire_wire.words import pullback_op

__all__ = ["apply", "is_quiet", "record", "records_nothing"]

_functorch_level = torch._C._functorch.peek_interpreter_stack
_functorch_levels = torch._C._functorch.get_interpreter_stack
_modes_active = torch._C._len_torch_dispatch_stack
_will_execute = torch._C._will_engine_execute_node
_is_legacy_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: False)
_saving_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
_is_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)
_is_batched, _unwrapped = torch._C._functorch.is_batchedtensor, torch._C._functorch.get_unwrapped
_VMAP = torch._C._functorch.TransformType.Vmap
_GRAD = torch._C._functorch.TransformType.Grad


def apply(fn: Derived, operands: Sequence[Any], token: Any = None) -> Sequence[Any]:
    """The results of ``fn`` at the operands, recorded for whatever will differentiate them.

    Results of a pullback may be None. ``token``: of the evaluation that ``fn`` derives, or None.
    """
    if _functorch_level() is not None:
        fn.keep = int(fn.site.residuals == "keep" and _is_differentiated(operands))
        return _Transformed.apply(fn, *operands, token)[:-1]
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return record(fn, operands, token)
    if forward_ad._current_level >= 0:
        fn.keep = int(fn.site.residuals == "keep" and any(map(_is_dual, operands)))
    else:
        return _evaluate(fn, token, operands)[0]
    return _Node.apply(fn, *operands, token)


def record(fn: Derived, operands: Sequence[Any], token: Any = None) -> Sequence[Any]:
    """`apply` where plain autograd records, and no transform is active."""
    fn.keep = int(fn.site.residuals == "keep")
    if _is_wrapped is None or any(map(_is_wrapped, operands)):  # of a transform that is over
        return _Node.apply(fn, *operands, token)
    return _apply_node(fn, *operands, token)


def is_quiet() -> bool:
    """Whether no transform and no mode would see a call: there is plain autograd, or nothing."""
    return _functorch_level() is None and not _modes_active() and forward_ad._current_level < 0


def records_nothing(accumulates: bool, operands: Sequence[torch.Tensor]) -> bool:
    """Whether a plain call would be evaluated and nothing else. accumulates: as of its site."""
    is_graph_recorded = torch.is_grad_enabled() and (accumulates or any(x.requires_grad for x in operands))
    return is_quiet() and not is_graph_recorded and not torch._C._is_tracing()


def _evaluate(fn: Derived, token: Any, operands: Sequence[Any]) -> tuple[list[Any], Any]:
    return (operator.evaluate if _modes_active() else evaluate)(fn, token, operands)


def _inexact(x: Any) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_dual(x: Any) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def _is_differentiated(operands: Sequence[Any]) -> bool:
    """Whether some level of torch.func, or plain autograd below them, differentiates this call."""
    kinds = {level.key() for level in _functorch_levels()}
    if kinds - {_VMAP, _GRAD}:
        return True  # forward mode
    return torch.is_grad_enabled() and (_GRAD in kinds or any(map(_requires_grad, operands)))


def _requires_grad(x: Any) -> bool:
    """Also under vmap, whose tensors say no."""
    while _is_batched(x):
        x = _unwrapped(x)
    return bool(x.requires_grad)


class _Node(torch.autograd.Function):
    """Plain autograd and forward_ad. Arguments: fn, the operands, the token or None."""

    @staticmethod
    def forward(ctx: Any, fn: Derived, *operands_and_token: Any) -> Any:
        *operands, token = operands_and_token
        results, kept = _evaluate(fn, token, operands)
        exact = _remember(ctx, fn, operands, results, kept)
        if exact:
            ctx.mark_non_differentiable(*exact)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return (None, *_pullback(ctx, cotangents), None)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> Any:
        kept, *duals = _saved(ctx)
        primals = [forward_ad.unpack_dual(x).primal for x in duals]
        return _tangent(ctx, kept, primals, tangents[:-1])


_apply_node = super(torch.autograd.Function, _Node).apply
"""`_Node.apply` without its look at transforms, which takes half as long as all the rest of it."""


class _Transformed(torch.autograd.Function):
    """Under torch.func. Arguments as for `_Node`; the kept token, or None, is the last result."""

    @staticmethod
    def forward(fn: Derived, *operands_and_token: Any) -> Any:
        *operands, token = operands_and_token
        results, kept = _evaluate(fn, token, operands)
        if any(y is None for y in results):  # functorch knows no None among results
            dense = [zeros_like_result(fn, i, operands) if y is None else y for i, y in enumerate(results)]
            return (*dense, kept)
        return (*results, kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        fn, *operands, _ = inputs
        *results, kept = output
        exact = _remember(ctx, fn, operands, results, kept)
        ctx.mark_non_differentiable(*exact, *([] if kept is None else [kept]))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return (None, *_pullback(ctx, cotangents[:-1]), None)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> Any:
        kept, *primals = _saved(ctx)
        return (*_tangent(ctx, kept, primals, tangents[:-1]), None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, fn: Derived, *operands_and_token: Any) -> Any:
        *operands, token = operands_and_token
        _, *dims, token_dim = in_dims
        axes = tuple(d is not None for d in dims)
        in_rows = fn.site.vmap == "sequential" or fn.site.stateful
        if in_rows and not fn.word and fn.site.vmap != "sequential":
            raise UsageError(
                f"{fn.handle.name} {fn.handle.why_it_moves}: one batched call would move its state once and draw random "
                "numbers as one call does. Use options(vmap='sequential') for a call a row, or eval() it"
            )
        moved = [x if d is None else x.movedim(d, 0) for x, d in zip(operands, dims, strict=True)]
        if token_dim is not None:
            token = token.movedim(token_dim, 0)
        if not fn.word:
            rows = [_row(x, mapped) for x, mapped in zip(moved, axes, strict=True)]
            fn.structure = fn.structure_of([at_this_size(a) for a in rows])
        batched = _row_by_row if in_rows else _as_batch
        *results, kept = batched(fn, axes, moved, token, token_dim is not None, info.batch_size)
        return (*results, kept), (*(0 for _ in results), None if kept is None else 0)


def _as_batch(
    fn: Derived, axes: tuple[bool, ...], operands: Sequence[Any], token: Any, rows: bool, size: int
) -> Sequence[Any]:
    """A level of vmap as one message: results and token with the batch in front."""
    if rows and token.ndim != 2:
        token = None  # rows of rows: computed afresh
    # Rows can be kept of a batch of F itself.
    return _Transformed.apply(fn.batched(axes, 2 if fn.keep and not fn.word else 0), *operands, token)


def _row_by_row(
    fn: Derived, axes: tuple[bool, ...], operands: Sequence[Any], token: Any, rows: bool, size: int
) -> Sequence[Any]:
    """The same with a message a row, for targets that cannot be batched: ``options(vmap="sequential")``."""
    if not size:
        avals = fn.result_avals([_row(x, mapped) for x, mapped in zip(operands, axes, strict=True)])
        return *(torch.zeros((0, *a.shape), dtype=torch_dtype(a.dtype)) for a in avals), None
    found = []
    for i in range(size):
        row = [x[i] if mapped else x for x, mapped in zip(operands, axes, strict=True)]
        found.append(_Transformed.apply(replace(fn), *row, token[i] if rows else token))
    *results, tokens = zip(*found, strict=True)
    stacked = [torch.stack(same) for same in results]
    if tokens[0] is None:
        return *stacked, None
    fn.held = tokens  # for the stack is a copy
    return *stacked, torch.stack(tokens)


def _row(x: Any, mapped: bool) -> Aval:
    shape, dtype = aval(x)
    return Aval(shape[1:] if mapped else shape, dtype)


def _remember(ctx: Any, fn: Derived, operands: Sequence[Any], results: Sequence[Any], kept: Any) -> list[Any]:
    """Note what derivatives need; the results that have none, as they are of an exact type.

    likes: shape and dtype of each result, or None. inexact: which have a cotangent or tangent; None for all of them.
    """
    ctx.fn = fn
    ctx.likes = [None if y is None else (y.shape, y.dtype) for y in results]
    exact = [y for y in results if y is not None and not _inexact(y)]
    ctx.inexact = None if not exact else [i for i, y in enumerate(results) if y is None or _inexact(y)]
    ctx.set_materialize_grads(False)
    ctx.kept = kept if _are_copies_saved() else None
    ctx.save_for_backward(kept, *operands)
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(kept, *operands)
    return exact


def _are_copies_saved() -> bool:
    """Whether hooks of the user's (`torch.autograd.graph.saved_tensors_hooks`) turn what is saved into something else.

    A copy of the token, or one in half precision, would not hold what is kept in the worker. Those of
    `torch.utils.checkpoint` are to let go of it: its forward is computed again.
    """
    hooks = _saving_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint"


def _saved(ctx: Any) -> tuple[Any, ...]:
    """The token or None, then the operands."""
    kept, *operands = ctx.saved_tensors
    kept = kept if ctx.kept is None else ctx.kept
    if (
        ctx.fn.keep == KEEP_ROWS and kept is not None
    ):  # rows of a batch, of which all is differentiated here at once
        kept = kept[0] if len(kept) else None
    return (kept, *operands)


def _pullback(ctx: Any, cotangents: Sequence[Any]) -> Sequence[Any]:
    """A cotangent, or None, for each operand of the function that ``ctx`` remembers."""
    fn = ctx.fn
    kept, *operands = _saved(ctx)
    found: list[Any] = [None] * len(operands)
    given = cotangents if ctx.inexact is None else [cotangents[i] for i in ctx.inexact]
    there = [c for c in given if c is not None]
    if not there:
        return found
    _refuse_legacy_batches(fn, there)
    anchored, needed = fn.site.anchored, ctx.needs_input_grad
    accumulate = anchored and fn.site.accumulate and _reaches_anchor(ctx)
    first = int(anchored and not accumulate)
    wrt = tuple([i for i in range(first, len(operands)) if needed[i + 1] and _inexact(operands[i])])
    if wrt:
        pullback = fn.then(pullback_op(wrt, [c is not None for c in given]), accumulate=accumulate)
        for i, c in zip(wrt, apply(pullback, (*operands, *there), kept), strict=True):
            found[i] = c
    if anchored:
        found[0] = None  # what is accumulated is in the worker
    return found


def _refuse_legacy_batches(fn: Derived, cotangents: Iterable[Any]) -> None:
    for c in cotangents:
        if c is not None and _is_legacy_batched(c):
            raise UsageError(
                f"{fn.handle.name}: is_grads_batched=True, torch.autograd.functional with vectorize=True and "
                "gradcheck(check_batched_grad=True) cannot pass through a remote call. Use torch.func.jacrev "
                "(which makes one batched pullback), or leave them out"
            )


def _reaches_anchor(ctx: Any) -> bool:
    """Whether the running backward pass goes on to the anchor, as it would to a local module's parameters.

    ``loss.backward()`` does; ``torch.autograd.grad(loss, x)`` and ``backward(inputs=[x])`` do not.
    """
    node = ctx.next_functions[0][0]
    return node is not None and _will_execute(node)


def _tangent(ctx: Any, kept: Any, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, ...]:
    """A tangent, or None, for each result of the function that ``ctx`` remembers."""
    found: list[Any] = [None] * len(ctx.likes)
    _refuse_legacy_batches(ctx.fn, tangents)
    moving = [i for i, d in enumerate(tangents) if d is not None and _inexact(primals[i])]
    if moving:
        tangent = ctx.fn.then(("J", tuple(moving)))
        every = apply(tangent, (*primals, *(tangents[i] for i in moving)), kept)
        places = range(len(every)) if ctx.inexact is None else ctx.inexact
        for i, d in zip(places, every, strict=True):
            found[i] = None if ctx.likes[i] is None else d
    return tuple(found)
