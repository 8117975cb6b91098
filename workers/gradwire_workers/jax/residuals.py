"""Kept forwards: see `gradwire_workers.program.Residual`.

`Compiled` has the leaves of a compiled pullback, `Interpreted` JAX's own closure of an eager run,
`Recomputed` nothing but the operands. What one of them cannot do, the program computes afresh from the
operands: exact for a traced function, whose jaxpr has no choice, and for an eager one that is a function.
"""

from __future__ import annotations

from typing import Any, Sequence

import jax
import numpy as np

from gradwire_wire.words import pulled_results
from gradwire_workers.jax.compiled import KeepPlan
from gradwire_workers.jax.words import adjoint, is_inexact, takes_zeros, whole
from gradwire_workers.program import Program, Residual, WorkerSite

__all__ = ["Compiled", "Interpreted", "Recomputed"]


class Recomputed(Residual):
    """The operands of ``word`` alone; every derivative runs the forward again. The way out of the others."""

    def __init__(
        self,
        program: Program,
        site: WorkerSite,
        word: tuple[Any, ...],
        operands: Sequence[Any],
        nbytes: int = 0,
    ) -> None:
        self._program, self._site, self._word = program, site, word
        self._operands = tuple(operands)
        self.nbytes = nbytes or sum(x.nbytes for x in operands)

    def derive(
        self, op: tuple[Any, ...], linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], Residual | None]:
        """Nothing is accumulated: a JAX function owns no parameters."""
        word, operands = (*self._word, op), [*self._operands, *linear]
        if keep:
            result, residual = self._program.keep(self._site, word, operands)
            return list(result.tensors), residual
        return list(self._program.run(self._site, word, operands).tensors), None

    def differentiated(self, primals: tuple[tuple[Any, ...], ...]) -> Recomputed:
        return Recomputed(self._program, self._site, (*self._word, *primals), self._operands)

    def derive_rows(
        self, op: tuple[Any, ...], axes: tuple[bool, ...], linear: Sequence[Any], rows: np.ndarray
    ) -> list[Any] | None:
        if not self._whole_batch(axes, linear, rows):
            return None
        word, operands = (op, ("V", tuple(axes))), [*self._operands, *linear]
        return list(self._program.run(self._site, word, operands).tensors)

    def derive_batch(
        self, op: tuple[Any, ...], mapped: tuple[bool, ...], linear: Sequence[Any]
    ) -> list[Any] | None:
        axes = (False,) * len(self._operands) + tuple(mapped)
        word, operands = (*self._word, op, ("V", axes)), [*self._operands, *linear]
        return list(self._program.run(self._site, word, operands).tensors)

    def _whole_batch(self, axes: tuple[bool, ...], linear: Sequence[Any], rows: np.ndarray) -> bool:
        """Whether the kept batch is asked for as it is: the same axes, all rows in their order."""
        if (
            not linear
            or len(self._word) != 1
            or self._word[0] != ("V", tuple(axes[: len(axes) - len(linear)]))
        ):
            return False
        size = next(x.shape[0] for x, mapped in zip(self._operands, self._word[0][1]) if mapped)
        return np.array_equal(rows, np.arange(size))


