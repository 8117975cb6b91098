"""A derived function of a remote call: what a node of an eager framework's graph computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradwire.site import Outcome, Site
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.errors import ResidualLostError
from gradwire_wire.words import Word, result_avals

if TYPE_CHECKING:
    from gradwire.handle import Handle

__all__ = ["Derived", "moved"]


@dataclass(slots=True, eq=False)
class Derived:
    """The function ``word`` of one call.

    token_ops: operations of the word that the forward under the token had; only looked at with a token.
    accumulate: this pullback adds to the gradients that the worker's module owns.
    keep: 0 nothing, 1 this evaluation, 2 the rows of this batch: a token comes with the results.
    structure: of F's result tree, once F was evaluated. held: what must live as long as this does.
    changes: the handle's count when F was called.
    """

    handle: Handle
    site: Site
    word: Word = ()
    token_ops: int = 0
    accumulate: bool = False
    keep: int = 0
    structure: bytes = b""
    held: Any = None
    changes: int = -1

    def __post_init__(self) -> None:
        if self.changes < 0:
            self.changes = self.handle.changes

    @property
    def only_accumulates(self) -> bool:
        """Whether this pullback is for what it adds in the worker alone: the anchor's cotangent is zero, whatever comes back."""
        return self.accumulate and not self.keep and self.word[-1][1] == (0,)

    def then(self, op: tuple[Any, ...], *, accumulate: bool = False) -> Derived:
        """The derivative ``op`` of this function, at a token of this function's evaluation."""
        return Derived(
            self.handle, self.site, (*self.word, op), len(self.word), accumulate, changes=self.changes
        )

    def batched(self, axes: tuple[bool, ...], keep: int) -> Derived:
        """This function over a leading axis of the operands that ``axes`` marks."""
        return Derived(
            self.handle,
            self.site,
            (*self.word, ("V", axes)),
            self.token_ops,
            self.accumulate,
            keep,
            changes=self.changes,
        )

    def invoke(self, carriers: Sequence[Carrier], token: int | np.ndarray = 0) -> Outcome:
        """Ask the worker; see `Handle.invoke`. Blocks.

        Never has a forward repeated that moves the module's state: ResidualLostError then.
        """
        afresh = type(token) is int and token == 0
        if afresh and self.word:
            self._check_repetition()
        outcome = self.handle.invoke(
            self.site if self.accumulate or not self.word else self.site.quiet,
            self.word,
            carriers,
            keep=self.keep,
            token=token,
            token_ops=0 if afresh else self.token_ops,
        )
        if not self.word:
            self.structure = outcome.structure
        return outcome

    def structure_of(self, avals: Sequence[Aval]) -> bytes:
        """F's result tree, without an evaluation. Asks the worker once a signature."""
        return self.handle.spec(self.site, tuple(avals)).structure

    def result_avals(self, avals: Sequence[Aval]) -> list[Aval]:
        """Shapes and dtypes of the results, from those of the operands. Asks the worker once a signature."""
        return result_avals(self.word, avals, lambda base: self.handle.spec(self.site, base).avals)

    def _check_repetition(self) -> None:
        """Raises ResidualLostError where a derivative would need the forward again, and that would not be the same."""
        if all(op[0] == "V" for op in self.word):
            return
        if self.site.stateful:
            raise ResidualLostError(
                f"{self.handle.name}: this derivative needs the forward again, and repeating it would move the "
                "module's state (BatchNorm, dropout) a second time. It is a derivative inside nested torch.func.vmap, "
                'or of a call with options(residuals="recompute"). Use remote.eval(), or one level of vmap'
            )
        if self.changes != self.handle.changes:
            raise moved(self.handle.name)


def moved(name: str) -> ResidualLostError:
    """The error of a forward that cannot be repeated, because its module is another by now."""
    return ResidualLostError(
        f"{name}: this derivative needs the forward again, and the module was changed since (a step, a load, a restart, or a call "
        "in training mode, which moves BatchNorm's statistics). Run the forward again, or derive before the change; "
        "residuals='keep' keeps what it needs"
    )
