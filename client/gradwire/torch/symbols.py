"""Result shapes of a call whose operands have symbolic sizes (torch.compile with dynamic shapes)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradwire.derived import Derived
from gradwire.site import SpecResult
from gradwire_wire.carriers import Aval
from gradwire_wire.errors import GradwireError
from gradwire_wire.tensors.torch import aval
from gradwire_wire.words import result_avals

__all__ = ["at_this_size", "symbolic_avals"]


def at_this_size(a: Aval) -> Aval:
    """The same with each symbol at the value that it has now, which does not fix it: for what does not follow from sizes."""
    return a._replace(shape=tuple(n.node.hint if isinstance(n, torch.SymInt) else n for n in a.shape))


def symbolic_avals(fn: Derived, operands: Sequence[Any]) -> tuple[list[Aval], bytes]:
    """Shapes and dtypes of the results in the symbols of the operands' shapes, and F's result tree (b"" for derivatives).

    Each symbol is varied on its own: a size of the results is an integer multiple of one symbol plus a
    constant, or else the symbols are fixed at the values they have now, which compiles anew for others. (Sizes that
    are padded, rounded or clipped look like that at some sizes: so some odd and some large ones are among those tried.)
    """
    structure = b""

    def base(avals: Any) -> list[Aval]:
        nonlocal structure
        shapes, result = _of_target(fn, avals)
        structure = b"" if fn.word else result.structure
        return [Aval(shape, a.dtype) for shape, a in zip(shapes, result.avals, strict=True)]

    return result_avals(fn.word, [aval(x) for x in operands], base), structure


def _of_target(fn: Derived, avals: Sequence[Aval]) -> tuple[list[tuple[Any, ...]], SpecResult]:
    symbols = {str(n): n for a in avals for n in a.shape if isinstance(n, torch.SymInt)}
    # By name from here on: a symbol that is fixed is not called so any more.
    named = [_by_name(a) for a in avals]
    now = {name: n.node.hint for name, n in symbols.items()}
    result = _spec(fn, named, now)
    shapes: list[list[Any]] = [list(a.shape) for a in result.avals]
    for name, symbol in symbols.items():
        if not _follow(fn, named, now, name, symbol, shapes):
            now = {name: int(n) for name, n in symbols.items()}
            return [a.shape for a in _spec(fn, named, now).avals], result
    return [tuple(shape) for shape in shapes], result


def _by_name(a: Aval) -> Any:
    shape: tuple[Any, ...] = tuple(str(n) if isinstance(n, torch.SymInt) else n for n in a.shape)
    return a._replace(shape=shape)


def _spec(fn: Derived, named: Sequence[Any], sizes: dict[str, int]) -> SpecResult:
    whole = tuple(Aval(tuple(sizes.get(n, n) for n in a.shape), a.dtype) for a in named)
    return fn.handle.spec(fn.site, whole)


def _follow(
    fn: Derived, named: Sequence[Any], now: dict[str, int], name: str, symbol: Any, shapes: list[list[Any]]
) -> bool:
    """Put the symbol where the results' sizes follow it; False where they do so in a way that is not linear."""
    n = now[name]
    try:
        found = [_sizes(fn, named, {**now, name: m}) for m in (n, 2 * n, 4 * n)]
    except GradwireError:
        return False
    lines = _lines(n, *found)
    if lines is None or not all(
        _fits(fn, named, {**now, name: m}, m, lines) for m in (n + 1, n + 3, 61 * n + 1)
    ):
        return False
    for shape, line in zip(shapes, lines, strict=True):
        for i, (times, rest) in enumerate(line):
            if times and isinstance(shape[i], torch.SymInt):
                return False
            if times:
                shape[i] = symbol * times + rest
    return True


Line = list[tuple[int, int]]
"""For each size of a result: so many times the symbol, and a constant."""


def _sizes(fn: Derived, named: Sequence[Any], sizes: dict[str, int]) -> list[tuple[int, ...]]:
    return [a.shape for a in _spec(fn, named, sizes).avals]


def _lines(n: int, at_n: Sequence[Any], at_2n: Sequence[Any], at_4n: Sequence[Any]) -> list[Line] | None:
    """How sizes follow a symbol, from three points; None where these are not on a line."""
    if not list(map(len, at_n)) == list(map(len, at_2n)) == list(map(len, at_4n)):
        return None
    lines: list[Line] = []
    for shapes in zip(at_n, at_2n, at_4n, strict=True):
        line: Line = []
        for a, b, c in zip(*shapes, strict=True):
            times, rest = divmod(b - a, n) if n else (0, b - a)
            if rest or c - b != 2 * (b - a):
                return None
            line.append((times, a - times * n))
        lines.append(line)
    return lines


def _fits(fn: Derived, named: Sequence[Any], sizes: dict[str, int], n: int, lines: Sequence[Line]) -> bool:
    """Whether the sizes are on these lines at another point, too; the target may refuse that point."""
    try:
        found = _sizes(fn, named, sizes)
    except GradwireError:
        return True
    return found == [tuple(times * n + rest for times, rest in line) for line in lines]
