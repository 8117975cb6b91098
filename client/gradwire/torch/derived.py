"""A derived function of a remote call, and what torch's autodiff asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from gradwire.site import Site
from gradwire.torch.tokens import named_by, token_tensor
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.errors import ResidualLostError
from gradwire_wire.tensors.torch import adopt, aval, export, torch_dtype
from gradwire_wire.words import Word, result_avals

if TYPE_CHECKING:
    from gradwire.handle import Handle

__all__ = ["Derived", "inexact"]


def inexact(x: Any) -> bool:
    """Whether a tensor can carry a derivative."""
    return x.is_floating_point() or x.is_complex()


@lru_cache(maxsize=4096)
def _quiet(site: Site) -> Site:
    """The same call with a pullback that leaves the module's own gradients alone."""
    return replace(site, accumulate=False)


class _Exported(Sequence[Carrier]):
    """Operands as carriers, each made when it is looked at: at a kept token the primals are not."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: Any) -> Any:
        found = self._tensors[index]
        return [export(x) for x in found] if isinstance(index, slice) else export(found)


@dataclass(slots=True, eq=False)
class Derived:
    """The function ``word`` of one call: what a node of the autograd graph computes.

    token_ops: operations of the word that the forward under the token had; only looked at with a token.
    accumulate: this pullback adds to the gradients that the worker's module owns.
    keep: 0 nothing, 1 this evaluation, 2 the rows of this batch: a token comes with the results.
    dense: unused operands get zeros instead of None (functorch knows no None among results).
    structure: of F's result tree, once F was evaluated.
    """

    handle: Handle
    site: Site
    word: Word = ()
    token_ops: int = 0
    accumulate: bool = False
    keep: int = 0
    dense: bool = False
    structure: bytes = b""

    def then(self, op: tuple[Any, ...], *, accumulate: bool = False) -> Derived:
        """The derivative ``op`` of this function, at a token of this function's evaluation."""
        return Derived(self.handle, self.site, (*self.word, op), len(self.word), accumulate)

    def batched(self, axes: tuple[bool, ...], keep: int) -> Derived:
        """This function over a leading axis of the operands that ``axes`` marks."""
        word = (*self.word, ("V", axes))
        return replace(self, word=word, keep=keep, structure=b"")

    def evaluate(self, token: Any, operands: Sequence[Any]) -> tuple[list[Any], Any]:
        """Ask the worker. Returns the results (None: an operand is unused) and the token tensor or None.

        Blocks. ``token``: a token tensor or None. The results are over the memory that came back, private to
        this process and writable. Raises what `Handle.invoke` raises.
        """
        name = named_by(token)
        afresh = type(name) is int and name == 0
        if afresh and self.site.stateful and self.word:
            self._refuse_repetition()
        outcome = self.handle.invoke(
            self.site if self.accumulate or not self.word else _quiet(self.site),
            self.word,
            [export(x) for x in operands] if afresh else _Exported(operands),
            keep=self.keep,
            token=name,
            token_ops=self.token_ops if token is not None else 0,
        )
        self.structure = outcome.structure
        results: list[Any] = [None if c is None else adopt(c) for c in outcome.carriers]
        if self.dense and None in outcome.carriers:
            results = [self.zeros(i, operands) if y is None else y for i, y in enumerate(results)]
        if not self.keep:
            return results, None
        rows = results[0].shape[0] if self.keep == 2 and results else None
        return results, token_tensor(self.handle, outcome.token, rows)

    def zeros(self, index: int, operands: Sequence[Any]) -> Any:
        """Zeros like a result that is None, which only pullbacks have."""
        shape, dtype = self.result_avals([aval(x) for x in operands])[index]
        return torch.zeros(shape, dtype=torch_dtype(dtype))

    def result_avals(self, avals: Sequence[Aval]) -> list[Aval]:
        """Shapes and dtypes of the results, from those of the operands. Asks the worker once a signature."""
        return result_avals(self.word, avals, lambda base: self.handle.spec(self.site, base).avals)

    def _refuse_repetition(self) -> None:
        op = next((op for op in self.word if op[0] != "V"), None)
        if op is not None:
            raise ResidualLostError(
                f"{self.handle.name}: this derivative needs the forward again, and repeating it would move the "
                "module's state (BatchNorm, dropout) a second time. It is a derivative inside nested torch.func.vmap, "
                'or of a call with options(residuals="recompute"). Use remote.eval(), or one level of vmap'
            )
