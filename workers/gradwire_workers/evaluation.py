"""Which way a derived function is evaluated: from a kept graph, by running the forward again, or not at all."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, NamedTuple, Sequence, Union

import numpy as np

from gradwire_wire import messages
from gradwire_wire.carriers import Aval
from gradwire_wire.errors import ResidualLostError
from gradwire_wire.messages import Call
from gradwire_wire.words import Word, linear_count, without_primals
from gradwire_workers.program import Program, Residual, Result, WorkerSite
from gradwire_workers.residuals import Kept, Residuals

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
    zeros: Callable[[Aval], Any],
) -> Evaluated:
    """The derived function at the operands. ``zeros``: makes a tensor of them.

    An operand is None where the client left it out: it is needed only if the kept forward is gone.
    ResidualLostError then asks for it, or says that the forward must be run again by the caller.
    """
    if not program.rules_end and _has_primals(word):
        word, token_ops = without_primals(word, call.token_ops)
        call = Request(call.remote, call.keep, call.token, token_ops)
    if call.token:
        derived = _from_residual(site, word, call, operands, residuals, zeros)
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
    site: WorkerSite,
    word: Word,
    call: Asked,
    operands: Sequence[Any],
    residuals: Residuals,
    zeros: Callable[[Aval], Any],
) -> Evaluated | None:
    """From the graph kept under the call's token; None where there is none or it does not serve."""
    rows = call.token if type(call.token) is list else None
    token = call.token if rows is None else rows[0][0]
    kept, step = residuals.find(token, call.remote), _step_after(word, call.token_ops)
    if kept is None or step is None:
        return None
    linear = operands[len(operands) - _linear_count(word) :]
    if any(x is None for x in linear):
        is_plain = step.op[0] == "T" and rows is None and not step.further and not call.keep
        whole = _without_gaps(kept, linear, zeros) if is_plain else None
        if whole is None:
            return None
        linear = whole
    if step.op[0] == "T":
        residuals.note_pulled(token)
    if rows is not None:
        return None if step.rules else _from_rows(kept.residual, step, call, linear, rows)
    if step.further:
        return None
    of = kept.residual.differentiated(step.rules) if step.rules else kept.residual
    accumulate = site.accumulate and step.op[0] == "T"
    tensors, residual = of.derive(step.op, linear, keep=bool(call.keep), accumulate=accumulate)
    return Evaluated(Result(tensors), residual)


def _without_gaps(
    kept: Kept, cotangents: Sequence[Any], zeros: Callable[[Aval], Any]
) -> Sequence[Any] | None:
    """Cotangents of which some are absent, as the residual takes them; None where it is not known what they are like."""
    if kept.residual.takes_absent:
        return cotangents
    if len(kept.results) != len(cotangents):
        return None
    return [zeros(aval) if x is None else x for x, aval in zip(cotangents, kept.results)]


def _from_rows(
    residual: Residual, step: Step, call: Asked, linear: Sequence[Any], rows: list[Any]
) -> Evaluated | None:
    """The same for a batch whose rows were kept at once, under one token."""
    further = step.further
    if call.keep or len(further) != 1 or further[0][0] != "V" or any(row[0] != rows[0][0] for row in rows):
        return None
    batch = residual.derive_rows(step.op, further[0][1], linear, np.asarray([row[1] for row in rows]))
    return None if batch is None else Evaluated(Result(batch))


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
