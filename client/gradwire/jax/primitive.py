"""One primitive whose parameter says which derived function of a remote function it is, and JAX's rules for it.

Operands: the token of a kept forward if ``derived.token_ops`` is not None, then what the word takes. Results:
what the word gives, then a token if ``derived.keep``. The tangent and the pullback transpose into each other,
the batched form stacks on either, so no order and no mix of transformations is special. All names are public.

A forward that is differentiated keeps its graph in the worker, and its derivatives name the token; a rule for
dead code takes that back where nothing derives from it. Nodes that move state carry JAX's ordered effect.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from gradwire.jax.derived import KEEP_STAMP, STAMPED, Derived, describe
from gradwire.jax.symbols import spec_of
from gradwire_wire.carriers import Aval
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import UsageError
from gradwire_wire.messages import KEEP, KEEP_NOTHING, KEEP_ROWS
from gradwire_wire.tensors import jax as tensors
from gradwire_wire.words import linear_count, operands_of_function, pullback_op, pulled_results, result_avals

__all__ = ["bind", "ordered_effect", "primitive", "results_of"]

primitive = Primitive("gradwire")
primitive.multiple_results = True

# JAX remembers what types a node's results have, by its parameters: where it can hold these weakly (from 0.8) it is to, for they keep the
# target in its worker. There is no public way; without it a target goes when JAX has met 2,048 others, or with jax.clear_caches().
_held_weakly: set[type] = getattr(sys.modules.get("jax._src.util"), "weakref_cache_key_types", set())
_held_weakly.add(Derived)

_typeof = getattr(jax, "typeof", None) or jax.core.get_aval


def bind(derived: Derived, token: Any, operands: Sequence[Any]) -> list[Any]:
    """The node at these operands. ``token``: an array exactly if ``derived.token_ops`` says so, else None."""
    values = _varying_together([*([] if token is None else [token]), *operands])
    return primitive.bind(*values, derived=derived)


def _split(derived: Derived, values: Sequence[Any]) -> tuple[Any, list[Any]]:
    """(token or None, operands)"""
    return (None, list(values)) if derived.token_ops is None else (values[0], list(values[1:]))


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(_typeof(x).dtype, jnp.inexact))


# ---- In shard_map --------------------------------------------------------------------------------------------------


def _varying_axes(aval: Any) -> frozenset[Any]:
    """The axes of a mesh over which a value of this type differs, as `jax.shard_map` tracks it; later JAX has a type for it."""
    return frozenset(getattr(getattr(aval, "mat", None), "varying", ()) or getattr(aval, "vma", ()))


def _varying_together(values: list[Any]) -> list[Any]:
    """Operands that all differ over the same axes: so the pullback sums a shared one's cotangents over the shards."""
    own = [_varying_axes(_typeof(x)) for x in values]
    every = frozenset().union(*own)
    if not every:
        return values
    return [
        _varied(x, tuple(sorted(every - axes))) if every - axes else x
        for x, axes in zip(values, own, strict=True)
    ]


def _varied(x: Any, axes: tuple[Any, ...]) -> Any:
    pcast = getattr(jax.lax, "pcast", None)
    return jax.lax.pvary(x, axes) if pcast is None else pcast(x, axes, to="varying")


def _result_type(aval: Aval, operands: Sequence[Any]) -> Any:
    """Of a result of these: it differs over the axes over which they do."""
    dtype = tensors.element_type(aval.dtype)
    like = next((x for x in operands if _varying_axes(x)), None)
    if like is None:
        return ShapedArray(aval.shape, dtype)
    sharding = like.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(aval.shape)))
    return like.update(shape=aval.shape, dtype=dtype, weak_type=False, sharding=sharding)


# ---- Abstract evaluation -------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def ordered_effect() -> Any:
    """JAX's effect of ordered I/O, read off a program that has it: there is no public name for it."""
    scalar = jax.ShapeDtypeStruct((), np.float32)
    (effect,) = jax.make_jaxpr(lambda x: io_callback(lambda v: v, scalar, x, ordered=True))(scalar).effects
    return effect


def results_of(derived: Derived, operands: Sequence[Any]) -> list[Aval]:
    """Shapes and dtypes of the results, the token left out. ``operands``: values, which JAX may have as Python scalars, or abstract."""
    return result_avals(
        derived.word,
        [tensors.aval(x if hasattr(x, "shape") else _typeof(x)) for x in operands],
        lambda avals: spec_of(derived.handle, derived.site, avals).avals,
    )


