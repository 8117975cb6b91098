"""A `Handle` whose worker is a torch function in another thread of this process.

It keeps graphs under tokens and derives them as a torch worker does, so that a caller's rules can be tested
without a process. The thread stands for the process: no functorch level, dispatch mode or grad mode of the
caller reaches it. `counts` says what was asked for, `kept` which tokens are alive.
"""

from __future__ import annotations

import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from gradwire.caches import Cached
from gradwire.site import Outcome, Site, SpecResult
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.errors import GradwireError, RemoteError, ResidualLostError, remote_error
from gradwire_wire.structures import fill, flatten
from gradwire_wire.tensors import torch as tensors
from gradwire_wire.words import Op, Word, pulled_results

Tensors = list[torch.Tensor]


class Kept(NamedTuple):
    """The graph of a forward: operands and results. ``batch``: so many rows of it were kept, with these operands each."""

    operands: Tensors
    results: Tensors
    batch: int = 0
    of_rows: Sequence[torch.Tensor] = ()


class TorchHandle(Cached):
    """See `gradwire.handle.Handle`. ``target``: a function of torch tensors, or an `nn.Module`."""

    moves_in_evaluation, why_it_moves = False, "is in training mode"
    link = SimpleNamespace(recorder=None)

    def __init__(self, target: Callable[..., Any]) -> None:
        self.name, self.changes, self.is_dead = "double", 0, False
        self.target, self.is_module = target, isinstance(target, torch.nn.Module)
        self.accumulates = self.is_module
        self.parameters = list(target.parameters()) if isinstance(target, torch.nn.Module) else []
        self.kept: dict[int, Kept] = {}
        self.counts: Counter[str] = Counter()
        self._tokens = itertools.count(1)
        self._thread = ThreadPoolExecutor(1)
        self.has_warned = False
        self.asked: set[str] = set()
        self.training = target.training if isinstance(target, torch.nn.Module) else None

    def invoke(
        self,
        site: Site,
        word: Word,
        carriers: Sequence[Carrier],
        *,
        keep: int = 0,
        token: int | np.ndarray = 0,
        token_ops: int = 0,
    ) -> Outcome:
        if site.alone:
            self.counts["alone"] += 1
        copies = [c._replace(array=np.array(c.array)) for c in carriers]

        def work() -> Outcome:
            run = _Run(self, site, word, [tensors.adopt(c) for c in copies])
            return run.outcome(keep, token, token_ops)

        return self._thread.submit(work).result(60)

    def spec(self, site: Site, avals: tuple[Aval, ...]) -> SpecResult:
        self.counts["spec"] += 1

        def work() -> SpecResult:
            operands = [torch.zeros(a.shape, dtype=tensors.torch_dtype(a.dtype)) for a in avals]
            run = _Run(self, site, (), operands)
            try:
                results = run.evaluate((), operands)
            except Exception as error:
                raise _as_remote(error) from None
            return SpecResult(tuple(tensors.aval(y) for y in results), run.structure)

        return self._thread.submit(work).result(60)

    def release(self, token: int) -> None:
        self.counts["released"] += 1
        self.kept.pop(token, None)

    def drain(self) -> None:
        """Nothing is submitted here."""

    def change_state(
        self, verb: str, structure: bytes, carriers: Sequence[Carrier], timeout_s: float | None = None
    ) -> tuple[bytes, list[Carrier]]:
        assert verb == "regularizers", verb  # modules of torch have none
        return flatten([], lambda x: False)[0], []

    def close(self) -> None:
        self._thread.shutdown()


def _as_remote(error: Exception) -> RemoteError:
    text = "".join(traceback.format_exception(error))
    return remote_error(f"builtins.{type(error).__name__}", str(error), text, "double")


