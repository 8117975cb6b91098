"""Words: the names of the functions derived from a remote function F.

A word is a tuple of operations, applied to F from left to right. With n the number of operands so far:

``('J', wrt)``
    The tangent with respect to the operands ``wrt``. Operands: the n primals, then one tangent for
    each of ``wrt``. Results: a tangent for each *inexact* result (exact ones have none).
``('T', wrt, m)``
    The pullback. Operands: the n primals, then m cotangents, one for each inexact result.
    Results: a cotangent for each of ``wrt``, the adjoint in Re<a, b>.
``('T', wrt, m, of)``
    The same where nothing depends on some of the results: ``of`` are m indices of inexact results, and the cotangents are
    theirs. That differs from zeros for the others where a derivative is infinite or not a number: those have no part in this one.
``('P', wrt)``
    The results as they are computed where the function is being differentiated with respect to ``wrt``.
    Operands and results are the function's own. It differs from the function only where that has derivative
    rules of its own, as JAX's ``custom_vjp``: what derives it further derives the rules' code instead.
``('V', axes)``
    The batched form. ``axes`` has one bool an operand: whether it has a leading batch axis.
    Every result gets one.
``('M', optimizer, clip_norm)``
    Alone in its word: F is a module whose result is, or has, its loss, which that optimizer of it makes one step to minimize.
    Operands and results are the function's own. ``clip_norm``: the most that the norm of all gradients may be, or None.

J is linear in its tangents, T in its cotangents (unless a rule of the function's own is not); each is the other's
transpose. Pure functions.
"""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple, TypeVar

from gradwire_wire.carriers import Aval
from gradwire_wire.errors import ProtocolError, UsageError, shown

__all__ = [
    "Op",
    "Word",
    "checked_word",
    "linear_count",
    "operands_of_function",
    "pulled_results",
    "pullback_op",
    "result_avals",
    "without_operand",
    "without_primals",
]

Op = Tuple  # ('J', wrt) | ('T', wrt, m[, of]) | ('P', wrt) | ('V', axes) | ('M', optimizer, clip_norm)
Word = Tuple[Op, ...]
MAX_WORD = 16
Of = TypeVar("Of")


def pullback_op(wrt: Sequence[int], has_cotangent: Sequence[bool]) -> Op:
    """The pullback with respect to ``wrt``. has_cotangent: which of the inexact results have one."""
    of = tuple(k for k, has in enumerate(has_cotangent) if has)
    every = len(of) == len(has_cotangent)
    return ("T", tuple(wrt), len(of)) if every else ("T", tuple(wrt), len(of), of)


def pulled_results(op: Op, results: Sequence[Of]) -> List[Of]:
    """Of the inexact results (or what there is one of for each), those that the pullback's cotangents belong to."""
    of = range(op[2]) if len(op) == 3 else op[3]
    if (len(op) == 3 and len(results) != op[2]) or any(k >= len(results) for k in of):
        raise ProtocolError(f"{shown(op)} is no pullback of {len(results)} inexact results")
    return [results[k] for k in of]


def linear_count(word: Word) -> int:
    """How many trailing operands the derived function is linear in (0 for F itself and its batches)."""
    for op in reversed(word):
        if op[0] == "J":
            return len(op[1])
        if op[0] == "T":
            return op[2]
    return 0


def result_avals(
    word: Word, avals: Sequence[Aval], base: Callable[[tuple[Aval, ...]], Sequence[Aval]]
) -> list[Aval]:
    """Shapes and dtypes of the derived function's results; ``base`` answers for F itself."""
    if not word:
        return list(base(tuple(avals)))
    op = word[-1]
    if op[0] == "J":
        return [
            a for a in result_avals(word[:-1], avals[: len(avals) - len(op[1])], base) if a.dtype.is_inexact
        ]
    if op[0] == "T":
        return [avals[i] for i in op[1]]
    if op[0] == "P":
        return result_avals(word[:-1], avals, base)
    size = _batch_size([a.shape for a, mapped in zip(avals, op[1]) if mapped])
    rows = [Aval(a.shape[1:], a.dtype) if mapped else a for a, mapped in zip(avals, op[1])]
    return [Aval((size, *a.shape), a.dtype) for a in result_avals(word[:-1], rows, base)]


