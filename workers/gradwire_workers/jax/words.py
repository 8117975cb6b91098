"""Derived functions by JAX's own transforms. Flat functions: arrays in, a tuple of arrays out.

On the wire a cotangent is the adjoint in Re<a, b>; JAX's pullback is linear in its cotangent without
conjugation. The two differ by a conjugate on either side of a pullback, and nowhere else: what is built
on top of that pullback is then right by itself, at any order.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from gradwire_wire.words import pulled_results

__all__ = ["Function", "adjoint", "derived", "is_inexact", "pullback_of", "takes_zeros", "whole"]

Function = Callable[..., Tuple[Any, ...]]


def derived(function: Function, word: Sequence[tuple[Any, ...]]) -> Function:
    """The function that the word names (see `gradwire_wire.words`)."""
    for op in _primals_first(word):
        if op[0] == "J":
            function = partial(_tangent, function, op[1])
        elif op[0] == "T":
            function = partial(_pullback, function, op)
        elif op[0] == "P":
            function = partial(_primal, function, op[1])
        else:
            function = jax.vmap(function, in_axes=tuple(0 if mapped else None for mapped in op[1]))
    return function


def _primals_first(word: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same function with the batch of a primal for the primal of a batch, which JAX 0.4.31 cannot derive."""
    ops: list[tuple[Any, ...]] = []
    for op in word:
        at = len(ops)
        while op[0] == "P" and at and ops[at - 1][0] == "V":
            at -= 1
        ops.insert(at, op)
    return ops


def is_inexact(x: Any) -> bool:
    """Whether an array's dtype has derivatives. A key's dtype does not."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def adjoint(x: Any) -> Any:
    """A cotangent in the other convention, either way."""
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def pullback_of(
    function: Function, operands: Sequence[Any], aside: int = 0, wrt: Sequence[int] | None = None
) -> tuple[tuple[Any, ...], Any]:
    """Results at ``operands``, and JAX's pullback from the inexact results to the inexact operands.

    aside: so many of the results, the last ones, have no cotangents. wrt: to these operands alone.
    """
    moving = [i for i, x in enumerate(operands) if is_inexact(x) and (wrt is None or i in wrt)]
    if not moving:
        return function(*operands), jax.tree_util.Partial(_nothing)
    kinds: list[bool] = []

    def split(*values: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        results = function(*_replaced(operands, moving, values))
        differentiated = len(results) - aside
        kinds[:] = [i < differentiated and is_inexact(r) for i, r in enumerate(results)]
        return (
            tuple(r for r, inexact in zip(results, kinds) if inexact),
            tuple(r for r, inexact in zip(results, kinds) if not inexact),
        )

    inexact, pullback, exact = jax.vjp(split, *(operands[i] for i in moving), has_aux=True)
    streams = {True: iter(inexact), False: iter(exact)}
    return tuple(next(streams[kind]) for kind in kinds), pullback


@lru_cache(maxsize=1)
def takes_zeros() -> bool:
    """Whether a pullback of this JAX takes `ad.Zero` for a cotangent, as its own transformations have it, and so computes nothing by it."""
    pullback = jax.vjp(lambda x: (x, x), np.float32(1))[1]
    try:
        pullback((np.float32(1), _zero(jax.ShapeDtypeStruct((), np.float32))))
    except Exception:
        return False
    return True


def whole(op: tuple[Any, ...], cotangents: Sequence[Any], like: Sequence[Any]) -> tuple[Any, ...]:
    """One for each inexact result. like: their shapes and dtypes. See `takes_zeros`; zeros in an older JAX."""
    given = dict(zip(pulled_results(op, range(len(like))), cotangents))
    fill = _zero if takes_zeros() else lambda x: jnp.zeros(x.shape, x.dtype)
    return tuple(given[k] if k in given else fill(x) for k, x in enumerate(like))


def _zero(like: Any) -> Any:
    return ad.Zero(jax.core.ShapedArray(like.shape, like.dtype))


def _nothing(_: tuple[Any, ...]) -> tuple[Any, ...]:
    return ()


def _replaced(operands: Sequence[Any], positions: Sequence[int], values: Sequence[Any]) -> list[Any]:
    full = list(operands)
    for i, value in zip(positions, values):
        full[i] = value
    return full


def _along(function: Function, operands: Sequence[Any], positions: Sequence[int]) -> Function:
    """The inexact results as a function of the operands at ``positions`` alone."""

    def moved(*values: Any) -> tuple[Any, ...]:
        return tuple(r for r in function(*_replaced(operands, positions, values)) if is_inexact(r))

    return moved


def _tangent(function: Function, wrt: tuple[int, ...], *operands: Any) -> tuple[Any, ...]:
    primals, tangents = operands[: len(operands) - len(wrt)], operands[len(operands) - len(wrt) :]
    moving = {i: t for i, t in zip(wrt, tangents) if is_inexact(primals[i])}
    along = _along(function, primals, list(moving))
    if not moving:
        return tuple(jnp.zeros_like(r) for r in along())
    return jax.jvp(along, tuple(primals[i] for i in moving), tuple(moving.values()))[1]


def _primal(function: Function, wrt: tuple[int, ...], *operands: Any) -> tuple[Any, ...]:
    """What JAX has in the place of the results while it derives by ``wrt``: rules of the function's own have been used."""
    return pullback_of(function, operands, wrt=wrt)[0]


def _pullback(function: Function, op: tuple[Any, ...], *operands: Any) -> tuple[Any, ...]:
    at, wrt = len(operands) - op[2], op[1]
    primals, cotangents = operands[:at], operands[at:]
    moving = [i for i in wrt if is_inexact(primals[i])]
    bars: dict[int, Any] = {}
    if moving:
        along = _along(function, primals, moving)
        _, pullback = jax.vjp(
            lambda *values: tuple(pulled_results(op, along(*values))), *(primals[i] for i in moving)
        )
        bars = dict(zip(moving, map(adjoint, pullback(tuple(map(adjoint, cotangents))))))
    return tuple(bars[i] if i in bars else jnp.zeros_like(primals[i]) for i in wrt)
