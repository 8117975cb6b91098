"""Derived functions as an operator of torch's dispatcher, for whoever looks at calls from below autograd.

`TorchDispatchMode`s (make_fx, fake tensors, flop counters) and Dynamo see operators, not Python. Ours takes
strings, integers and tensors, nothing else: a graph that holds it can be copied, cached and compiled. There
are two of it: pure calls may be merged, reordered and dropped; those of stateful sites may not.
"""

from __future__ import annotations

import ast
import itertools
import secrets
import sys
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch.autograd import forward_ad

from gradwire.derived import Derived
from gradwire.site import Site
from gradwire.torch import evaluation
from gradwire.torch.symbols import symbolic_avals
from gradwire.torch.tokens import holding_tensor, token_tensor
from gradwire_wire.errors import UsageError
from gradwire_wire.messages import KEEP_ROWS
from gradwire_wire.tensors.torch import aval, torch_dtype
from gradwire_wire.words import pullback_op

if TYPE_CHECKING:
    from gradwire.handle import Handle

__all__ = ["evaluate", "hold", "name", "operator", "structure"]

_SCHEMA = "(str call, str word, int token_ops, bool accumulate, int keep, bool compiled, Tensor? token, Tensor[] operands) -> Tensor[]"


class _Call:
    """What a name stands for: calls of one place. It lasts as long as its handle, which it does not keep.

    structure: of the result tree of F, as its latest evaluation or abstract evaluation found it.
    """

    def __init__(self, handle: Handle, site: Site) -> None:
        self._handle, self.site, self.structure = weakref.ref(handle), site, b""
        # No other process has the same names: torch keeps compiled graphs on disk, and a saved program may be loaded where the
        # first call is another.
        self.name = f"{_PROCESS}.{next(_numbers)}"

    @property
    def handle(self) -> Handle:
        found = self._handle()
        assert found is not None, "its calls went with it"
        return found


_PROCESS = secrets.token_hex(8)
_numbers = itertools.count()
_by_name: WeakValueDictionary[str, _Call] = WeakValueDictionary()
_of_handles: WeakKeyDictionary[Handle, dict[Site, _Call]] = WeakKeyDictionary()
_recorded: set[Handle] = set()
"""Whose names are in graphs that hold nothing else: those of make_fx and torch.export. For ever, for nobody can tell when these go."""


def name(handle: Handle, site: Site) -> str:
    """What the operator knows a call by, for as long as the handle is there: a graph with the name must hold it (`hold`)."""
    calls = _of_handles.setdefault(handle, {})
    found = calls.get(site)
    if found is None:
        made = _Call(handle, site)
        _by_name[made.name] = made
        found = calls.setdefault(site, made)
    return found.name


def hold(call: str, graph: object) -> torch.Tensor:
    """A tensor for that graph, while it is made: whoever has it has the handle, so that the name can be called. One for all its calls."""
    tensor, handles = _held.setdefault(graph, holding_tensor())
    handles.add(_known(call).handle)
    return tensor


_held: WeakKeyDictionary[object, tuple[torch.Tensor, set[Handle]]] = WeakKeyDictionary()


def structure(call: str) -> bytes:
    """The result tree of F, as its latest evaluation or abstract evaluation found it."""
    return _known(call).structure


def evaluate(fn: Derived, token: Any, operands: Sequence[Any]) -> tuple[list[Any], Any]:
    """`evaluation.evaluate` as a call of the operator: the same, but unused operands get zeros."""
    call = name(fn.handle, fn.site)
    if _is_recorded():
        _recorded.add(fn.handle)
    *results, kept = operator(fn.site.stateful)(
        call, repr(fn.word), fn.token_ops, fn.accumulate, fn.keep, False, token, list(operands)
    )
    if not fn.word:
        fn.structure = structure(call)
    return results, kept if fn.keep else None


