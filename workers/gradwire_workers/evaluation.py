"""Which way a derived function is evaluated: from a kept graph, by running the forward again, or not at all."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Iterator, NamedTuple, Sequence, Tuple, Union

import numpy as np

from gradwire_wire import messages
from gradwire_wire.errors import ResidualLostError
from gradwire_wire.messages import Call
from gradwire_wire.words import Word, linear_count, without_primals
from gradwire_workers.program import Program, Residual, Result, WorkerSite
from gradwire_workers.residuals import Residuals

__all__ = ["Evaluated", "Request", "evaluate"]


class Evaluated(NamedTuple):
    """Results, and the residual to keep where the call asked for one."""

    result: Result
    residual: Residual | None = None


class Request(NamedTuple):
    """Of a call, what is asked for here."""

    remote: int
    keep: int
    token: Any
    token_ops: int


Asked = Union[Call, Request]


def evaluate(
    program: Program,
    site: WorkerSite,
    word: Word,
    call: Asked,
    operands: Sequence[Any],
    residuals: Residuals,
) -> Evaluated:
    """The derived function at the operands.

    An operand is None where the client left it out: it is needed only if the kept forward is gone.
    ResidualLostError then asks for it, or says that the forward must be run again by the caller.
    """
    if not program.rules_end and _has_primals(word):
        word, token_ops = without_primals(word, call.token_ops)
        call = Request(call.remote, call.keep, call.token, token_ops)
    if call.token:
        derived = _from_residual(program, site, word, call, operands, residuals)
        if derived is not None:
            return derived
        if not _would_run_alike(program, site, call, residuals):
            raise _lost(asks_for_operands=False)
    if any(x is None for x in operands):
        raise _lost(asks_for_operands=True)
    if call.keep == messages.KEEP_ROWS:
        return Evaluated(*program.keep_rows(site, word, operands))
    if call.keep:
        return Evaluated(*program.keep(site, word, operands))
    return Evaluated(program.run(site, word, operands))


def _would_run_alike(program: Program, site: WorkerSite, call: Asked, residuals: Residuals) -> bool:
    """Whether the forward that is gone would be the same if it were run again now: its mode, its parameters, its state."""
    return not (
        site.accumulate
        or site.training
        or site.training not in (None, program.training)
        or program.generation
        or program.has_moved()
        or _is_of_a_former_life(program, call, residuals)
    )


class Step(NamedTuple):
    """Of a word, what is asked of the kept forward next.

    rules: operations ``('P', wrt)`` before it. further: all that comes after it.
    """

    rules: Word
    op: tuple[Any, ...]
    further: Word


@lru_cache(maxsize=4096)
def _has_primals(word: Word) -> bool:
    return any(op[0] == "P" for op in word)


_linear_count = lru_cache(maxsize=4096)(linear_count)


@lru_cache(maxsize=4096)
def _step_after(word: Word, done: int) -> Step | None:
    """The next one of a word whose first ``done`` operations are kept; None where it is no derivative."""
    at = done
    while at + 1 < len(word) and word[at][0] == "P":
        at += 1
    if at >= len(word) or word[at][0] not in "TJ":
        return None
    return Step(word[done:at], word[at], word[at + 1 :])


def _from_residual(
    program: Program,
    site: WorkerSite,
    word: Word,
    call: Asked,
    operands: Sequence[Any],
    residuals: Residuals,
) -> Evaluated | None:
    """From the graph kept under the call's token; None where there is none or it does not serve."""
    token, rows = _asked_for(call)
    kept, step = residuals.find(token, call.remote), _step_after(word, call.token_ops)
    if kept is None or step is None:
        return None
    is_pullback = step.op[0] == "T"
    linear = operands[len(operands) - _linear_count(word) :]
    if any(x is None for x in linear):
        return None
    if is_pullback:
        residuals.note_pulled(token)
    if rows is None:
        return _from_forward(program, kept.residual, step, call, linear, site.accumulate and is_pullback)
    if step.rules or call.token_ops:  # rows are of the function itself
        return None
    return _from_rows(program, kept.residual, step, call, linear, rows)


def _asked_for(call: Asked) -> tuple[int, list[Any] | None]:
    """The token of the kept forward, and which rows of it are asked for on their own: None where none are."""
    if type(call.token) is not list:
        return call.token, None
    rows = call.token
    if call.token_ops and all(row[0] == rows[0][0] and row[1] == i for i, row in enumerate(rows)):
        return rows[0][0], None  # all rows of the batch, in their order: a derivative of the batch itself
    return rows[0][0], rows


