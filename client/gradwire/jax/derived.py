"""Which derived function of a remote function a node of a JAX program stands for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradwire.site import Site
from gradwire_wire.carriers import Aval
from gradwire_wire.messages import KEEP_NOTHING
from gradwire_wire.words import Word, pulled_results

if TYPE_CHECKING:
    from gradwire.handle import Handle

__all__ = ["KEEP_STAMP", "STAMPED", "Derived", "describe", "has_empty_batch", "parities"]

KEEP_STAMP = 3
"""Keep nothing, and give a stamp in the place of a token: how often the module had changed at this forward."""
STAMPED = -1
"""In the place of a length of a word: what the first operand has are stamps."""


@dataclass(frozen=True)
class Derived:
    """The one parameter of the primitive: hashable, equal where two nodes do the same.

    word: what is derived (`gradwire_wire.words`). keep: whether the worker keeps this forward's graph; the
    token, uint32 (2,) or rows (batch, 2) of (token, row), is then the last result. token_ops: the length of the
    word that the token in the first operand belongs to; None where there is no such operand. What is evaluated
    afresh has a stamp there instead (`KEEP_STAMP`): if the module has changed since, it is not the same forward.
    quiet: a pullback that adds nothing to the module's gradients, although its site accumulates.
    waits: the caller waits for the results, so program order is kept without JAX's help.
    primals: of a forward that is differentiated, by which operands, innermost first; empty unless it is of a function
    with rules of its own. What derives it further derives ('P', wrt) of the word (`then`). No part of the word itself, for
    the token is that of the word's own evaluation, which gives these results as well.
    """

    handle: Handle
    site: Site
    word: Word = ()
    keep: int = KEEP_NOTHING
    token_ops: int | None = None
    quiet: bool = False
    waits: bool = False
    primals: Word = ()

    def __repr__(self) -> str:
        return f"{self.handle!r} {self.word}"

    def then(self, op: tuple, token_ops: int | None) -> Derived:
        """The derived function of this one, with the token of a word of that length."""
        word = (*self.word, *self.primals, op)
        return replace(
            self, word=word, keep=KEEP_NOTHING, token_ops=token_ops, quiet=False, waits=False, primals=()
        )

    @property
    def evaluated(self) -> Word:
        """The word as the worker is told it. What it keeps it derives, and so uses the function's rules anyhow."""
        is_kept = self.keep not in (KEEP_NOTHING, KEEP_STAMP)
        return self.word if is_kept or self.moves_state else (*self.word, *self.primals)

    @property
    def accumulates(self) -> bool:
        """Whether evaluating it adds to the module's gradients.

        With an anchor, only where the anchor is differentiated: the pullback of an inner derivative
        (a gradient penalty's) is none of the loss, and does not.
        """
        if not self.site.accumulate or self.quiet or not self.word or self.word[-1][0] != "T":
            return False
        return not self.site.anchored or 0 in self.word[-1][1]

    @property
    def moves_state(self) -> bool:
        """Whether it must be evaluated exactly as often, and in the order, written."""
        return self.accumulates or (self.site.stateful and not self.word)

    @property
    def ordered(self) -> bool:
        """Whether JAX has to see to that."""
        return self.moves_state and not self.waits

    @property
    def message_site(self) -> Site:
        """The site as the worker is told it."""
        return self.site if self.accumulates else replace(self.site, accumulate=False)

    @property
    def is_batched(self) -> bool:
        """Whether some axis of it came from vmap."""
        return any(op[0] == "V" for op in self.word)


def has_empty_batch(word: Word, operands: tuple[Aval, ...]) -> bool:
    """Whether some batch of the word has no rows: nothing is evaluated then, and every result is empty or zero."""
    for op in reversed(word):
        if op[0] == "V":
            sizes = [a.shape[0] for a, mapped in zip(operands, op[1], strict=True) if mapped]
            if 0 in sizes:
                return True
            operands = tuple(
                Aval(a.shape[1:], a.dtype) if mapped else a for a, mapped in zip(operands, op[1], strict=True)
            )
        elif op[0] != "P":
            operands = operands[: len(operands) - (len(op[1]) if op[0] == "J" else op[2])]
    return False


def parities(word: Word, operands: int) -> tuple[list[int], list[int] | None]:
    """Which operands and results differ by a conjugate between JAX's convention and the wire's.

    JAX's cotangent is the conjugate of the adjoint in Re<a, b> that the wire has. So a pullback's cotangents
    differ once more than the results they belong to, and its results once more than the operands they belong
    to; tangents and batches are as what they are made from. None: no result differs.
    """
    if not word:
        return [0] * operands, None
    rest, op = word[:-1], word[-1]
    if op[0] in "VP":
        return parities(rest, operands)
    if op[0] == "J":
        of_operands, of_results = parities(rest, operands - len(op[1]))
        return of_operands + [of_operands[i] for i in op[1]], of_results
    of_operands, of_results = parities(rest, operands - op[2])
    cotangents = [1 ^ p for p in ([0] * op[2] if of_results is None else pulled_results(op, of_results))]
    return of_operands + cotangents, [1 ^ of_operands[i] for i in op[1]]


def describe(derived: Derived) -> str:
    """For error messages: the pullback of worker/models:make_net."""
    names = {"J": "tangent", "T": "pullback", "V": "batched form", "P": "forward"}
    of = "".join(f"the {names[op[0]]} of " for op in reversed(derived.word))
    return f"{of}{derived.handle.name}"
