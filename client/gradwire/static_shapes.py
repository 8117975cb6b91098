"""Static shapes of the results of a call whose operands have dimensions that are not known yet."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gradwire.derived import Derived
from gradwire.site import Site, SpecResult
from gradwire_wire.carriers import Aval
from gradwire_wire.dtypes import DType
from gradwire_wire.errors import GradwireError, UsageError
from gradwire_wire.words import result_avals

if TYPE_CHECKING:
    from gradwire.handle import Handle

__all__ = ["StaticAval", "static_results"]

# Sizes that stand for unknown dimensions, two at a time. Small ones first; then some that survive a convolutional
# network, whose strides divide them. Never 1, which broadcasts.
PROBES = ((2, 3), (64, 96), (224, 320))
LARGE = 67
"""Tried as well where the target takes it: sizes that are padded to a multiple, or at least something, differ there."""


class StaticAval(NamedTuple):
    """Shape and dtype as far as a traced program knows them: None is an unknown size, or an unknown rank."""

    shape: tuple[int | None, ...] | None
    dtype: DType


def static_results(fn: Derived, operands: Sequence[StaticAval]) -> tuple[list[StaticAval], bytes]:
    """What is known of the results of ``fn``, and F's result tree (where ``fn`` is F itself).

    Unknown sizes are filled in with different numbers; what then differs in the results is unknown.
    Raises UsageError where an operand has no rank, or where the target takes none of the probed sizes.
    """
    structure = b""

    def base(avals: Any) -> Sequence[Any]:
        nonlocal structure
        known, structure = _of_target(fn.handle, fn.site, avals)
        return known

    return result_avals(fn.word, operands, base), structure  # type: ignore[arg-type, return-value]


def _of_target(handle: Handle, site: Site, avals: Sequence[StaticAval]) -> tuple[list[StaticAval], bytes]:
    if any(a.shape is None for a in avals):
        raise UsageError(
            f"{handle.name}: an argument has no known rank in this traced program, so the shapes of the results cannot "
            "be found out. Give it a shape (an input_signature, tf.ensure_shape, keras.Input)"
        )
    if all(None not in (a.shape or ()) for a in avals):
        result = _probe(handle, site, avals, 0)
        return [StaticAval(*a) for a in result.avals], result.structure
    failure: GradwireError | None = None
    for sizes in PROBES:
        try:
            found = [_probe(handle, site, avals, size) for size in sizes]
        except GradwireError as error:
            failure = failure or error
        else:
            with contextlib.suppress(GradwireError):
                found.append(_probe(handle, site, avals, LARGE))
            return _common(handle, found), found[0].structure
    raise UsageError(
        f"{handle.name}: the shapes of the results for arguments of shapes {[a.shape for a in avals]} cannot be found "
        f"out: with {PROBES} in place of None the call fails, first with: {failure}. Where it needs other sizes, give the "
        "tf.function whole shapes in its input_signature, or give options(out_spec=...)"
    ) from failure


def _probe(handle: Handle, site: Site, avals: Sequence[StaticAval], size: int) -> SpecResult:
    whole = tuple(Aval(tuple(size if n is None else n for n in a.shape or ()), a.dtype) for a in avals)
    return handle.spec(site, whole)


def _common(handle: Handle, found: Sequence[SpecResult]) -> list[StaticAval]:
    kinds = [(result.structure, [a.dtype for a in result.avals]) for result in found]
    if any(kind != kinds[0] for kind in kinds):
        raise UsageError(
            f"{handle.name}: the result tree depends on the sizes that are not known in this tf.function. "
            "Give it whole shapes in its input_signature"
        )
    return [
        StaticAval(_agreed([a.shape for a in same]), same[0].dtype)
        for same in zip(*(result.avals for result in found), strict=True)
    ]


def _agreed(shapes: Sequence[tuple[int, ...]]) -> tuple[int | None, ...] | None:
    if len({len(shape) for shape in shapes}) > 1:
        return None
    return tuple(sizes[0] if len({*sizes}) == 1 else None for sizes in zip(*shapes, strict=True))
