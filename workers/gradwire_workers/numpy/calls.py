"""A numpy target at one site, as a function of flat operands, with the derivatives it offers itself."""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import DType, dtype_named
from gradwire_wire.errors import UsageError
from gradwire_wire.structures import fill, fill_leaves_only, flatten, leaves_like, positional_count
from gradwire_wire.tensors.numpy import adopt, aval
from gradwire_wire.words import pulled_results, result_avals
from gradwire_workers.program import WorkerSite

__all__ = ["Call", "Pullback", "ShapeDtype", "copied", "filled", "rows_of"]

Pullback = Callable[[Tuple[Any, ...], Sequence[Any]], List[Any]]
"""From the operation, whose ``wrt`` is not looked at, and its cotangents to those of all operands, None where one is not used."""

Pulled = Tuple[List[Any], Pullback, List[Pullback]]
"""Results, their pullback, and for a batch the pullback of each row."""


class ShapeDtype(NamedTuple):
    """Stands for an array in ``f.spec``."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


class Call:
    """Functions of flat operands; ``structure`` is the result tree of the latest one."""

    def __init__(self, target: Any, site: WorkerSite) -> None:
        if site.compile:
            raise UsageError("a numpy worker has nothing to compile with: leave out options(compile=True)")
        self._target, self._site = target, site
        self._count = None if site.anchored else positional_count(site.structure)
        self.structure = b""

    def _arguments(self, operands: Sequence[Any]) -> Any:
        return fill(self._site.structure, operands[1:] if self._site.anchored else operands)

    def _results(self, tree: Any) -> list[Any]:
        self.structure, leaves = flatten(tree, _is_array, "the result")
        return [np.asarray(y) if isinstance(y, np.generic) else y for y in leaves]

    def evaluate(self, word: tuple[Any, ...], operands: Sequence[Any]) -> list[Any]:
        """The derived function's results. A cotangent is None where the operand is not used."""
        if not word:
            if self._count == len(operands):
                return self._results(self._target(*operands))
            args, kwargs = self._arguments(operands)
            return self._results(self._target(*args, **kwargs))
        op, inner = word[-1], word[:-1]
        if op[0] == "V":
            return self._batch(inner, op[1], operands)
        count = len(operands) - (len(op[1]) if op[0] == "J" else op[2])
        primals, linear = operands[:count], operands[count:]
        if op[0] == "J":
            return self.jvp(inner, primals, dict(zip(op[1], linear)))
        bars = self.vjp(inner, primals)[1](op, linear)
        return [bars[i] for i in op[1]]

    def _batch(self, inner: tuple[Any, ...], axes: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
        found = []
        for row in rows_of(axes, operands):
            results = self.evaluate(inner, row)
            unused = inner and inner[-1][0] == "T"
            found.append(copied(filled(results, [row[i] for i in inner[-1][1]]) if unused else results))
        return [np.stack(ys) for ys in zip(*found)] if found else self._empty(inner, axes, operands)

    def _empty(self, inner: tuple[Any, ...], axes: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
        word = (*inner, ("V", tuple(axes)))
        avals = result_avals(word, [aval(x) for x in operands], self.spec)
        return [np.empty(a.shape, _dtype(a.dtype)) for a in avals]

    # ---- Derivatives ---------------------------------------------------------------------------------------------

    def offers(self, name: str) -> bool:
        """Whether the target has that derivative."""
        return callable(getattr(self._target, name, None))

    def refuse_without(self, name: str, word: tuple[Any, ...]) -> None:
        """UsageError unless the target offers that derivative, and it is the first of ``word``."""
        what = getattr(self._target, "__qualname__", type(self._target).__qualname__)
        if any(op[0] != "V" for op in word):
            raise UsageError(
                f"{what} is a numpy function, and these have first derivatives only: a second one was asked for"
            )
        if not self.offers(name):
            mode, way = ("reverse", "vjp(*args)") if name == "vjp" else ("forward", "jvp(primals, tangents)")
            raise UsageError(
                f"{what} is a numpy function without a derivative for {mode} mode: numpy has none of its own. Give it one "
                f"as an attribute, f.{way} (see gradwire_workers.numpy), write it in a framework that differentiates, or "
                "call it where nothing is to be differentiated (torch.no_grad, x.detach(), jax.lax.stop_gradient)"
            )

    def vjp(self, word: tuple[Any, ...], operands: Sequence[Any]) -> Pulled:
        """The results of ``word`` (batches only) and their pullback."""
        self.refuse_without("vjp", word)
        if word:
            return self._batched_vjp(word, operands)
        args, kwargs = self._arguments(operands)
        out, pull = self._target.vjp(*args, **kwargs)
        results, structure = self._results(out), self.structure
        keywords = bool(flatten(kwargs, _is_array)[1])

        def pullback(op: tuple[Any, ...], cotangents: Sequence[Any]) -> list[Any]:
            given = iter(_one_each(op, cotangents, [y for y in results if _is_inexact(y)]))
            out_bar = fill(structure, [next(given) if _is_inexact(y) else None for y in results])
            args_bar, kwargs_bar = pull(out_bar, kwargs=True) if keywords else (pull(out_bar), None)
            _check_one_each(args_bar, len(args))
            return self._operand_bars(args_bar, kwargs_bar, operands)

        return results, pullback, []

    def _operand_bars(self, args_bar: Any, kwargs_bar: Any, operands: Sequence[Any]) -> list[Any]:
        bars = leaves_like(self._site.structure, [list(args_bar), kwargs_bar], "the pullback's result")
        if self._site.anchored:
            bars.insert(0, np.zeros((), np.float32))
        return [None if b is None else _like(b, x, "a cotangent") for b, x in zip(bars, operands)]

    def _batched_vjp(self, word: tuple[Any, ...], operands: Sequence[Any]) -> Pulled:
        axes = word[-1][1]
        rows, found = [], []
        for row in rows_of(axes, operands):
            ys, pull, _ = self.vjp(word[:-1], row)
            rows.append(pull)
            found.append(copied(ys))
        if rows:
            results = [np.stack(ys) for ys in zip(*found)]
        else:
            results = self._empty(word[:-1], axes, operands)

        def pullback(op: tuple[Any, ...], cotangents: Sequence[Any]) -> list[Any]:
            bars = [copied(pull(op, [c[r, ...] for c in cotangents])) for r, pull in enumerate(rows)]
            return [_gathered([row[i] for row in bars], mapped, operands[i]) for i, mapped in enumerate(axes)]

        return results, pullback, rows

    def jvp(self, word: tuple[Any, ...], operands: Sequence[Any], tangents: dict[int, Any]) -> list[Any]:
        """Tangents of the inexact results of ``word`` (batches only). ``tangents``: by operand."""
        self.refuse_without("jvp", word)
        if word:
            return self._batched_jvp(word, operands, tangents)
        args, kwargs = self._arguments(operands)
        dots = [
            tangents[i] if i in tangents else np.zeros_like(x) if _is_inexact(x) else None
            for i, x in enumerate(operands)
        ]
        structure, first = self._site.structure, int(self._site.anchored)
        args_dot, kwargs_dot = fill_leaves_only(structure, dots[first:])
        if any(x is not None for x in flatten(kwargs_dot, _is_array)[1]):
            raise UsageError(
                "f.jvp of a numpy function moves positional arguments only: pass the arrays of this call by position"
            )
        out, out_dot = self._target.jvp(tuple(args), tuple(args_dot), **kwargs)
        results = self._results(out)
        found = leaves_like(self.structure, out_dot, "f.jvp's tangent")
        return [
            np.zeros_like(y) if d is None else _like(d, y, "a tangent")
            for y, d in zip(results, found)
            if _is_inexact(y)
        ]

    def _batched_jvp(
        self, word: tuple[Any, ...], operands: Sequence[Any], tangents: dict[int, Any]
    ) -> list[Any]:
        axes = word[-1][1]
        length = len(operands[list(axes).index(True)])  # what moves may be one for all rows
        dots = rows_of([axes[i] for i in tangents], list(tangents.values()), length)
        rows = [
            copied(self.jvp(word[:-1], row, dict(zip(tangents, dot))))
            for row, dot in zip(rows_of(axes, operands), dots)
        ]
        if not rows:
            return [y for y in self._empty(word[:-1], axes, operands) if _is_inexact(y)]
        return [np.stack(ys) for ys in zip(*rows)]

    # ---- Shapes --------------------------------------------------------------------------------------------------

    def spec(self, avals: Sequence[Aval]) -> list[Aval]:
        """Shapes and dtypes by the target's own ``spec``; UsageError that names out_spec where it has none."""
        if not self.offers("spec"):
            raise UsageError(
                "the result of a numpy function is not known before it runs. Say what it returns: "
                "remote.options(out_spec=...), or give it an attribute f.spec(*args) (see gradwire_workers.numpy)"
            )
        args, kwargs = self._arguments([ShapeDtype(a.shape, _dtype(a.dtype)) for a in avals])
        tree = self._target.spec(*args, **kwargs)
        self.structure, leaves = flatten(tree, _is_shaped, "the result of f.spec")
        return [Aval(tuple(x.shape), _wire(x.dtype)) for x in leaves]


def filled(bars: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Cotangents with zeros in place of None."""
    return [np.zeros_like(x) if bar is None else bar for bar, x in zip(bars, like)]


def _one_each(op: tuple[Any, ...], cotangents: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """A cotangent for each inexact result; zeros where the pullback has none, for the target's own rule wants them all."""
    given = dict(zip(pulled_results(op, range(len(results))), cotangents))
    return [given[k] if k in given else np.zeros_like(y) for k, y in enumerate(results)]


def rows_of(axes: Sequence[bool], operands: Sequence[Any], length: int | None = None) -> Iterator[list[Any]]:
    """The operands of each row. What rows share is a copy for all but the last, for a target may write to its arguments."""
    if length is None:
        length = len(operands[list(axes).index(True)])
    for r in range(length):
        last = r == length - 1
        yield [x[r, ...] if mapped else (x if last else x.copy()) for x, mapped in zip(operands, axes)]


def copied(row: Sequence[Any]) -> list[Any]:
    """The results of one row, which the target may write over in the next one."""
    return [None if x is None else x.copy() for x in row]


def _gathered(bars: list[Any], mapped: bool, operand: Any) -> Any:
    """Rows' cotangents as the batch's: stacked, or summed where all rows share the operand."""
    if all(bar is None for bar in bars):
        return None
    like = operand[0, ...] if mapped else operand
    bars = filled(bars, [like] * len(bars))
    return np.stack(bars) if mapped else np.sum(bars, axis=0, dtype=operand.dtype)


def _is_array(x: Any) -> bool:
    """Arrays, and numpy scalars but for text: what numpy makes of arrays without axes."""
    return isinstance(x, (np.ndarray, np.generic)) and not isinstance(x, np.character)


def _is_shaped(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _is_inexact(x: Any) -> bool:
    return aval(x).dtype.is_inexact


def _like(x: Any, array: Any, what: str) -> Any:
    """The user's (co)tangent as an array of exactly that shape and dtype; UsageError where it is none."""
    found = np.asarray(x)
    if found.shape != array.shape or not np.can_cast(found.dtype, array.dtype, "same_kind"):
        raise UsageError(
            f"{what} from a numpy function's own derivative is {found.dtype}{found.shape}, and must be {array.dtype}{array.shape}"
        )
    return found.astype(array.dtype, copy=False)


def _check_one_each(bars: Any, count: int) -> None:
    """UsageError where the user's pullback does not give a cotangent for each positional argument."""
    if not isinstance(bars, (tuple, list)) or len(bars) != count:
        given = f"{len(bars)} items" if isinstance(bars, (tuple, list)) else f"a {type(bars).__name__}"
        raise UsageError(
            f"the pullback that f.vjp returns must give a tuple of {count}, a cotangent or None for each positional argument of "
            f"this call, not {given}"
        )


def _dtype(dtype: DType) -> np.dtype:
    found: np.dtype = adopt(Carrier(np.empty(0, dtype.carrier), dtype)).dtype
    return found


def _wire(dtype: Any) -> DType:
    named = dtype_named(dtype) if isinstance(dtype, str) else None
    return named or aval(np.empty(0, dtype)).dtype
