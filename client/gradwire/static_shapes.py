"""Static shapes of the results of a call whose operands have dimensions that are not known yet."""

from __future__ import annotations

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


class StaticAval(NamedTuple):
    """Shape and dtype as far as a traced program knows them: None is an unknown size, or an unknown rank."""

    shape: tuple[int | None, ...] | None
    dtype: DType


def static_results(fn: Derived, operands: Sequence[StaticAval]) -> tuple[list[StaticAval], bytes]:
    """What is known of the results of ``fn``, and F's result tree (where ``fn`` is F itself).

    Unknown sizes are filled in with two different numbers; what then differs in the results is unknown.
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
            one, other = (_probe(handle, site, avals, size) for size in sizes)
        except GradwireError as error:
            failure = failure or error
        else:
            return _common(handle, one, other), one.structure
    raise UsageError(
        f"{handle.name}: the shapes of the results for arguments of shapes {[a.shape for a in avals]} cannot be found "
        f"out: with {PROBES} in place of None the call fails. Give the tf.function whole shapes in its "
        "input_signature, or give options(out_spec=...)"
    ) from failure


def _probe(handle: Handle, site: Site, avals: Sequence[StaticAval], size: int) -> SpecResult:
    whole = tuple(Aval(tuple(size if n is None else n for n in a.shape or ()), a.dtype) for a in avals)
    return handle.spec(site, whole)


def _common(handle: Handle, one: SpecResult, other: SpecResult) -> list[StaticAval]:
    if one.structure != other.structure or [a.dtype for a in one.avals] != [a.dtype for a in other.avals]:
        raise UsageError(
            f"{handle.name}: the result tree depends on the sizes that are not known in this tf.function. "
            "Give it whole shapes in its input_signature"
        )
    return [
        StaticAval(_agreed(a.shape, b.shape), a.dtype) for a, b in zip(one.avals, other.avals, strict=True)
    ]


def _agreed(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int | None, ...] | None:
    return tuple(n if n == m else None for n, m in zip(a, b, strict=True)) if len(a) == len(b) else None