def _batch_size(shapes: Sequence[Sequence[Any]]) -> Any:
    """The size that all of these shapes begin with: it may be a symbol, which can be compared, but not hashed."""
    sizes = [shape[0] for shape in shapes if shape]
    if not sizes or len(sizes) < len(shapes) or any(size != sizes[0] for size in sizes):
        raise ProtocolError(f"batched operands disagree on the batch size: {[*map(list, shapes)]}")
    return sizes[0]


def operands_of_function(word: Word, avals: Sequence[Aval]) -> tuple[Aval, ...]:
    """What F itself takes where the derived function takes ``avals``."""
    avals = tuple(avals)
    for op in reversed(word):
        if op[0] == "V":
            avals = tuple(Aval(a.shape[1:], a.dtype) if mapped else a for a, mapped in zip(avals, op[1]))
        elif op[0] != "P":
            avals = avals[: len(avals) - (len(op[1]) if op[0] == "J" else op[2])]
    return avals


def without_primals(word: Word, token_ops: int) -> tuple[Word, int]:
    """The same for an F without rules of its own; and how many of the first ``token_ops`` operations are left."""
    own = [op[0] != "P" for op in word]
    return tuple(op for op in word if op[0] != "P"), sum(own[:token_ops])


def without_operand(word: Word, at: int) -> Word:
    """The same derived function, of an F that does not have its operand ``at``.

    UsageError where a batch axis runs over it; it must be one that nothing is differentiated by.
    """
    return tuple(_op_without(op, at) for op in word)


def _op_without(op: Op, at: int) -> Op:
    if op[0] == "M":
        return op
    if op[0] == "V":
        if op[1][at]:
            raise UsageError("a batch cannot have a seed for each row; make a call for each row")
        return ("V", op[1][:at] + op[1][at + 1 :])
    if at in op[1]:
        raise ProtocolError(f"operation {shown(op)} is about an operand that has no derivative")
    return (op[0], tuple(i - (i > at) for i in op[1]), *op[2:])


def _is_indices(x: object) -> bool:
    return isinstance(x, tuple) and all(type(i) is int and i >= 0 for i in x)


def _is_pullback(op: Op) -> bool:
    if len(op) not in (3, 4) or not _is_indices(op[1]) or type(op[2]) is not int or op[2] < 0:
        return False
    return len(op) == 3 or (_is_indices(op[3]) and len(op[3]) == op[2] and sorted(set(op[3])) == list(op[3]))


def _is_step(op: Op) -> bool:
    return (
        len(op) == 3
        and type(op[1]) is int
        and op[1] >= 0
        and (op[2] is None or (type(op[2]) is float and op[2] > 0))
    )


def checked_word(raw: object, operands: int) -> Word:
    """What a received word means, read back from ``operands`` down to F's own; else ProtocolError."""
    if raw == []:
        return ()
    word = _tuples(raw)
    if not isinstance(word, tuple) or len(word) > MAX_WORD:
        raise ProtocolError("a word must be a short array of operations")
    n = operands
    for op in reversed(word):
        if not isinstance(op, tuple) or not op:
            raise ProtocolError(f"bad operation {shown(op)} in a word")
        if op[0] == "J" and len(op) == 2 and _is_indices(op[1]):
            n -= len(op[1])
        elif op[0] == "T" and _is_pullback(op):
            n -= op[2]
        elif op[0] == "P" and len(op) == 2 and _is_indices(op[1]):
            pass
        elif op[0] == "V" and len(op) == 2 and isinstance(op[1], tuple):
            if len(op[1]) != n or not all(type(m) is bool for m in op[1]):
                raise ProtocolError(f"bad batch axes in a word: {shown(op)} over {n} operands")
            continue
        elif op[0] == "M" and len(word) == 1 and _is_step(op):
            continue
        else:
            raise ProtocolError(f"bad operation {shown(op)} in a word")
        if n < 0 or any(i >= n for i in op[1]):
            raise ProtocolError(f"operation {shown(op)} names operands that are not there")
    return word


def _tuples(x: object, levels: int = 3) -> object:
    """Lists as tuples, no deeper than words go: what was received may be nested without end."""
    return tuple(_tuples(v, levels - 1) for v in x) if levels and isinstance(x, (list, tuple)) else x