class Compiled(Recomputed):
    """Leaves for the compiled pullback of ``plan``."""

    def __init__(
        self,
        plan: KeepPlan,
        leaves: list[Any],
        nbytes: int,
        program: Program,
        site: WorkerSite,
        word: tuple[Any, ...],
        operands: Sequence[Any],
    ) -> None:
        super().__init__(program, site, word, operands, nbytes)
        self._plan, self._leaves = plan, leaves

    def derive(
        self, op: tuple[Any, ...], linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], Residual | None]:
        if self._has_pullback(op) and not keep and self._plan.axes is None:
            try:
                return self._plan.pull(op, self._leaves, linear), None
            except Exception as error:
                del error  # the closure moves every operand; the one asked for may have a pullback by itself
        return super().derive(op, linear, keep=keep, accumulate=accumulate)

    def derive_rows(
        self, op: tuple[Any, ...], axes: tuple[bool, ...], linear: Sequence[Any], rows: np.ndarray
    ) -> list[Any] | None:
        if self._has_pullback(op) and self._whole_batch(axes, linear, rows):
            return self._plan.pull(op, self._leaves, linear, tuple(axes[len(axes) - len(linear) :]))
        return super().derive_rows(op, axes, linear, rows)

    def derive_batch(
        self, op: tuple[Any, ...], mapped: tuple[bool, ...], linear: Sequence[Any]
    ) -> list[Any] | None:
        if self._has_pullback(op) and self._plan.axes is None:
            try:
                return self._plan.pull(op, self._leaves, linear, tuple(mapped))
            except Exception as error:
                del error  # as in `derive`
        return super().derive_batch(op, mapped, linear)

    @staticmethod
    def _has_pullback(op: tuple[Any, ...]) -> bool:
        """Whether this is one that the closure gives: of some results alone only where it takes no zeros for the others."""
        return op[0] == "T" and (len(op) == 3 or takes_zeros())


class Interpreted(Recomputed):
    """JAX's closure of one eager run: it agrees with that run whatever the user's Python does next time."""

    def __init__(
        self,
        results: Sequence[Any],
        pullback: Any,
        program: Program,
        site: WorkerSite,
        word: tuple[Any, ...],
        operands: Sequence[Any],
        lifted: int,
    ) -> None:
        held = {id(x): x.nbytes for x in (*operands, *jax.tree_util.tree_leaves(pullback))}
        shared = {id(x) for x in operands[:lifted]}
        super().__init__(program, site, word, operands, sum(held[x] for x in held.keys() - shared))
        self._pullback = pullback
        self._positions = {i: k for k, i in enumerate(i for i, x in enumerate(operands) if is_inexact(x))}
        self._cotangents = _like(results)

    def derive(
        self, op: tuple[Any, ...], linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], Residual | None]:
        if keep:
            return super().derive(op, linear, keep=keep, accumulate=accumulate)
        made = self._pulled(op, linear) if op[0] == "T" else self._pushed(op[1], linear)
        return jax.block_until_ready(made), None

    def derive_batch(
        self, op: tuple[Any, ...], mapped: tuple[bool, ...], linear: Sequence[Any]
    ) -> list[Any] | None:
        return None

    def _pulled(self, op: tuple[Any, ...], cotangents: Sequence[Any]) -> list[Any]:
        given = [adjoint(jax.numpy.asarray(c)) for c in cotangents]
        bars = self._bars(op, given)
        return [adjoint(bars[self._positions[i]]) if i in self._positions else None for i in op[1]]

    def _bars(self, op: tuple[Any, ...], given: list[Any]) -> Sequence[Any]:
        """An older JAX gets zeros only where a rule of the user's is not linear: else its tangent, with what has no part left out, is transposed."""
        if len(op) == 4 and not takes_zeros():
            try:
                return self._bars_of_some(op, given)
            except Exception as error:
                del error  # many kinds, of rules that have no transpose
        return self._pullback(whole(op, given, self._cotangents))

    def _bars_of_some(self, op: tuple[Any, ...], given: list[Any]) -> Sequence[Any]:
        tangent = jax.linear_transpose(self._pullback, self._cotangents)

        def along(directions: Any) -> list[Any]:
            return pulled_results(op, tangent(directions)[0])

        return jax.linear_transpose(along, _like(self._operands))(given)[0]

    def _pushed(self, wrt: tuple[int, ...], tangents: Sequence[Any]) -> list[Any]:
        """The tangent is the transpose of the pullback, in JAX's convention for both."""
        moving = {self._positions[i]: t for i, t in zip(wrt, tangents) if i in self._positions}

        def pull(cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
            bars = self._pullback(cotangents)
            return tuple(bars[k] for k in moving)

        return list(jax.linear_transpose(pull, self._cotangents)(tuple(moving.values()))[0])


def _like(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Shapes and dtypes of those that have derivatives."""
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays if is_inexact(x))