def _is_recorded() -> bool:
    """Whether what is called now becomes a part of a graph of make_fx's, as torch.export's are."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


def operator(in_order: bool) -> Any:
    """The operator, for pure or for stateful sites; defined when it is first needed."""
    found = _operators.get(in_order)
    return _defined(in_order) if found is None else found


_operators: dict[bool, Any] = {}
_defining = threading.Lock()


def _defined(in_order: bool) -> Any:
    """By one thread: torch allows each name once."""
    with _defining:
        if in_order not in _operators:
            _operators[in_order] = _define(in_order)
        return _operators[in_order]


def _define(in_order: bool) -> Any:
    called = "call_in_order" if in_order else "call"
    _library().define(called + _SCHEMA)
    _library().impl(called, _run, "CompositeExplicitAutograd")
    register_fake = getattr(torch.library, "register_fake", None) or torch.library.impl_abstract
    register_fake(f"gradwire::{called}", _fake, lib=_library())
    found = getattr(torch.ops.gradwire, called).default
    if hasattr(torch.library, "register_autograd"):  # from torch 2.4 on; for Dynamo alone
        torch.library.register_autograd(
            f"gradwire::{called}", _backward, setup_context=_setup_context, lib=_library()
        )
    if in_order:
        _forbid_reordering(found)
    return found


@cache
def _library() -> Any:
    return torch.library.Library("gradwire", "DEF")  # its definitions would end with it


def _forbid_reordering(found: Any) -> None:
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    except ImportError:
        return
    _register_effectful_op(found, _EffectType.ORDERED)


def _derived(call: str, word: str, token_ops: int, accumulate: bool, keep: int) -> Derived:
    known = _known(call)
    return Derived(known.handle, known.site, ast.literal_eval(word), token_ops, accumulate, keep)


def _known(call: str) -> _Call:
    found = _by_name.get(call)
    if found is not None:
        return found
    if call.startswith(_PROCESS):
        raise UsageError(
            "the remote function of a call in this compiled program is gone: nothing holds it any more. Keep it, or the function "
            "that calls it, for as long as the program is used"
        )
    raise UsageError(
        "this program with a remote call was compiled or exported in another process, whose remote functions are not here. "
        "Compile or export it anew where it runs"
    )


def _run(
    call: str,
    word: str,
    token_ops: int,
    accumulate: bool,
    keep: int,
    compiled: bool,
    token: Any,
    operands: list[Any],
) -> list[Any]:
    _refuse_forward_mode(compiled)
    fn = _derived(call, word, token_ops, accumulate, keep)
    results, kept = evaluation.evaluate(fn, token, operands)
    if compiled and not fn.word:
        _check_announced(fn, operands, results)
    if fn.structure:
        _known(call).structure = fn.structure
    whole = [evaluation.zeros_like_result(fn, i, operands) if y is None else y for i, y in enumerate(results)]
    # As `_fake` has announced them: a graph misreads other strides, and those of the results follow what the operands have when it runs.
    return [*[y.contiguous() for y in whole], token_tensor(fn.handle, 0) if kept is None else kept]


def _fake(
    call: str,
    word: str,
    token_ops: int,
    accumulate: bool,
    keep: int,
    compiled: bool,
    token: Any,
    operands: list[Any],
) -> list[Any]:
    _refuse_forward_mode(compiled)
    fn = _derived(call, word, token_ops, accumulate, keep)
    avals, found = symbolic_avals(fn, operands)
    if found:
        _known(call).structure = found
    results = [torch.empty(a.shape, dtype=torch_dtype(a.dtype)) for a in avals]
    rows = (results[0].shape[0],) if keep == KEEP_ROWS and results else ()
    return [*results, torch.empty((*rows, 2), dtype=torch.int64)]


def _check_announced(fn: Derived, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """A compiled graph takes results for what it was told they would be: other sizes or types it would misread."""
    announced = fn.result_avals([aval(x) for x in operands])
    came = [aval(y) for y in results]
    for i, (a, b) in enumerate(zip(announced, came, strict=True)):
        if a != b:
            raise UsageError(
                f"{fn.handle.name}: result {i} was announced as {a.dtype.name}{list(a.shape)} when this call was traced, and "
                f"{b.dtype.name}{list(b.shape)} arrived. Where shapes or dtypes depend on values, make the call outside of what "
                "is compiled or traced, or give options(out_spec=...) and keep to it"
            )


def _refuse_forward_mode(compiled: bool) -> None:
    """In a compiled graph there is no node of ours around the operator, and the tangent would silently be zero."""
    if compiled and forward_ad._current_level >= 0:
        raise UsageError(
            "torch.func.jvp and forward_ad cannot pass through a remote call in a compiled function. "
            "Call the function that is not compiled"
        )


# ---- Autograd of the operator, for compiled programs -----------------------------------------------------------------


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.call, ctx.word, *_, ctx.compiled, _, operands = inputs
    *results, kept = output
    ctx.set_materialize_grads(False)
    ctx.differentiable = [i for i, y in enumerate(results) if y.is_floating_point() or y.is_complex()]
    ctx.save_for_backward(kept, *operands)


def _backward(ctx: Any, cotangents: Sequence[Any]) -> Any:
    """The rules of `gradwire.torch.nodes`, as a compiler can trace them."""
    kept, *operands = ctx.saved_tensors
    site = _known(ctx.call).site
    found: list[Any] = [None] * len(operands)
    needed = ctx.needs_input_grad[7]
    wrt = tuple(i for i, x in enumerate(operands) if needed[i] and (x.is_floating_point() or x.is_complex()))
    given = [cotangents[i] for i in ctx.differentiable]
    there = [c for c in given if c is not None]
    if wrt and there:
        word = (*ast.literal_eval(ctx.word), pullback_op(wrt, [c is not None for c in given]))
        accumulate = site.anchored and site.accumulate and needed[0]
        keep = int(torch.is_grad_enabled())
        every = operator(site.stateful)(
            ctx.call, repr(word), len(word) - 1, accumulate, keep, ctx.compiled, kept, [*operands, *there]
        )
        for i, c in zip(wrt, every, strict=False):
            found[i] = c
    return *(None for _ in range(7)), found