def inexact(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class _Run:
    """One message, in the worker's thread."""

    def __init__(self, handle: TorchHandle, site: Site, word: Word, operands: Tensors) -> None:
        self.handle, self.site, self.word, self.operands = handle, site, word, operands
        self.structure = b""

    def outcome(self, keep: int, token: int | np.ndarray, token_ops: int) -> Outcome:
        self.handle.counts["message"] += 1
        try:
            with torch.set_grad_enabled(bool(keep)):
                results, kept = self.results(keep, token, token_ops)
        except GradwireError:
            raise
        except Exception as error:
            raise _as_remote(error) from None
        number = 0
        if keep:
            number = next(self.handle._tokens)
            self.handle.kept[number] = kept
        arrays = [None if y is None else tensors.export(y) for y in results]
        return Outcome(
            [a and a._replace(array=np.array(a.array)) for a in arrays],
            b"" if self.word else self.structure,
            number,
        )

    def results(self, keep: int, token: int | np.ndarray, token_ops: int) -> tuple[Sequence[Any], Kept]:
        if isinstance(token, np.ndarray):
            found = self.rows(token, token_ops)
            if found is not None:
                return found, Kept([], [])
        elif token:
            kept = self.handle.kept.get(token)
            if kept is None and self.site.stateful:
                raise ResidualLostError(f"token {token} is gone")
            if kept is not None and len(self.word) == token_ops + 1:
                return self.derive(kept, keep)
        if keep == 2:
            return self.keep_rows()
        self.handle.counts["keep" if keep else "recompute" if self.word else "plain"] += 1
        if keep:
            for x in self.operands:
                x.requires_grad_(inexact(x))
        results = self.evaluate(self.word, self.operands)
        return results, Kept(self.operands, results)

    def evaluate(self, word: Word, operands: Tensors) -> Tensors:
        if word:
            function = lambda *xs: tuple(self.evaluate(word[:-1], list(xs)))  # noqa: E731
            return list(_RULES[word[-1][0]](function, word[-1], operands))
        args, kwargs = fill(self.site.structure, operands[1:] if self.site.anchored else operands)
        tree = self.handle.target(*args, **kwargs)
        self.structure, leaves = flatten(tree, lambda x: isinstance(x, torch.Tensor), "the result")
        return leaves

    def derive(self, kept: Kept, keep: int) -> tuple[Sequence[Any], Kept]:
        op, graph = self.word[-1], bool(keep)
        n = len(op[1]) if op[0] == "J" else op[2]
        linear: list[Any] = self.operands[len(self.operands) - n :]
        if keep:
            linear = [x.requires_grad_() for x in linear]
        with torch.enable_grad():
            if op[0] == "T":
                self.handle.counts["pull"] += 1
                results: list[Any] = self.pull(kept, op, linear, graph, self.site.accumulate)
            else:
                self.handle.counts["push"] += 1
                results = self.push(kept, op[1], linear, graph)
        zeros = [torch.zeros_like(kept.operands[i]) for i in op[1]] if op[0] == "T" else results
        known = [z if y is None else y for y, z in zip(results, zeros, strict=True)]
        return results, Kept([*kept.operands, *linear], known)

    def pull(self, kept: Kept, op: Op, cotangents: Tensors, graph: bool, accumulate: bool) -> list[Any]:
        wrt, results = op[1], pulled_results(op, list(filter(inexact, kept.results)))
        inputs = [kept.operands[i] for i in wrt] + (self.handle.parameters if accumulate else [])
        pairs = [(y, c) for y, c in zip(results, cotangents, strict=True) if y.requires_grad]
        if not pairs or not inputs:
            return [None] * len(wrt)
        ys, cs = zip(*pairs, strict=True)
        found = torch.autograd.grad(ys, inputs, cs, retain_graph=True, create_graph=graph, allow_unused=True)
        for p, g in zip(self.handle.parameters, found[len(wrt) :], strict=False):
            if g is not None:
                p.grad = g.detach() if p.grad is None else p.grad + g.detach()
        return list(found[: len(wrt)])

    def push(self, kept: Kept, wrt: Sequence[int], tangents: Tensors, graph: bool) -> Tensors:
        ys = list(filter(inexact, kept.results))
        us = [torch.zeros_like(y, requires_grad=True) for y in ys]
        pairs = zip(self.pull(kept, ("T", wrt, len(us)), us, True, False), tangents, strict=True)
        pairs = [(p, t) for p, t in pairs if p is not None and p.requires_grad]
        if not pairs:
            return [torch.zeros_like(y) for y in ys]
        ps, ts = zip(*pairs, strict=True)
        found = torch.autograd.grad(ps, us, ts, retain_graph=True, create_graph=graph, allow_unused=True)
        return [torch.zeros_like(y) if d is None else d for y, d in zip(ys, found, strict=True)]

    def keep_rows(self) -> tuple[Sequence[Any], Kept]:
        self.handle.counts["keep_rows"] += 1
        axes = self.word[-1][1]
        batch = next(x.shape[0] for x, m in zip(self.operands, axes, strict=True) if m)
        whole = [x.detach().requires_grad_() if inexact(x) else x for x in self.operands]
        rows = [x if m else x.expand(batch, *x.shape) for x, m in zip(whole, axes, strict=True)]
        results = self.evaluate((*self.word[:-1], ("V", (True,) * len(rows))), rows)
        return results, Kept(whole, results, batch, rows)

    def rows(self, rows: np.ndarray, token_ops: int) -> list[Any] | None:
        assert rows.dtype == np.uint32 and rows.ndim == 2 and rows.shape[1] == 2, rows
        assert not token_ops, "the rows of what was batched already"
        kept = self.handle.kept.get(int(rows[0, 0])) if len(rows) else None
        whole = kept is not None and (rows == [[rows[0, 0], i] for i in range(kept.batch)]).all()
        if kept is None or not whole or len(self.word) != 2 or self.word[-1][0] != "V":
            return None
        op, axes = self.word[0], self.word[-1][1]
        kept = kept._replace(operands=kept.of_rows)
        n = len(op[1]) if op[0] == "J" else op[2]
        linear = [
            x if m else x.expand(kept.batch, *x.shape)
            for x, m in zip(self.operands[-n:], axes[-n:], strict=True)
        ]
        self.handle.counts["pull_rows" if op[0] == "T" else "push_rows"] += 1
        with torch.enable_grad():
            if op[0] == "J":
                return self.push(kept, op[1], linear, False)
            found = self.pull(kept, op, linear, False, False)
        return [
            torch.zeros_like(kept.operands[i]) if g is None else g for i, g in zip(op[1], found, strict=True)
        ]


def _tangent(function: Callable[..., Any], op: Any, operands: Tensors) -> Sequence[torch.Tensor]:
    """By two pullbacks: dual levels are process-wide, and this double shares the process of its caller."""
    xs, ds = operands[: -len(op[1]) or None], operands[-len(op[1]) or len(operands) :]
    ys, pull = torch.func.vjp(_partial(function, op[1], xs), *[xs[i] for i in op[1]])
    return torch.func.vjp(lambda *us: pull(us), *[torch.zeros_like(y) for y in ys])[1](tuple(ds))


def _pullback(function: Callable[..., Any], op: Any, operands: Tensors) -> Sequence[torch.Tensor]:
    n = len(operands) - op[2]
    xs, cs = operands[:n], operands[n:]
    along = _partial(function, op[1], xs)
    _, pull = torch.func.vjp(
        lambda *values: tuple(pulled_results(op, along(*values))), *[xs[i] for i in op[1]]
    )
    return pull(tuple(cs))


def _batched(function: Callable[..., Any], op: Any, operands: Tensors) -> Sequence[torch.Tensor]:
    return torch.func.vmap(function, tuple(0 if m else None for m in op[1]))(*operands)


def _partial(function: Callable[..., Any], wrt: Sequence[int], xs: Tensors) -> Callable[..., Any]:
    """The inexact results as a function of the operands ``wrt`` alone."""

    def of_wrt(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operands = list(xs)
        for i, value in zip(wrt, values, strict=True):
            operands[i] = value
        return tuple(y for y in function(*operands) if inexact(y))

    return of_wrt


_RULES: dict[str, Callable[..., Sequence[torch.Tensor]]] = {
    "J": _tangent,
    "T": _pullback,
    "V": _batched,
}
