"""Which way a derived function is evaluated: from a kept graph, by running the forward again, or not at all."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence, Union

import numpy as np

from gradwire_wire import messages
from gradwire_wire.carriers import Aval
from gradwire_wire.errors import ResidualLostError
from gradwire_wire.messages import Call
from gradwire_wire.words import linear_count, without_primals
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
    word: Any,
    call: Asked,
    operands: Sequence[Any],
    residuals: Residuals,
    zeros: Callable[[Aval], Any],
) -> Evaluated:
    """The derived function at the operands. ``zeros``: makes a tensor of them.

    An operand is None where the client left it out: it is needed only if the kept forward is gone.
    ResidualLostError then asks for it, or says that the forward must be run again by the caller.
    """
    if not getattr(program, "rules_end", False) and any(op[0] == "P" for op in word):
        word, token_ops = without_primals(word, call.token_ops)
        call = Request(call.remote, call.keep, call.token, token_ops)
    if call.token:
        derived = _from_residual(site, word, call, operands, residuals, zeros)
        if derived is not None:
            return derived
        if (
            site.accumulate
            or site.training
            or site.training not in (None, program.training)
            or program.generation
            or has_moved(program)
            or _is_of_a_former_life(program, call, residuals)
        ):
            raise _lost(asks_for_operands=False)
    if any(x is None for x in operands):
        raise _lost(asks_for_operands=True)
    if call.keep == messages.KEEP_ROWS:
        return Evaluated(*program.keep_rows(site, word, operands))
    if call.keep:
        return Evaluated(*program.keep(site, word, operands))
    return Evaluated(program.run(site, word, operands))


def _from_residual(
    site: WorkerSite,
    word: Any,
    call: Asked,
    operands: Sequence[Any],
    residuals: Residuals,
    zeros: Callable[[Aval], Any],
) -> Evaluated | None:
    """From the graph kept under the call's token; None where there is none or it does not serve."""
    rows = call.token if type(call.token) is list else None
    token = call.token if rows is None else rows[0][0]
    kept = residuals.find(token, call.remote)
    linear = operands[len(operands) - linear_count(word) :]
    if kept is None or len(word) <= call.token_ops:
        return None
    at = call.token_ops
    while word[at][0] == "P" and at + 1 < len(word):
        at += 1
    op, further = word[at], word[at + 1 :]
    if op[0] not in "TJ":
        return None
    if any(x is None for x in linear):
        if op[0] == "J" or rows is not None or further or call.keep:
            return None
        whole = _linear_without_gaps(kept, linear, zeros)
        if whole is None:
            return None
        linear = whole
    if op[0] == "T":
        residuals.note_pulled(token)
    if rows is not None:
        return None if at > call.token_ops else _from_rows(kept.residual, op, further, call, linear, rows)
    if further:
        return None
    accumulate = site.accumulate and op[0] == "T"
    of = kept.residual if at == call.token_ops else kept.residual.differentiated(word[call.token_ops : at])
    tensors, residual = of.derive(op, linear, keep=bool(call.keep), accumulate=accumulate)
    return Evaluated(Result(tensors), residual)


def _linear_without_gaps(
    kept: Kept, cotangents: Sequence[Any], zeros: Callable[[Aval], Any]
) -> Sequence[Any] | None:
    """Cotangents of which some are absent, as the residual takes them; None where it is not known what they are like."""
    if getattr(kept.residual, "takes_absent", False):
        return cotangents
    if len(kept.results) != len(cotangents):
        return None
    return [zeros(aval) if x is None else x for x, aval in zip(cotangents, kept.results)]


def _from_rows(
    residual: Residual, op: Any, further: Any, call: Asked, linear: Sequence[Any], rows: list[Any]
) -> Evaluated | None:
    """The same for a batch whose rows were kept at once, under one token."""
    if call.keep or len(further) != 1 or further[0][0] != "V" or any(row[0] != rows[0][0] for row in rows):
        return None
    batch = residual.derive_rows(op, further[0][1], linear, np.asarray([row[1] for row in rows]))
    return None if batch is None else Evaluated(Result(batch))


def _is_of_a_former_life(program: Program, call: Asked, residuals: Residuals) -> bool:
    """Whether a module's forward was made before the worker was restarted: its parameters were others then.

    Token 0 stands for a forward that was never kept.
    """
    token = call.token[0][0] if type(call.token) is list and call.token else call.token
    return program.is_module and bool(token) and not residuals.was_issued(token)


def has_moved(program: Program) -> bool:
    """See `gradwire_workers.program.Program.has_moved`; what does not say has nothing that could."""
    asked = getattr(program, "has_moved", None)
    return asked is not None and asked()


def _lost(*, asks_for_operands: bool) -> ResidualLostError:
    error = ResidualLostError(
        "the kept forward of this pullback is gone (evicted for lack of memory, released, of a former life of the "
        "worker, or made where nothing was kept). Run the forward again"
    )
    error.recompute = asks_for_operands  # type: ignore[attr-defined]
    return error
