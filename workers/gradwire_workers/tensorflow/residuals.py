"""Kept forwards of the TensorFlow worker. See `gradwire_workers.program.Residual`.

`Replayed` is the usual one, see `replays`. `Taped` keeps a persistent tape, where the target runs eagerly or
its derivatives cannot be cut out of a trace; it is two to four times slower.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from gradwire_wire.errors import ResidualLostError
from gradwire_workers.program import Residual
from gradwire_workers.tensorflow.graphs import READS, Traced, node_of
from gradwire_workers.tensorflow.replays import NotReplayable, Replay, what_to_save
from gradwire_workers.tensorflow.words import (
    Function,
    derived,
    is_inexact,
    of_rows,
    outermost,
    pull,
    pulled_from,
    push,
)

__all__ = ["Keeping", "Replayed", "Taped", "taped"]

MAX_DERIVATIVES = 64
# What a persistent tape holds cannot be asked for; so many times the bytes of operands and results.
TAPE_FACTOR = 4


class Keeping:
    """How forwards of ``word`` are kept, for one site and signature. Raises NotReplayable.

    function: the target over flat operands, traceable. accumulate: the pullback asked for
    will want gradients of variables too.
    """

    def __init__(
        self,
        owner: Any,
        function: Function,
        word: tuple[Any, ...],
        forward: Traced,
        specs: Sequence[Any],
        accumulate: bool,
    ) -> None:
        self.owner, self._function, self._word, self._specs = owner, function, word, tuple(specs)
        self.accumulate, self.has_rows = accumulate, len(word) == 1 and word[0][0] == "V"
        self._derivatives: OrderedDict[Any, tuple[Replay, list[str]]] = OrderedDict()
        self._one_by_one: set[Any] = set()  # derivatives that TensorFlow does not vectorise
        pullback = self._likely_pullback(forward, accumulate)
        self._saved = what_to_save(forward, pullback)
        self.forward = Traced(outermost(function, word), specs, self._saved.find_in)
        tensors = self._saved.tensors
        self._own = [i for i, t in enumerate(tensors) if self.forward.nodes[node_of(t)].op not in READS]
        if pullback is not None:
            Replay(pullback, self.forward, self._saved)

    def _likely_pullback(self, forward: Traced, accumulate: bool) -> Traced | None:
        """The one with respect to everything; None where it cannot be traced."""
        wrt = tuple(i for i, s in enumerate(self._specs) if is_inexact(s))
        results = [y for y in forward.outputs if y is not None and is_inexact(y)]
        if not results or not (wrt or accumulate):
            return None
        try:
            return self._trace((("T", wrt, len(results)),), [*self._specs, *results], accumulate)
        except Exception:  # whoever asks for it will be told
            return None

    def _trace(self, suffix: tuple[Any, ...], specs: Sequence[Any], accumulate: bool) -> Traced:
        variables = self.owner.trainable_values if accumulate else None
        return Traced(outermost(derived(self._function, self._word), suffix, variables), specs)

    def __call__(self, operands: Sequence[Any]) -> tuple[list[Any], Replayed]:
        outputs = self.forward(operands)
        results, saved = outputs[: self.forward.results], outputs[self.forward.results :]
        nbytes = sum(_nbytes(x) for x in operands)
        nbytes += sum(_nbytes(saved[i]) for i in self._own)  # the others are the variables' own memory
        return results, Replayed(self, (), list(operands), saved, nbytes)

    def derivative(
        self, suffix: tuple[Any, ...], operands: Sequence[Any], accumulate: bool
    ) -> tuple[Replay, list[str]]:
        """The derived function ``word + suffix``, and names of the variables whose cotangents it gives at the end."""
        return self._cached(suffix, operands, accumulate, lambda: self._trace(suffix, operands, accumulate))

    def row_derivative(
        self, op: tuple[Any, ...], axes: tuple[bool, ...], operands: Sequence[Any], accumulate: bool
    ) -> tuple[Replay, list[str]]:
        """The same for ``op`` of every row of a batch. axes: of operands and linear operands."""
        ((_, batch_axes),) = self._word
        spread = [not mapped and i in op[1] for i, mapped in enumerate(batch_axes)]
        row_axes = tuple(m or s for m, s in zip(batch_axes, spread))
        spread += [not mapped for mapped in axes[len(batch_axes) :]]

        def rows(*operands: Any) -> list[Any]:
            size = _size(axes, operands)
            spread_out = [_rows_of(x, size) if s else x for x, s in zip(operands, spread)]
            variables = self.owner.trainable_values if accumulate else None
            found = outermost(self._function, (("V", row_axes), op), variables)(*spread_out)
            if op[0] == "J":
                return found
            wrt = [spread_out[i] for i in op[1]]
            return [tf.zeros_like(x) if g is None else g for g, x in zip(found, wrt)] + found[len(wrt) :]

        trace = lambda: Traced(rows, operands)  # noqa: E731
        return self._cached((op, axes), operands, accumulate, trace, reshaped=any(spread))

    def batch_derivative(
        self, suffix: tuple[Any, ...], op: tuple[Any, ...], operands: Sequence[Any]
    ) -> Replay | None:
        """The derivative ``op`` of ``word + suffix`` at rows of cotangents or tangents; None where each must be derived by itself."""
        function = of_rows(derived(self._function, (*self._word, *suffix)), op)
        name = (*suffix, op, "rows")
        if name in self._one_by_one:
            return None
        try:
            with _quietly(logging.CRITICAL):
                return self._cached(name, operands, False, lambda: Traced(function, operands))[0]
        except Exception:  # many kinds, all of them about what cannot be vectorised or replayed
            self._one_by_one.add(name)
            return None

    def _cached(
        self,
        name: Any,
        operands: Sequence[Any],
        accumulate: bool,
        trace: Callable[[], Traced],
        *,
        reshaped: bool = False,
    ) -> tuple[Replay, list[str]]:
        variables = self.owner.trainable_names() if accumulate else []
        key = (name, tuple(variables), *((*x.shape, x.dtype) for x in operands[len(self._specs) :]))
        found = self._derivatives.get(key)
        if found is None:
            replay = Replay(trace(), self.forward, self._saved, reshaped=reshaped)
            found = self._derivatives[key] = (replay, variables)
            if len(self._derivatives) > MAX_DERIVATIVES:
                self._derivatives.popitem(last=False)
        return found


def _size(axes: Sequence[bool], operands: Sequence[Any]) -> int:
    return next(int(x.shape[0]) for x, mapped in zip(operands, axes) if mapped)


def _rows_of(x: Any, size: int) -> Any:
    return tf.broadcast_to(x, (size, *x.shape))


def _nbytes(x: Any) -> int:
    return int(x.shape.num_elements()) * x.dtype.size


class Replayed(Residual):
    """Operands and saved tensors of a kept forward; ``suffix`` is what has been derived from it since."""

    __slots__ = ("_keeping", "_operands", "_saved", "_suffix", "nbytes")

    def __init__(
        self, keeping: Keeping, suffix: tuple[Any, ...], operands: list[Any], saved: list[Any], nbytes: int
    ) -> None:
        self._keeping, self._suffix, self._operands, self._saved = keeping, suffix, operands, saved
        self.nbytes = nbytes

    def derive(
        self, op: tuple[Any, ...], linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], Replayed | None]:
        suffix, operands = (*self._suffix, op), [*self._operands, *linear]
        with _explained():
            derivative, names = self._keeping.derivative(suffix, operands, accumulate)
        found = self._evaluated(derivative, op, operands, names)
        if not keep:
            return found, None
        nbytes = self.nbytes + sum(_nbytes(x) for x in linear)
        return found, Replayed(self._keeping, suffix, operands, self._saved, nbytes)

    def derive_rows(
        self, op: tuple[Any, ...], axes: tuple[bool, ...], linear: Sequence[Any], rows: np.ndarray
    ) -> list[Any] | None:
        keeping, operands = self._keeping, [*self._operands, *linear]
        if not keeping.has_rows or not _is_whole(rows, _size(axes, operands)):
            return None
        accumulate = keeping.accumulate and op[0] == "T"
        with _explained():
            derivative, names = keeping.row_derivative(op, axes, operands, accumulate)
        return self._evaluated(derivative, op, operands, names)

    def derive_batch(
        self, op: tuple[Any, ...], mapped: tuple[bool, ...], linear: Sequence[Any]
    ) -> list[Any] | None:
        if not all(mapped):
            return None
        operands = [*self._operands, *linear]
        derivative = self._keeping.batch_derivative(self._suffix, op, operands)
        return None if derivative is None else derivative(operands, self._saved)

    def _evaluated(
        self, derivative: Replay, op: tuple[Any, ...], operands: Sequence[Any], names: list[str]
    ) -> list[Any]:
        found = derivative(operands, self._saved)
        if names:
            self._keeping.owner.accumulate(names, found[len(op[1]) :])
            found = found[: len(op[1])]
        return found


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except NotReplayable as error:
        raise ResidualLostError(
            f"this derivative cannot be computed from what the forward kept: {error}. "
            "Ask for it with options(compile=False)"
        ) from error


def _is_whole(rows: np.ndarray, size: int) -> bool:
    """Whether these are all rows of the kept batch, in order."""
    numbers = rows[:, 1] if rows.ndim == 2 else rows
    return np.array_equal(numbers, np.arange(size))


# ---- Tapes -----------------------------------------------------------------------------------------------------------


def taped(
    owner: Any,
    function: Function,
    word: tuple[Any, ...],
    operands: Sequence[Any],
    accumulate: bool,
    rows: bool,
) -> tuple[list[Any], Taped]:
    """Evaluate ``word`` of a function under a tape that stays. rows: so that each row of a batch can be derived."""
    operands = [tf.identity(x) for x in operands]  # two operands must not be one tensor
    spread, size = operands, None
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x for x in operands if is_inexact(x)])
        if rows:
            ((_, axes),) = word
            size = _size(axes, operands)
            word = (("V", tuple(m or is_inexact(x) for m, x in zip(axes, operands))),)
            spread = [x if m or not is_inexact(x) else _rows_of(x, size) for m, x in zip(axes, operands)]
        results = outermost(function, word)(*spread)
    wrt = word[-1][1] if word and word[-1][0] == "T" else ()
    whole = [tf.zeros_like(operands[wrt[i]]) if y is None else y for i, y in enumerate(results)]
    return results, Taped(owner, tape, operands, whole, accumulate, size, spread)


class Taped(Residual):
    """Operands and results of a kept forward, and the tape between them.

    rows: the batch's size, if it is one. spread: the operands then, with one row each of whatever is differentiated.
    """

    __slots__ = ("_accumulate", "_operands", "_owner", "_results", "_rows", "_spread", "_tape", "nbytes")

    def __init__(
        self,
        owner: Any,
        tape: Any,
        operands: Sequence[Any],
        results: Sequence[Any],
        accumulate: bool,
        rows: int | None = None,
        spread: Sequence[Any] = (),
    ) -> None:
        self._owner, self._tape, self._operands, self._results = owner, tape, list(operands), list(results)
        self._accumulate, self._rows, self._spread = accumulate, rows, list(spread)
        held = {id(x): x for x in (*operands, *spread, *results)}
        self.nbytes = TAPE_FACTOR * sum(map(_nbytes, held.values()))

    def derive(
        self, op: tuple[Any, ...], linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], Taped | None]:
        linear, wrt = [tf.identity(x) for x in linear], [self._operands[i] for i in op[1]]
        with self._tape if keep else nullcontext(), _quietly():
            if keep:
                self._tape.watch(linear)
            found = self._derived(op, wrt, linear, accumulate)
        found = self._accumulated(found, len(wrt), accumulate)
        if not keep:
            return found, None
        whole = [tf.zeros_like(x) if y is None else y for x, y in zip(wrt, found)] if op[0] == "T" else found
        return found, Taped(self._owner, self._tape, [*self._operands, *linear], whole, self._accumulate)

    def _derived(
        self, op: tuple[Any, ...], wrt: Sequence[Any], linear: Sequence[Any], accumulate: bool
    ) -> list[Any]:
        """accumulate: the cotangents of the owner's variables come last."""
        if op[0] == "J":
            return push(self._tape, self._results, wrt, linear)
        variables = self._owner.trainable_values() if accumulate else ()
        return pull(self._tape, pulled_from(op, self._results), [*wrt, *variables], linear)

    def _accumulated(self, found: list[Any], count: int, accumulate: bool) -> list[Any]:
        if not accumulate:
            return found
        self._owner.accumulate(self._owner.trainable_names(), found[count:])
        return found[:count]

    def derive_rows(
        self, op: tuple[Any, ...], axes: tuple[bool, ...], linear: Sequence[Any], rows: np.ndarray
    ) -> list[Any] | None:
        if self._rows is None or not _is_whole(rows, self._rows):
            return None
        mapped = axes[len(axes) - len(linear) :]
        linear = [tf.identity(x) if m else _rows_of(x, self._rows) for x, m in zip(linear, mapped)]
        wrt, accumulate = [self._spread[i] for i in op[1]], self._accumulate and op[0] == "T"
        with _quietly():
            found = self._accumulated(self._derived(op, wrt, linear, accumulate), len(wrt), accumulate)
        return [tf.zeros_like(x) if y is None else y for x, y in zip(wrt, found)] if op[0] == "T" else found


@contextmanager
def _quietly(level: int = logging.ERROR) -> Iterator[None]:
    """TensorFlow warns that a persistent tape should not be used while it records, where it must; and logs at length what it cannot vectorise."""
    logger = tf.get_logger()
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
