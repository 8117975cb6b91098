"""Derived functions by TensorFlow's own transforms: the rules of `gradwire_wire.words`, a screen each.

All of it works eagerly and under tracing alike. TensorFlow's gradients are the adjoint in Re<a, b>, as the
wire wants them.
"""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import tensorflow as tf

from gradwire_wire.errors import UsageError
from gradwire_wire.words import pulled_results
from gradwire_workers.tensorflow.graphs import Traced

__all__ = ["Function", "derived", "is_inexact", "of_rows", "outermost", "pull", "pulled_from", "push"]

Function = Callable[..., List[Any]]


def is_inexact(x: Any) -> bool:
    """Whether a tensor can carry a derivative."""
    return x.dtype.is_floating or x.dtype.is_complex


def derived(function: Function, word: tuple[Any, ...]) -> Function:
    """The derived function; what does not depend on an operand has a zero derivative."""
    for op in word:
        function = _derive(function, op, zeros=True)
    return function


def outermost(
    function: Function, word: tuple[Any, ...], variables: Callable[[], Sequence[Any]] | None = None
) -> Function:
    """The same, but where the last operation is a pullback: None for operands that are not used.

    variables: their cotangents follow those of the operands (asked for after the forward, which may make them).
    """
    if not word:
        return function
    return _derive(derived(function, word[:-1]), word[-1], zeros=False, variables=variables)


def _derive(
    function: Function,
    op: tuple[Any, ...],
    *,
    zeros: bool,
    variables: Callable[[], Sequence[Any]] | None = None,
) -> Function:
    def pullback(*operands: Any) -> list[Any]:
        primals, cotangents = _split(operands, op[2])
        wrt = [primals[i] for i in op[1]]
        with tf.GradientTape(watch_accessed_variables=variables is not None) as tape:
            tape.watch([x for x in wrt if is_inexact(x)])
            results = function(*primals)
        sources = [*wrt, *(variables() if variables is not None else ())]
        found = pull(tape, pulled_from(op, results), sources, cotangents)
        return [tf.zeros_like(x) if g is None else g for x, g in zip(sources, found)] if zeros else found

    def tangent(*operands: Any) -> list[Any]:
        primals, tangents = _split(operands, len(op[1]))
        wrt = [primals[i] for i in op[1]]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([x for x in wrt if is_inexact(x)])
            results = function(*primals)
        return push(tape, results, wrt, tangents)

    def batch(*operands: Any) -> list[Any]:
        return _batched(function, op[1], operands)

    return {"T": pullback, "J": tangent, "V": batch}[op[0]]


def _split(operands: Sequence[Any], linear: int) -> tuple[Sequence[Any], Sequence[Any]]:
    at = len(operands) - linear
    return operands[:at], operands[at:]


def pulled_from(op: tuple[Any, ...], results: Sequence[Any]) -> list[Any]:
    """The results that the pullback's cotangents belong to."""
    return pulled_results(op, [y for y in results if is_inexact(y)])


def pull(tape: Any, results: Sequence[Any], sources: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Cotangents of ``sources``, dense, None where unused. Results that are exact have no cotangent."""
    targets = [y for y in results if is_inexact(y)]
    if not targets:
        return [None] * len(sources)
    found = tape.gradient(targets, list(sources), output_gradients=list(cotangents))
    return [_dense(g, x) for g, x in zip(found, sources)]


def push(tape: Any, results: Sequence[Any], wrt: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Tangents of the inexact results: the pullback's own pullback, with respect to its cotangents.

    Those are ones here. Their value does not matter, but TensorFlow's rules leave terms out for zeros.
    """
    return _pusher(tape, results, wrt)(tangents)


def _pusher(tape: Any, results: Sequence[Any], wrt: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """From tangents of ``wrt`` to those of the inexact results. See `push`."""
    targets = [y for y in results if is_inexact(y)]
    ones = [tf.ones_like(y) for y in targets]
    with tf.GradientTape(watch_accessed_variables=False) as outer:
        outer.watch(ones)
        found = pull(tape, targets, wrt, ones)

    def push(tangents: Sequence[Any]) -> list[Any]:
        used = [(g, t) for g, t in zip(found, tangents) if g is not None]
        pushed = pull(outer, [g for g, _ in used], ones, [t for _, t in used])
        return [tf.zeros_like(y) if p is None else p for p, y in zip(pushed, targets)]

    return push


def of_rows(function: Function, op: tuple[Any, ...]) -> Function:
    """The derivative ``op`` at rows of cotangents or tangents, vectorised, of one evaluation of the function.

    An operand that is not used has zeros. Raises, in many ways, where TensorFlow cannot vectorise the derivative.
    """

    def rows(*operands: Any) -> list[Any]:
        primals, lines = _split(operands, op[2] if op[0] == "T" else len(op[1]))
        wrt = [primals[i] for i in op[1]]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([x for x in wrt if is_inexact(x)])
            results = function(*primals)
        if op[0] == "J":
            derive = _pusher(tape, results, wrt)
        else:
            targets = pulled_from(op, results)
            derive = lambda row: [  # noqa: E731
                tf.zeros_like(x) if g is None else g for g, x in zip(pull(tape, targets, wrt, row), wrt)
            ]
        return list(
            tf.vectorized_map(lambda row: tuple(derive(row)), tuple(lines), fallback_to_while_loop=False)
        )

    return rows


def _dense(gradient: Any, source: Any) -> Any:
    """Gradients of gathered rows come as IndexedSlices; converting these in general warns."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, source.shape[0])
    return gradient


# ---- Batches ---------------------------------------------------------------------------------------------------------


def _batched(function: Function, axes: tuple[bool, ...], operands: Sequence[Any]) -> list[Any]:
    """Row by row where the function is random or stateful, or TensorFlow cannot vectorise it."""
    size = next(x.shape[0] for x, mapped in zip(operands, axes) if mapped)
    mapped = tuple(x for x, m in zip(operands, axes) if m)

    def row(rows: Sequence[Any]) -> tuple[Any, ...]:
        following = iter(rows)
        return tuple(function(*[next(following) if m else x for x, m in zip(operands, axes)]))

    try:
        specs, pure = _row_specs(row, mapped)
    except Exception:  # it cannot be traced; if there is more to say, the loop below will
        return _looped(row, mapped, size)
    if size == 0:
        return [tf.zeros((0, *s.shape), s.dtype) for s in specs]
    if pure:
        try:
            return list(tf.vectorized_map(row, mapped))
        except Exception:  # many kinds, all of them about what cannot be vectorised
            pass
    return list(tf.map_fn(row, mapped, fn_output_signature=specs))


def _row_specs(row: Callable[..., Any], mapped: Sequence[Any]) -> tuple[tuple[Any, ...], bool]:
    """What one row gives, and whether it is a function of its operands alone."""
    given = [tf.TensorSpec(x.shape[1:], x.dtype) for x in mapped]
    traced = Traced(lambda *rows: row(rows), given)
    specs = tuple(tf.TensorSpec(y.shape, y.dtype) for y in traced.outputs)
    if not all(s.shape.is_fully_defined() for s in specs):
        raise UsageError("the shape of a result depends on values, so that the rows of a batch may differ")
    return specs, traced.is_pure


def _looped(row: Callable[..., Any], mapped: Sequence[Any], size: int) -> list[Any]:
    if size == 0:
        raise UsageError(
            "an empty batch of a function that cannot be traced has no shape; call it with at least one row"
        )
    rows = [row([x[i] for x in mapped]) for i in range(size)]
    return [tf.stack(ys) for ys in zip(*rows)]
