"""Everything fixed about a call: what caches, traces and plans are keyed by."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from gradwire_wire import messages
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.errors import DtypeError, UnsupportedTensorError
from gradwire_wire.structures import LONE_LEAF, fill, leaf_paths

__all__ = ["Outcome", "Site", "SpecResult"]


@dataclass(frozen=True)
class Site:
    """A call without its tensors: hashable, comparable, the same for every call of one place.

    structure: the argument tree (``fill(structure, leaves) == [args, kwargs]``).
    training: the module's mode as the caller knows it, checked by the worker; None for functions.
    accumulate: pullbacks add to the module's own, worker-owned gradients.
    anchored: operand 0 is the anchor, a float32 scalar that the target never sees; its gradient is 0.
    alone: of the operands only the anchor is differentiated, now and later.
    seeded: the operand before the first of the target's own (after the anchor) is the seed.
    stateful: must happen exactly as often and in the order written.
    retry: may be repeated once in a new process where the worker died; the user calls it idempotent.
    number: of this object; stands for it where hashing all of it would cost more than the rest of a call.
    """

    structure: bytes
    training: bool | None = None
    accumulate: bool = False
    anchored: bool = False
    stateful: bool = False
    seed: int | None = None
    seeded: bool = False
    compile: bool | None = None
    timeout_s: float | None = None
    residuals: str = "keep"
    vmap: str = "batch"
    out_spec: SpecResult | None = None
    retry: bool = False
    alone: bool = False
    number: int = field(default_factory=itertools.count(1).__next__, init=False, repr=False, compare=False)

    @cached_property
    def with_anchor(self) -> Site:
        """The same call with the anchor in front of its operands: one object for all sites that are equal."""
        return _anchored(self)

    @cached_property
    def with_anchor_alone(self) -> Site:
        """The same where no other operand is differentiated."""
        return _alone(self.with_anchor)

    @cached_property
    def quiet(self) -> Site:
        """The same call with a pullback that leaves the module's own gradients alone; also one object."""
        return _quiet(self)

    @property
    def hidden(self) -> list[str]:
        """For messages: the operands before the target's own."""
        return ["the anchor"] * self.anchored + ["the seed"] * self.seeded

    @property
    def flags(self) -> int:
        """The flags of the messages this site sends."""
        flags = (
            messages.ACCUMULATE * self.accumulate
            | messages.ANCHORED * self.anchored
            | messages.SEEDED * self.seeded
            | messages.ALONE * self.alone
        )
        return (
            flags if self.compile is None else flags | (messages.TRACED if self.compile else messages.EAGER)
        )


@lru_cache(maxsize=4096)
def _anchored(site: Site) -> Site:
    return replace(site, anchored=True)


@lru_cache(maxsize=4096)
def _alone(site: Site) -> Site:
    return replace(site, alone=True)


@lru_cache(maxsize=4096)
def _quiet(site: Site) -> Site:
    return replace(site, accumulate=False)


class SpecResult(NamedTuple):
    """Shapes and dtypes of the results, in order, and the result tree they go into.

    has_rules: some part of the function has derivative rules of its own, so its pullback may not be linear.
    """

    avals: tuple[Aval, ...]
    structure: bytes
    has_rules: bool = False


class Outcome(NamedTuple):
    """What a call brought back.

    carriers: leased views or copies, plain numpy memory that stays valid while it is alive; None in a
    pullback where the operand is not used. ``token``: of the kept forward, or 0.
    """

    carriers: Sequence[Carrier | None]
    structure: bytes
    token: int

    def tree(self, adopt: Callable[[Carrier], Any]) -> Any:
        """The result tree with tensors. Raises as `adopted`."""
        carriers, structure, _ = self
        if len(carriers) == 1 and structure == LONE_LEAF and carriers[0] is not None:
            return adopt(carriers[0])
        return fill(structure, self.adopted(adopt))

    def adopted(self, adopt: Callable[[Carrier], Any]) -> list[Any]:
        """The carriers as tensors. DtypeError where the framework here lacks the type, naming the result."""
        results: list[Any] = []
        try:
            for carrier in self.carriers:
                results.append(None if carrier is None else adopt(carrier))
        except (DtypeError, UnsupportedTensorError) as error:
            names = leaf_paths(self.structure, argument_names=False) if self.structure else []
            name = names[len(results)] if len(names) == len(self.carriers) else f"cotangent {len(results)}"
            raise type(error)(f"{name}: {error}") from None
        return results
