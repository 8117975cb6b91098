"""A loaded numpy callable. See `gradwire_workers.program.Program`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from gradwire_wire.carriers import Aval
from gradwire_wire.errors import UsageError
from gradwire_workers.numpy.calls import Call, Pullback, copied, filled, rows_of
from gradwire_workers.program import Program, Residual, Result, Runner, WorkerSite

__all__ = ["NumpyProgram"]


class NumpyProgram(Program):
    """One loaded target. It has no state that gradwire knows of, so its generation never changes."""

    may_have_parameters = False
    training: bool | None = None
    generation = 0

    def __init__(self, target: Callable[..., Any], is_module: bool) -> None:
        self._target, self.is_module = target, is_module

    def run(self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]) -> Result:
        call = Call(self._target, site)
        if site.seed is None:
            results = call.evaluate(word, operands)
        else:
            with _random(site.seed):
                results = call.evaluate(word, operands)
        return Result(results, b"" if word else call.structure)

    def runner(self, site: WorkerSite) -> Runner | None:
        if site.seed is not None:
            return None
        call = Call(self._target, site)

        def run(operands: Sequence[Any]) -> tuple[Sequence[Any], bytes]:
            results = call.evaluate((), operands)
            return results, call.structure

        return run

    def keep(
        self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]
    ) -> tuple[Result, NumpyResidual | NumpyDerivative]:
        call = Call(self._target, site)
        if any(op[0] != "V" for op in word):
            return self.run(site, word, operands), NumpyDerivative(call, word)
        primals = (
            [x.copy() for x in operands] if call.offers("jvp") else operands
        )  # it may write to its arguments
        with _random(site.seed):
            begun = np.random.get_state() if call.offers("jvp") else None
            if call.offers("vjp"):
                results, pullback, rows = call.vjp(word, operands)
            else:
                call.refuse_without("jvp" if call.offers("jvp") else "vjp", word)
                results, pullback, rows = call.evaluate(word, operands), None, []
        residual = NumpyResidual(call, word, primals, pullback, rows, begun)
        residual.nbytes = sum(x.nbytes for x in (*operands, *results))
        return Result(results, b"" if word else call.structure), residual

    keep_rows = keep

    @staticmethod
    def stack(rows: Sequence[Any], axis: int) -> Any:
        return np.stack(rows, axis)

    def spec(self, site: WorkerSite, avals: Sequence[Aval]) -> tuple[list[Aval], bytes]:
        call = Call(self._target, site)
        return call.spec(avals), call.structure

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            "a numpy target has no parameters, modes or optimizers that gradwire knows of. Pass what is learned as an argument"
        )

    train = parameters = buffers = state_dict = load_state_dict = grads = _refuse
    requires_grad = frozen = aliases = optimizer = functional = _refuse


class NumpyResidual(Residual):
    """A kept call: the target's own pullback, and the operands for its ``jvp``, which runs it again, with the same random numbers.

    begun: numpy's state of these before the call. nbytes: operands and results; what the pullback itself holds is not known.
    """

    nbytes = 0

    def __init__(
        self,
        call: Call,
        word: tuple[Any, ...],
        operands: Sequence[Any],
        pullback: Pullback | None,
        rows: list[Pullback],
        begun: Any = None,
    ) -> None:
        self._call, self._word, self._operands = call, word, list(operands)
        self._pullback, self._rows, self._begun = pullback, rows, begun

    def derive(
        self, op: tuple[Any, ...], linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], NumpyDerivative | None]:
        word = (*self._word, op)
        further = NumpyDerivative(self._call, word) if keep else None
        if op[0] == "J" or self._pullback is None:
            with _as_at(self._begun):
                return self._call.evaluate(word, [*self._operands, *linear]), further
        bars = self._pullback(op, linear)
        return [bars[i] for i in op[1]], further

    def derive_rows(
        self, op: tuple[Any, ...], axes: tuple[bool, ...], linear: Sequence[Any], rows: np.ndarray
    ) -> list[Any] | None:
        numbers = rows[:, 1] if rows.ndim == 2 else rows
        if op[0] == "J":
            return self._tangents_of_rows(op, axes, linear, numbers)
        if not self._rows or max(numbers, default=0) >= len(self._rows) or not len(numbers):
            return None
        mapped = axes[len(axes) - len(linear) :]
        found = []
        for row, cotangents in zip(numbers, rows_of(mapped, linear, len(numbers))):
            bars = self._rows[row](op, cotangents)
            like = [x[row, ...] if m else x for x, m in zip(self._operands, self._word[-1][1])]
            found.append(copied(filled([bars[i] for i in op[1]], [like[i] for i in op[1]])))
        return [np.stack(bars) for bars in zip(*found)]

    def _tangents_of_rows(
        self, op: tuple[Any, ...], axes: tuple[bool, ...], linear: Sequence[Any], numbers: np.ndarray
    ) -> list[Any] | None:
        """Of all of them in order, as the call has drawn random numbers for them."""
        sizes = {len(x) for x, m in zip(self._operands, self._word[-1][1]) if m}
        if not any(np.array_equal(numbers, np.arange(size)) for size in sizes):
            return None
        with _as_at(self._begun):
            return self._call.evaluate((op, ("V", axes)), [*self._operands, *linear])

    def derive_batch(
        self, op: tuple[Any, ...], mapped: tuple[bool, ...], linear: Sequence[Any]
    ) -> list[Any] | None:
        found = [
            copied(self.derive(op, row, keep=False, accumulate=False)[0]) for row in rows_of(mapped, linear)
        ]
        return [None if column[0] is None else np.stack(column) for column in zip(*found)]


class NumpyDerivative(Residual):
    """A derivative that a caller wants kept in case it is differentiated again, which a numpy target cannot be."""

    nbytes = 0

    def __init__(self, call: Call, word: tuple[Any, ...]) -> None:
        self._call, self._word = call, word

    def derive(
        self, op: tuple[Any, ...], linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], None]:
        self._call.refuse_without("vjp", self._word)
        raise AssertionError("refused above")


@contextmanager
def _random(seed: int | None) -> Iterator[None]:
    """numpy's global random numbers as after ``np.random.seed(seed)``; they go on afterwards as before."""
    if seed is None:
        yield
        return
    with _as_at(np.random.get_state()):
        np.random.seed(seed if seed < 1 << 32 else [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])
        yield


@contextmanager
def _as_at(state: Any) -> Iterator[None]:
    """numpy's global random numbers as in this state, if there is one; they go on afterwards as before."""
    if state is None:
        yield
        return
    before = np.random.get_state()
    np.random.set_state(state)
    try:
        yield
    finally:
        np.random.set_state(before)
