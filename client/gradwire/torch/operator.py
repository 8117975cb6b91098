"""Derived functions as one operator of torch's dispatcher, for whoever looks at calls from below autograd.

`TorchDispatchMode`s (make_fx, fake tensors, flop counters) and Dynamo see operators, not Python. Ours takes
strings, integers and tensors, nothing else: a graph that holds it can be copied, cached and compiled.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from gradwire.derived import Derived
from gradwire.site import Site
from gradwire.torch import evaluation
from gradwire.torch.tokens import token_tensor
from gradwire_wire.tensors.torch import aval, torch_dtype

if TYPE_CHECKING:
    from gradwire.handle import Handle

__all__ = ["evaluate"]

_SCHEMA = "call(str call, str word, int token_ops, bool accumulate, int keep, Tensor? token, Tensor[] operands) -> Tensor[]"
_calls: list[tuple[Handle, Site]] = []  # for ever: a compiled graph knows a call by its number alone


@cache
def _number(handle: Handle, site: Site) -> str:
    _calls.append((handle, site))
    return str(len(_calls) - 1)


def evaluate(fn: Derived, token: Any, operands: Sequence[Any]) -> tuple[list[Any], Any]:
    """`evaluation.evaluate` as a call of the operator: the same, but unused operands get zeros."""
    call = _number(fn.handle, fn.site)
    *results, kept = _operator()[1](
        call, repr(fn.word), fn.token_ops, fn.accumulate, fn.keep, token, list(operands)
    )
    if not fn.word:
        fn.structure = fn.handle.spec(fn.site, tuple(aval(x) for x in operands)).structure
    return results, kept if fn.keep else None


@cache
def _operator() -> tuple[Any, Any]:
    library = torch.library.Library("gradwire", "DEF")  # its definitions end with it
    library.define(_SCHEMA)
    library.impl("call", _run, "CompositeExplicitAutograd")
    getattr(torch.library, "register_fake", torch.library.impl_abstract)("gradwire::call", _fake, lib=library)
    return library, torch.ops.gradwire.call.default


def _derived(call: str, word: str, token_ops: int, accumulate: bool, keep: int) -> Derived:
    handle, site = _calls[int(call)]
    return Derived(handle, site, ast.literal_eval(word), token_ops, accumulate, keep)


def _run(
    call: str, word: str, token_ops: int, accumulate: bool, keep: int, token: Any, operands: list[Any]
) -> list[Any]:
    fn = _derived(call, word, token_ops, accumulate, keep)
    results, kept = evaluation.evaluate(fn, token, operands)
    dense = [evaluation.zeros_like_result(fn, i, operands) if y is None else y for i, y in enumerate(results)]
    return [*dense, token_tensor(fn.handle, 0) if kept is None else kept]


def _fake(
    call: str, word: str, token_ops: int, accumulate: bool, keep: int, token: Any, operands: list[Any]
) -> list[Any]:
    fn = _derived(call, word, token_ops, accumulate, keep)
    avals = fn.result_avals([aval(x) for x in operands])
    results = [torch.empty(a.shape, dtype=torch_dtype(a.dtype)) for a in avals]
    rows = (results[0].shape[0],) if keep == 2 and results else ()
    return [*results, torch.empty((*rows, 2), dtype=torch.int64)]
