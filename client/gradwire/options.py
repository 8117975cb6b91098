"""What `Remote.options` sets: names, defaults, and what each may be."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from gradwire.families import FAMILIES, face_named, family_of
from gradwire.specs import spec_result
from gradwire_wire.errors import UsageError

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """What `Remote.options` sets; never mixed with the function's own keywords."""

    timeout: float | None = None
    seed: Any = None
    residuals: str = "keep"
    compile: bool | str = "auto"
    vmap: str = "batch"
    out_spec: Any = None
    family: str | None = None
    retry: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        if self.timeout is not None and not (number and self.timeout > 0):
            raise UsageError(f"timeout must be a positive number of seconds or None, not {self.timeout!r}")
        is_number = type(self.seed) is int and 0 <= self.seed < 2**63
        if not (self.seed is None or self.is_seed_traced or is_number):
            raise UsageError(f"seed must be an integer from 0 to 2**63 - 1 or None, not {self.seed!r}")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in allowed):
                raise UsageError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}")

    def changed(self, changes: dict[str, Any]) -> Options:
        """These with others in place of some. UsageError for one that there is not, or a value that it cannot have."""
        known = [f.name for f in fields(Options)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise UsageError(f"unknown option {', '.join(unknown)}; there are {', '.join(known)}")
        seed, timeout = changes.get("seed"), changes.get("timeout")
        if family_of(seed):
            changes["seed"] = _seed(seed)
        elif isinstance(seed, Integral) and not isinstance(seed, bool):
            changes["seed"] = operator.index(seed)
        if isinstance(timeout, Real) and not isinstance(timeout, bool):
            changes["timeout"] = _seconds(timeout)
        if changes.get("out_spec") is not None:
            spec_result(changes["out_spec"])  # which refuses what cannot be one
        return replace(self, **changes)

    @property
    def is_seed_traced(self) -> bool:
        """Whether the seed is a scalar of a program being traced: an operand of the call rather than part of its site."""
        return family_of(self.seed) != ""


_CHOICES: dict[str, tuple[Any, ...]] = {
    "residuals": ("keep", "recompute"),
    "compile": ("auto", True, False),
    "vmap": ("batch", "sequential"),
    "family": (None, "numpy", *FAMILIES),
    "retry": (True, False),
}


def _seconds(timeout: Any) -> float:
    try:
        return float(timeout)
    except OverflowError:
        raise UsageError(
            f"timeout={timeout!r:.40} is more seconds than can be waited; None waits for ever"
        ) from None


def _seed(x: Any) -> Any:
    """A seed that is a tensor: its number, or itself where a JAX program is being traced."""
    family = family_of(x)
    if family == "jax":
        return face_named("jax").seed(x)  # type: ignore[attr-defined]
    try:
        return operator.index(x.item() if hasattr(x, "item") else x)
    except Exception as error:
        raise UsageError(
            f"seed must be an integer, and of {family} one whose value is known: {error}. Under jit a seed may be "
            "traced in JAX programs only"
        ) from None