def _from_forward(
    program: Program, residual: Residual, step: Step, call: Asked, linear: Sequence[Any], accumulate: bool
) -> Evaluated | None:
    """A derivative of the kept forward, at one set of cotangents or tangents or at a batch of them."""
    batches = _batches_of_linear(step.further, len(linear))
    if batches is None or (batches and (call.keep or _has_no_rows(linear, len(batches)))):
        return None
    if step.rules:
        residual = residual.differentiated(step.rules)
    if batches:
        return Evaluated(Result(_from_batches(program, residual, step.op, batches, linear, accumulate)))
    tensors, further = residual.derive(step.op, linear, keep=bool(call.keep), accumulate=accumulate)
    return Evaluated(Result(tensors), further)


Batches = Tuple[Tuple[bool, ...], ...]
"""Batches, innermost first: which of the cotangents or tangents have a row each."""


@lru_cache(maxsize=4096)
def _batches_of_linear(further: Word, count: int) -> Batches | None:
    """Operations that are batches of the last ``count`` operands alone, the cotangents or tangents; None where they are something else.

    One forward then serves all rows, as in a Jacobian.
    """
    if any(op[0] != "V" or any(op[1][: len(op[1]) - count]) for op in further):
        return None
    return tuple(op[1][len(op[1]) - count :] for op in further)


def _from_batches(
    program: Program,
    residual: Residual,
    op: tuple[Any, ...],
    batches: Batches,
    linear: Sequence[Any],
    accumulate: bool,
) -> list[Any]:
    """Derivatives of one kept forward at batches of cotangents or tangents."""
    *inner, mapped = batches
    if not inner and not accumulate:
        found = residual.derive_batch(op, mapped, linear)
        if found is not None:
            return found

    def derive(row: Sequence[Any]) -> list[Any]:
        if inner:
            return _from_batches(program, residual, op, tuple(inner), row, accumulate)
        return residual.derive(op, row, keep=False, accumulate=accumulate)[0]

    return _stacked(program, [derive(row) for row in _rows(linear, [0 if m else None for m in mapped])], 0)


def _rows(linear: Sequence[Any], axes: Sequence[int | None]) -> Iterator[list[Any]]:
    """The operands of each row: ``axes`` says which axis of an operand is the rows', 0 or 1."""
    at, axis = next((i, a) for i, a in enumerate(axes) if a is not None)
    for k in range(linear[at].shape[axis]):
        yield [x if a is None else (x[:, k, ...] if a else x[k, ...]) for x, a in zip(linear, axes)]


def _has_no_rows(linear: Sequence[Any], depth: int) -> bool:
    """Whether one of so many batches may be empty: what comes out of it has a shape that no row tells."""
    return any(x is not None and 0 in x.shape[:depth] for x in linear)


def _stacked(program: Program, rows: Sequence[list[Any]], axis: int) -> list[Any]:
    return [None if column[0] is None else program.stack(column, axis) for column in zip(*rows)]


def _from_rows(
    program: Program, residual: Residual, step: Step, call: Asked, linear: Sequence[Any], rows: list[Any]
) -> Evaluated | None:
    """Derivatives of rows that were kept at once, under one token: the outermost batch of the word's is that of the rows."""
    further = step.further
    if call.keep or not further or further[-1][0] != "V" or any(row[0] != rows[0][0] for row in rows):
        return None
    batches = _batches_of_linear(further[:-1], len(linear))
    if batches is None or _has_no_rows(linear, len(further)):
        return None
    axes, numbers = further[-1][1], np.asarray([row[1] for row in rows])
    found = _from_kept_rows(program, residual, step.op, axes, batches, linear, numbers)
    return None if found is None else Evaluated(Result(found))


def _from_kept_rows(
    program: Program,
    residual: Residual,
    op: tuple[Any, ...],
    axes: tuple[bool, ...],
    batches: Batches,
    linear: Sequence[Any],
    numbers: np.ndarray,
) -> list[Any] | None:
    """Derivatives of kept rows, at batches of cotangents or tangents for each; None where they must be computed afresh."""
    if not batches:
        return residual.derive_rows(op, axes, linear, numbers)
    *inner, mapped = batches
    own = axes[len(axes) - len(linear) :]
    each = []
    for row in _rows(linear, [None if not m else int(o) for m, o in zip(mapped, own)]):
        found = _from_kept_rows(program, residual, op, axes, tuple(inner), row, numbers)
        if found is None:
            return None
        each.append(found)
    return _stacked(program, each, 1)


def _is_of_a_former_life(program: Program, call: Asked, residuals: Residuals) -> bool:
    """Whether a module's forward was made before the worker was restarted: its parameters were others then.

    Token 0 stands for a forward that was never kept.
    """
    token = call.token[0][0] if type(call.token) is list and call.token else call.token
    return program.is_module and bool(token) and not residuals.was_issued(token)


def _lost(*, asks_for_operands: bool) -> ResidualLostError:
    error = ResidualLostError(
        "the kept forward of this pullback is gone (evicted for lack of memory, released, of a former life of the "
        "worker, or made where nothing was kept). Run the forward again"
    )
    error.recompute = asks_for_operands  # type: ignore[attr-defined]
    return error