def _has_rules(derived: Derived, operands: Sequence[Any]) -> bool:
    """Whether the remote function has derivative rules of its own."""
    avals = [tensors.aval(x if hasattr(x, "shape") else _typeof(x)) for x in operands]
    return spec_of(derived.handle, derived.site, operands_of_function(derived.word, avals)).has_rules


@primitive.def_effectful_abstract_eval
def _abstract(*avals: Any, derived: Derived) -> tuple[list[Any], set[Any]]:
    _, operands = _split(derived, avals)
    results = [_result_type(a, avals) for a in results_of(derived, operands)]
    if derived.keep:
        rows = results[0].shape[:1] if derived.keep == KEEP_ROWS else ()
        results.append(_result_type(Aval((*rows, 2), BY_NAME["uint32"]), avals))
    return results, {ordered_effect()} if derived.ordered else set()


# ---- Forward mode --------------------------------------------------------------------------------------------------


def _zero(x: Any) -> Any:
    aval = _typeof(x)
    return ad.Zero(aval.to_tangent_aval() if hasattr(aval, "to_tangent_aval") else aval.at_least_vspace())


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, derived: Derived) -> tuple[list[Any], list[Any]]:
    token, operands = _split(derived, primals)
    _, directions = _split(derived, tangents)
    moving = [
        i
        for i, (x, d) in enumerate(zip(operands, directions, strict=True))
        if type(d) is not ad.Zero and _is_inexact(x)
    ]
    if not (moving and any(a.dtype.is_inexact for a in results_of(derived, operands))):
        results = bind(derived, token, operands)
        return results, [_zero(y) for y in results]
    fixed = len(operands) - linear_count(derived.word)
    has_rules = _has_rules(derived, operands)
    is_linear = moving[0] >= fixed and not derived.keep and not has_rules
    if is_linear:  # in all that moves: it is its own tangent
        lines = [ad.instantiate_zeros(d) for d in directions[fixed:]]
        quiet = replace(derived, quiet=True)
        return bind(derived, token, operands), bind(quiet, token, [*operands[:fixed], *lines])
    lines = [directions[i] for i in moving]
    return _jvp_of_forward(derived, token, operands, tuple(moving), lines, has_rules)


def _jvp_of_forward(
    derived: Derived,
    token: Any,
    operands: list[Any],
    moving: tuple[int, ...],
    lines: list[Any],
    has_rules: bool,
) -> tuple[list[Any], list[Any]]:
    """The node with its graph kept, and its tangent from that graph.

    Where the function has rules of its own, they are used up by this derivative: a further one derives what they compute,
    in JAX, and here ('P', moving).
    """
    op = ("J", moving)
    primal = replace(derived, primals=(*derived.primals, ("P", moving))) if has_rules else derived
    # What rows of cotangents or tangents make of one forward is not kept: it has no graph of its own there.
    is_afresh = derived.site.residuals != "keep" or (token is not None and derived.is_batched)
    if is_afresh and not derived.keep:
        *results, stamp = bind(replace(primal, keep=KEEP_STAMP), token, operands)
        moved = bind(derived.then(op, STAMPED), stamp, [*operands, *lines])
        kept = None
    elif derived.keep == KEEP_ROWS or is_afresh:  # rows have no graph of graphs
        results = bind(primal, token, operands)
        moved = bind(derived.then(op, None), None, [*operands, *lines])
        kept = results.pop() if derived.keep else None
    else:
        *results, kept = bind(replace(primal, keep=KEEP), token, operands)
        moved = bind(derived.then(op, len(derived.word)), kept, [*operands, *lines])
    directions = iter(moved)
    moves = [next(directions) if _is_inexact(y) else _zero(y) for y in results]
    return (results + [kept], moves + [_zero(kept)]) if derived.keep else (results, moves)


ad.primitive_jvps[primitive] = _jvp


# ---- Transposition -------------------------------------------------------------------------------------------------


