"""Results of a call whose operands have sizes that JAX knows by a symbol only (`jax.export.symbolic_shape`).

Nothing can be called then, but shapes can be told: Keras with the JAX backend asks so for every layer of a model whose
batch has no size yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradwire.site import Site, SpecResult
from gradwire_wire.carriers import Aval
from gradwire_wire.errors import GradwireError, UnsupportedTensorError, UsageError

if TYPE_CHECKING:
    from gradwire.handle import Handle

__all__ = ["check_sizes", "spec_of"]

# Sizes that the first symbol stands for, in three trials. The third may fail, for the target may not take every size. Small
# sizes are tried first, then such as are left of a picture after the strides of a convolutional network. Never 1, which broadcasts.
PROBES = ((2, 3, 67), (64, 96, 67))


def spec_of(handle: Handle, site: Site, avals: tuple[Aval, ...]) -> SpecResult:
    """`Handle.spec` for sizes and symbols. UsageError where a size of a result is neither a constant nor one of those symbols."""
    symbols = list({n: None for a in avals for n in a.shape if not isinstance(n, int)})
    return _symbolic(handle, site, avals, symbols) if symbols else handle.spec(site, avals)


def check_sizes(avals: Sequence[Any], name: str) -> None:
    """Raises UnsupportedTensorError where a program is compiled or exported for no sizes: JAX could not allocate the results."""
    for a in avals:
        if not all(isinstance(n, int) for n in a.shape):
            raise UnsupportedTensorError(
                f"{name}: a shape with symbols, {a.shape}, which a remote call cannot have when it is made. Export or lower the "
                "program for each shape in use"
            )


def _symbolic(handle: Handle, site: Site, avals: tuple[Aval, ...], symbols: Sequence[Any]) -> SpecResult:
    failure: GradwireError | None = None
    for sizes in PROBES:
        trials = [_trial(symbols, k, size) for k, size in enumerate(sizes)]
        try:
            found = [_probe(handle, site, avals, trial) for trial in trials[:2]]
        except GradwireError as error:
            failure = failure or error
        else:
            with contextlib.suppress(GradwireError):
                found.append(_probe(handle, site, avals, trials[2]))
            return _common(handle, avals, trials, found)
    raise UsageError(
        f"{handle.name}: the shapes of its results for arguments of shapes {[a.shape for a in avals]} cannot be found out: "
        f"whatever these symbols stand for, the call fails, first with: {failure}. {_REMEDY}"
    ) from failure


_REMEDY = "Give whole shapes (in Keras a batch_shape), options(out_spec=...), or the Keras layer a compute_output_shape"


def _trial(symbols: Sequence[Any], k: int, size: int) -> Mapping[Any, int]:
    """Sizes in the k-th trial: such that no two of them, and no sum or multiple of one, agree in every trial."""
    return {symbol: size * (1 + i * (2 * k + 1)) for i, symbol in enumerate(symbols)}


def _probe(handle: Handle, site: Site, avals: Sequence[Aval], trial: Mapping[Any, int]) -> SpecResult:
    return handle.spec(site, tuple(Aval(tuple(trial.get(n, n) for n in a.shape), a.dtype) for a in avals))


def _common(
    handle: Handle, avals: Sequence[Aval], trials: Sequence[Mapping[Any, int]], found: Sequence[SpecResult]
) -> SpecResult:
    """The results with a symbol where they have its size in every trial."""
    first = found[0]
    kinds = [(r.structure, [(len(a.shape), a.dtype) for a in r.avals]) for r in found]
    by_sizes = {tuple(t[symbol] for t in trials[: len(found)]): symbol for symbol in trials[0]}
    shapes: list[tuple[Any, ...]] = []
    for same in zip(*(r.avals for r in found), strict=False):
        columns = zip(*(a.shape for a in same), strict=False)
        shapes.append(tuple(sizes[0] if len({*sizes}) == 1 else by_sizes.get(sizes) for sizes in columns))
    if any(kind != kinds[0] for kind in kinds) or any(None in shape for shape in shapes):
        raise UsageError(
            f"{handle.name}: what it returns for arguments of shapes {[a.shape for a in avals]} has sizes that are neither "
            f"constant nor one of these symbols. {_REMEDY}"
        )
    return first._replace(avals=tuple(Aval(s, a.dtype) for s, a in zip(shapes, first.avals, strict=True)))
