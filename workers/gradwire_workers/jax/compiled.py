"""Words of a traced function as compiled programs, for one signature each.

A kept forward returns the leaves of JAX's pullback closure, without those that somebody has already:
operands, results and closed-over constants (the weights, mostly). The pullback puts them together again.

Nothing is returned before it is ready. Operands alias memory whose next tenant may come as soon as the
reply is sent: a residual still being computed then mixes old and new contents.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp

from gradwire_workers.jax.functions import Signature, Traced
from gradwire_workers.jax.words import adjoint, derived, is_inexact, pullback_of, whole

__all__ = ["KeepPlan", "RunPlan"]

OPERAND, RESULT, CONSTANT, OWN, LITERAL = range(5)


class RunPlan:
    """The derived function ``word``, compiled; a call waits for its results."""

    def __init__(self, function: Traced, word: tuple[Any, ...]) -> None:
        self._function, self._word = function, word
        self._compiled = jax.jit(self._evaluate)

    def _evaluate(self, consts: list[Any], operands: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self._word:
            return self._function.forward(consts, *operands)
        return derived(partial(self._function.call, consts), self._word)(*operands)

    def __call__(self, operands: Sequence[Any]) -> Sequence[Any]:
        results = self._compiled(self._function.consts, tuple(operands))
        _wait_ready(self._function, results)
        if not self._word:
            return self._function.settled(results)
        if len(self._word) == 1 and self._word[0][0] == "T":
            return unused_as_none(self._function, self._word[0][1], results)
        return results


class Leaf(NamedTuple):
    """Where a leaf of the pullback closure is found: the kind of place, and its number there (LITERAL: itself)."""

    place: int
    at: Any


class KeepPlan:
    """The forward of ``word`` with its pullback kept; with ``axes``, of a batch whose rows each keep theirs.

    The forward is traced at its first call, which fixes ``_treedef`` and ``_places`` of the closure, and what the results are like
    that it takes cotangents of (``_inexact``).
    """

    def __init__(
        self,
        function: Traced,
        word: tuple[Any, ...],
        signature: Signature,
        axes: tuple[bool, ...] | None = None,
    ) -> None:
        self.axes = axes
        self._function, self._word, self._signature = function, word, signature
        self._forward = jax.jit(self._evaluate)
        self._pullbacks: dict[Any, Callable[..., Any]] = {}
        self._treedef: Any = None
        self._inexact: list[Any] = []
        self._places: list[Leaf] = []
        self._size: int | None = None  # of the batch
        self._nbytes: int | None = None

    def __call__(self, operands: Sequence[Any]) -> tuple[Sequence[Any], list[Any], int]:
        """Results, leaves for `pull`, and the bytes that operands and leaves (but for constants) hold."""
        consts = self._function.consts
        results, own = self._forward(consts, tuple(operands))
        _wait_ready(self._function, results, own)
        places = (operands, results, consts, own)
        leaves = [places[leaf.place][leaf.at] for leaf in self._places if leaf.place != LITERAL]
        if self._nbytes is None:  # the same for every call of this signature
            used = {leaf.at for leaf in self._places if leaf.place == RESULT}
            held = (*operands[self._function.lifted :], *own, *(results[k] for k in used))
            self._nbytes = sum(x.nbytes for x in held)
        return results if self._word else self._function.settled(results), leaves, self._nbytes

    def pull(
        self,
        op: tuple[Any, ...],
        leaves: list[Any],
        linear: Sequence[Any],
        axes: tuple[bool, ...] | None = None,
    ) -> list[Any]:
        """The pullback's results; ``axes``: which cotangents have a batch's leading axis.

        That of the forward, where it is a batch; else one forward serves all rows.
        """
        compiled = self._pullbacks.get((op, axes))
        if compiled is None:
            compiled = self._pullbacks[op, axes] = jax.jit(self._pullback(op, axes))
        bars = compiled(leaves, tuple(linear))
        _wait_ready(self._function, bars)
        return list(bars) if self._word else unused_as_none(self._function, op[1], bars)

    def _evaluate(self, consts: list[Any], operands: tuple[Any, ...]) -> Any:
        call = self._function.call if self._word or self.axes is not None else self._function.forward
        forward = partial(self._keep, derived(partial(call, consts), self._word), consts)
        if self.axes is None:
            return forward(*operands)
        self._size = operands[self.axes.index(True)].shape[0]
        return jax.vmap(forward, in_axes=tuple(0 if mapped else None for mapped in self.axes))(*operands)

    def _keep(self, function: Any, consts: list[Any], *operands: Any) -> tuple[Any, list[Any]]:
        aside = 0 if self._word or self.axes is not None else self._function.moves
        results, pullback = pullback_of(function, operands, aside)
        moving = results[: len(results) - aside]
        self._inexact = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in moving if is_inexact(r)]
        leaves, self._treedef = jax.tree_util.tree_flatten(pullback)
        own: list[Any] = []
        self._places = [_place_of(leaf, operands, results, consts, own) for leaf in leaves]
        return results, own

    def _pullback(self, op: tuple[Any, ...], axes: Any) -> Callable[..., Any]:
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in self._signature]
        order = [i for i, x in enumerate(shapes) if is_inexact(x)]

        def pull(leaves: list[Any], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
            rest = iter(leaves)
            closure = [leaf.at if leaf.place == LITERAL else next(rest) for leaf in self._places]
            pullback = jax.tree_util.tree_unflatten(self._treedef, closure)
            every = whole(op, list(map(adjoint, cotangents)), self._inexact)
            bars = dict(zip(order, pullback(every)))
            return tuple(
                adjoint(bars[i]) if i in bars else jnp.zeros(shapes[i].shape, shapes[i].dtype) for i in op[1]
            )

        if axes is None:
            return pull
        leaf_axes = [self._axis(leaf) for leaf in self._places if leaf.place != LITERAL]
        # A linear function leaves nothing of its rows, and their cotangents may be one: then its size tells of the batch.
        in_axes = (leaf_axes, tuple(0 if mapped else None for mapped in axes))
        return jax.vmap(pull, in_axes=in_axes, axis_size=self._size)

    def _axis(self, leaf: Leaf) -> int | None:
        if self.axes is None:
            return None
        if leaf.place == OPERAND:
            return 0 if self.axes[leaf.at] else None
        return 0 if leaf.place in (RESULT, OWN) else None


def _place_of(
    leaf: Any, operands: Sequence[Any], results: Sequence[Any], consts: list[Any], own: list[Any]
) -> Leaf:
    for place, candidates in ((OPERAND, operands), (RESULT, results), (CONSTANT, consts)):
        for k, candidate in enumerate(candidates):
            if leaf is candidate:
                return Leaf(place, k)
    if not isinstance(leaf, jax.core.Tracer):
        return Leaf(LITERAL, leaf)
    own.append(leaf)
    return Leaf(OWN, len(own) - 1)


def unused_as_none(function: Traced, wrt: tuple[int, ...], bars: Sequence[Any]) -> list[Any]:
    """The pullback's results of F itself, None for operands that no inexact result depends on."""
    return [bar if function.used[i] else None for i, bar in zip(wrt, bars)]


def _wait_ready(function: Traced, *made: Sequence[Any]) -> None:
    for arrays in made:
        for array in arrays:
            array.block_until_ready()
    if function.has_effects:
        jax.effects_barrier()  # what it prints or calls back belongs to this call