def _transpose(cotangents: Sequence[Any], *values: Any, derived: Derived) -> list[Any]:
    """J into T and T into J; batch axes that a linear operand does not have are summed over."""
    token, operands = _split(derived, values)
    word = derived.word
    fixed = len(operands) - linear_count(word)
    if any(map(ad.is_undefined_primal, operands[:fixed])):
        raise UsageError(
            f"{describe(derived)} cannot be transposed (for jax.linear_transpose, or for the gradient of a linear solve such as gmres): "
            "whether the target is linear is not known. If it is, pass its derivative, which is the same function and is known to be "
            "linear: jax.linearize(f, x)[1] in the place of f"
        )
    at = max(i for i, op in enumerate(word) if op[0] != "V")
    op, batches = word[at], word[at + 1 :]
    wanted = [j for j, x in enumerate(operands[fixed:]) if ad.is_undefined_primal(x)]
    if op[0] == "J":
        turned = pullback_op([op[1][j] for j in wanted], [type(c) is not ad.Zero for c in cotangents])
    else:
        turned = ("J", tuple(i for i, c in zip(op[1], cotangents, strict=True) if type(c) is not ad.Zero))
    lines = [c for c in cotangents if type(c) is not ad.Zero]
    axes = [("V", v[1][:fixed] + (True,) * len(lines)) for v in batches]
    new = replace(derived.then(turned, derived.token_ops), word=(*word[:at], turned, *axes))
    results = bind(new, token, [*operands[:fixed], *lines])
    if op[0] == "T":
        results = [pulled_results(op, results)[j] for j in wanted]
    answers = [None] * len(values)
    for j, y in zip(wanted, results, strict=True):
        own = _sum_shared(y, [v[1][fixed + j] for v in batches])
        answers[len(values) - len(operands) + fixed + j] = _typed_as(own, operands[fixed + j].aval)
    return answers


def _typed_as(cotangent: Any, aval: Any) -> Any:
    """The cotangent of its operand's type: weak, and on a mesh with explicit axes where that says; our results are neither."""
    if tensors.is_weak(aval):
        cotangent = tensors.weakened(cotangent)
    spec = _spec_of(aval)
    if not any(spec) or spec == _spec_of(_typeof(cotangent)):
        return cotangent
    return jax.sharding.reshard(cotangent, aval.sharding)


def _spec_of(aval: Any) -> tuple[Any, ...]:
    return tuple(getattr(getattr(aval, "sharding", None), "spec", ()))


def _sum_shared(x: Any, mapped: Sequence[bool]) -> Any:
    """Sum over the leading axes of batches that the operand was shared by; ``mapped``: innermost first."""
    axes = tuple(i for i, own in enumerate(reversed(mapped)) if not own)
    return x.sum(axis=axes) if axes else x


ad.primitive_transposes[primitive] = _transpose


# ---- Batching ------------------------------------------------------------------------------------------------------


def _batch(args: Sequence[Any], dims: Sequence[Any], *, derived: Derived) -> tuple[list[Any], list[Any]]:
    args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    mapped = [d is not None for d in dims]
    results, own = _batched(args, mapped, derived)
    like = _typeof(args[mapped.index(True)])
    return [y if d is None else _placed_by_row(y, like) for y, d in zip(results, own, strict=True)], own


def _placed_by_row(result: Any, like: Any) -> Any:
    """The result with its rows where the operands have theirs, if their types say so (a mesh with explicit axes)."""
    spec = _spec_of(like)
    if not any(spec[:1]):
        return result
    parts = jax.sharding.PartitionSpec(spec[0], *[None] * (result.ndim - 1))
    return jax.sharding.reshard(result, like.sharding.update(spec=parts))


def _batched(args: list[Any], mapped: list[bool], derived: Derived) -> tuple[list[Any], list[Any]]:
    """Results and their batched axes, of operands whose batched axis is the first."""
    if (
        derived.site.vmap == "sequential"
        or _has_seeds(derived, mapped)
        or (derived.site.stateful and not derived.moves_state)
    ):
        return _row_by_row(args, mapped, derived)
    if derived.moves_state:
        raise UsageError(
            f"vmap over {describe(derived)}, which moves the state of its module: one batched call and one call for "
            "each row differ there. For the latter say remote.options(vmap='sequential'); for the former let the "
            "remote function take the whole batch, or call it in eval mode"
        )
    token, operands = _split(derived, args)
    axes = tuple(mapped[len(args) - len(operands) :])
    if token is not None and mapped[0] and token.ndim != 2:
        derived = replace(derived, token_ops=STAMPED)  # rows of rows: afresh
    if not any(axes):  # the token alone is mapped, and the primals are those of every row
        results, own = _bind_without_keeping(replace(derived, token_ops=None), None, operands)
        return results, [None] * len(results)
    op = ("V", axes)
    if derived.keep == KEEP and token is None and not derived.is_batched:
        results = bind(replace(derived, word=(*derived.word, op), keep=KEEP_ROWS), None, operands)
        return results, [0] * len(results)
    results, own = _bind_without_keeping(replace(derived, word=(*derived.word, op)), token, operands)
    return results, [0] * own + [None] * (len(results) - own)


