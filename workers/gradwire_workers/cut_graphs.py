"""Pullbacks that reach none of the arguments: told of once for each target, since nobody would see it.

In one process torch refuses such a pullback: the loss requires no grad. Here the caller's own graph has a node for the call, whatever is
done in it, and the gradient would be zero, or None, without a word. Of some arguments that are not used nobody is told, as there.
"""

from __future__ import annotations

import warnings
from typing import Any, Sequence

from gradwire_wire.words import Word
from gradwire_workers.program import Program, WorkerSite

__all__ = ["warn_of_cut"]


def warn_of_cut(program: Program, site: WorkerSite, word: Word, cotangents: Sequence[Any]) -> None:
    """Warn, once for the program, where a first derivative leads from no result to any argument.

    cotangents: the results of ``word``. (A second one is zero wherever something is linear; parameters may be all that is wanted.)
    """
    is_pullback = len(word) == 1 and word[0][0] == "T" and not site.accumulate
    if not is_pullback or program.told_of_cut or not cotangents or any(c is not None for c in cotangents):
        return
    if not word[0][2]:  # no result has a cotangent: nothing was to lead anywhere
        return
    program.told_of_cut = True
    warnings.warn(
        f"the gradient of {program.name} is zero: those of its results that are used do not depend, as far as the framework "
        "sees, on any argument that is differentiated. Does it leave the framework on the way (.detach(), .item(), numpy, no_grad)? If that is "
        "meant, say so in the caller (jax.lax.stop_gradient(x), x.detach()), and nothing is asked for here",
        stacklevel=1,
    )