def _has_seeds(derived: Derived, mapped: Sequence[bool]) -> bool:
    """Whether each row has a seed of its own."""
    return derived.site.seeded and mapped[(derived.token_ops is not None) + derived.site.anchored]


def _bind_without_keeping(derived: Derived, token: Any, operands: list[Any]) -> tuple[list[Any], int]:
    """Results, with stamps where tokens are expected; and how many are none of those."""
    if not derived.keep:
        results = bind(derived, token, operands)
        return results, len(results)
    *results, stamp = bind(replace(derived, keep=KEEP_STAMP), token, operands)
    rows = results[0].shape[1:2] if derived.keep == KEEP_ROWS else ()
    return [*results, jnp.broadcast_to(stamp, (*rows, 2))], len(results)


def _row_by_row(args: list[Any], mapped: list[bool], derived: Derived) -> tuple[list[Any], list[Any]]:
    """A call for each row, first row first."""

    def one(row: Sequence[Any]) -> list[Any]:
        values = iter(row)
        operands = [next(values) if own else x for x, own in zip(args, mapped, strict=True)]
        return primitive.bind(*operands, derived=derived)

    results = jax.lax.map(one, [x for x, own in zip(args, mapped, strict=True) if own])
    return results, [0] * len(results)


batching.primitive_batchers[primitive] = _batch


# ---- Dead code -----------------------------------------------------------------------------------------------------


def _remove_dead(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """A node nobody uses goes, unless it moves state; a graph nobody derives from is not kept."""
    equation = rest[-1]  # jax 0.12 has a further argument before it
    derived = equation.params["derived"]
    if not any(used) and not derived.ordered:
        return [False] * len(equation.invars), None
    if derived.keep and not used[-1] and not (derived.primals and derived.moves_state):
        equation = equation.replace(
            params={**equation.params, "derived": replace(derived, keep=KEEP_NOTHING)},
            outvars=equation.outvars[:-1],
        )
    return [True] * len(equation.invars), equation


pe.dce_rules[primitive] = _remove_dead


def _partially_evaluate(trace: Any, *tracers: Any, derived: Derived) -> Any:
    """JAX moves what does not depend on the loop's variables out of a differentiated `scan`: not a call with state.

    There all inputs of such a call are known, and without this rule it would be made once instead of once an
    iteration. Staged like a call with unknown inputs, it stays in the loop.
    """
    if derived.ordered and _is_hoisting():
        own = getattr(trace, "to_jaxpr_tracer", lambda t: t)  # up to jax 0.4.35 they are its own already
        tracers = tuple(trace.instantiate_const(own(t)) for t in tracers)
    return trace.default_process_primitive(primitive, tracers, {"derived": derived})


def _bind_unless_moved_out(*values: Any, derived: Derived) -> list[Any]:
    """For JAX before 0.4.36, which asks no rule about what is known, and would make such a call once: UsageError."""
    if derived.ordered and _is_hoisting() and not any(hasattr(x, "pval") for x in values):
        raise UsageError(
            f"{describe(derived)} moves the state of its module, and JAX {jax.__version__} would make it once instead of once "
            "an iteration of this differentiated scan. Give it an argument that depends on the loop, or use JAX 0.4.36 or newer"
        )
    found: list[Any] = Primitive.bind(primitive, *values, derived=derived)
    return found


def _is_hoisting() -> bool:
    """Whether scan's rule is looking for what it can move out; told by the names of JAX's functions on the stack.

    A split of known from unknown is another matter, unless it is that of an inner jit which scan's rule came upon.
    """
    frame: FrameType | None = sys._getframe(1)
    is_split = False
    while frame is not None:
        name = frame.f_code.co_name
        if name.startswith("partial_eval_jaxpr_nounits"):
            is_split = True
        elif name == "_pjit_partial_eval":
            is_split = False
        elif name == "_scan_known_hoisting":
            return True
        elif name == "_scan_partial_eval":
            return not is_split
        frame = frame.f_back
    return False


pe.custom_partial_eval_rules[primitive] = _partially_evaluate
if jax.__version_info__ < (0, 4, 36):
    primitive.bind = _bind_unless_moved_out
