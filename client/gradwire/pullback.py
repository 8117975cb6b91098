"""Explicit derivatives, for any caller: what `Remote.vjp` and `Remote.jvp` return and do."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire.answers import check_count, check_like
from gradwire.derived import moved
from gradwire.exits import end_daemon
from gradwire.families import family_of, tensors_named, untraced
from gradwire.handle import Handle
from gradwire.site import Outcome, Site
from gradwire_wire import messages
from gradwire_wire.carriers import Carrier
from gradwire_wire.errors import ClosedError, DtypeError, ResidualLostError, UsageError
from gradwire_wire.structures import fill, fill_leaves_only, leaf_paths, leaves_like
from gradwire_wire.words import pullback_op

__all__ = ["Pullback", "jvp", "vjp"]


def vjp(handle: Handle, site: Site, family: str, carriers: list[Carrier]) -> tuple[Any, Pullback]:
    """The results, and the pullback at them. One message; the graph stays in the worker under a token."""
    recompute = site.residuals == "recompute"
    if recompute and site.stateful:
        raise UsageError(
            f"{handle.name} {handle.why_it_moves}: to recompute its forward at the pullback would move its state twice "
            f"and draw other random numbers. Use residuals='keep'{', or eval() it' if handle.training else ''}"
        )
    outcome = _ask(handle, site, (), carriers, keep=messages.KEEP_NOTHING if recompute else messages.KEEP)
    pullback = Pullback(
        handle, site, family, carriers, outcome
    )  # first: it gives the token back if the next fails
    return fill(outcome.structure, outcome.adopted(tensors_named(family).adopt)), pullback


class Pullback:
    """``pullback(out_bar)`` gives the cotangents of the arguments; usable until released or collected.

    The cotangent of an argument is the adjoint in Re<a, b>: None if the argument is not a floating-point or complex tensor,
    and zeros if it is one and was not used.
    """

    def __init__(
        self, handle: Handle, site: Site, family: str, carriers: list[Carrier], outcome: Outcome
    ) -> None:
        self._handle, self._site, self._family = handle, site, family
        self._token, self._structure = outcome.token, outcome.structure
        self._results = [(c.array.shape, c.dtype) for c in outcome.carriers if c is not None]
        self._inputs = [(c.array.shape, c.dtype) for c in carriers]
        self._wrt = tuple(i for i, c in enumerate(carriers) if c.dtype.is_inexact)
        recompute = site.residuals == "recompute"
        self._primals = (
            [Carrier(c.array.copy(order="K"), c.dtype) for c in carriers]
            if recompute
            else [None] * len(carriers)
        )
        self._released, self._changes = False, handle.changes
        self._finalizer = weakref.finalize(self, handle.release, outcome.token)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        names = leaf_paths(self._site.structure)
        released = ", released" if self._released else ""
        return f"<gradwire.Pullback of {self._handle.name} for {', '.join(names[i] for i in self._wrt)}{released}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"{self!r} stands for a graph that a worker keeps and cannot be copied or pickled. Call it here, any number of times"
        )

    @untraced
    def __call__(self, out_bar: Any, *, kwargs: bool = False) -> Any:
        """The cotangents as a tuple like the positional arguments.

        out_bar: a tree like the results. In it None says that nothing depends on that result; what it has for results that are not floating-point or
        complex is ignored.
        kwargs: return ``(args_bar, kwargs_bar)`` instead, with the cotangents of the keyword arguments in a dict.
        Raises ResidualLostError if the pullback was released, or the worker has lost what it kept for it.
        """
        if self._released:
            raise ResidualLostError("this pullback was released; run vjp again")
        if not self._token and self._changes != self._handle.changes:
            raise moved(self._handle.name)
        cotangents = self._cotangents(out_bar)
        word = (pullback_op(self._wrt, [c is not None for c in cotangents]),)
        try:
            outcome = _ask(
                self._handle,
                self._site,
                word,
                [*self._primals, *[c for c in cotangents if c is not None]],
                token=self._token,
            )
        except ResidualLostError as error:
            raise ResidualLostError(
                f"{error}. options(residuals='recompute') keeps nothing and computes it again"
            ) from error
        args_bar, kwargs_bar = fill_leaves_only(self._site.structure, self._gradients(outcome))
        return (tuple(args_bar), kwargs_bar) if kwargs else tuple(args_bar)

    def _cotangents(self, out_bar: Any) -> list[Carrier | None]:
        """Of the inexact results; None where none is given."""
        paths = leaf_paths(self._structure, argument_names=False)
        given = leaves_like(self._structure, out_bar, "the cotangent")
        return [
            None if x is None else _like(x, shape, dtype, f"the cotangent of {path}")
            for x, (shape, dtype), path in zip(given, self._results, paths, strict=True)
            if dtype.is_inexact
        ]

    def _gradients(self, outcome: Outcome) -> list[Any]:
        adopt = tensors_named(self._family).adopt
        gradients: list[Any] = [None] * len(self._inputs)
        for i, carrier in zip(self._wrt, outcome.carriers, strict=True):
            shape, dtype = self._inputs[i]
            check_like(carrier, shape, dtype, "the cotangent of an argument")
            gradients[i] = adopt(carrier or _zeros(shape, dtype))
        return gradients

    def release(self) -> None:
        """Let the worker drop the graph now instead of when this object is collected."""
        self._released = True
        self._finalizer()


def jvp(handle: Handle, site: Site, family: str, carriers: list[Carrier], tangents: Any) -> tuple[Any, Any]:
    """Results and their tangents. tangents: ``[args, kwargs]`` like the primals, None standing for zeros."""
    paths = leaf_paths(site.structure)
    given = leaves_like(site.structure, tangents, "the tangents")
    wrt = tuple(i for i, c in enumerate(carriers) if c.dtype.is_inexact and given[i] is not None)
    dots = [
        _like(given[i], carriers[i].array.shape, carriers[i].dtype, f"the tangent of {paths[i]}") for i in wrt
    ]
    outcome = _ask(handle, site, (), carriers, keep=messages.KEEP)
    try:
        moved = _ask(handle, site, (("J", wrt),), [*carriers, *dots], token=outcome.token)
    finally:
        handle.release(outcome.token)
    adopt = tensors_named(family).adopt
    leaves = [c for c in outcome.carriers if c is not None]
    inexact = [c for c in leaves if c.dtype.is_inexact]
    check_count(len(moved.carriers), len(inexact), "tangents")
    for dot, c in zip(moved.carriers, inexact, strict=True):
        check_like(dot, c.array.shape, c.dtype, "the tangent of a result")
    it = iter(moved.carriers)
    out_dot = [_dot(next(it), c) if c.dtype.is_inexact else None for c in leaves]
    out = fill(outcome.structure, outcome.adopted(adopt))
    return out, fill_leaves_only(outcome.structure, [None if c is None else adopt(c) for c in out_dot])


def _ask(handle: Handle, *call: Any, **options: Any) -> Outcome:
    """`Handle.invoke`, for the thread that wants the result."""
    try:
        return handle.invoke(*call, **options)
    except ClosedError:
        end_daemon()
        raise


def _dot(carrier: Carrier | None, like: Carrier) -> Carrier:
    return carrier or Carrier(np.zeros(like.array.shape, like.array.dtype), like.dtype)


def _zeros(shape: Sequence[int], dtype: Any) -> Carrier:
    return Carrier(np.zeros(shape, dtype.carrier), dtype)


def _like(x: Any, shape: Sequence[int], dtype: Any, what: str) -> Carrier:
    """A given (co)tangent as a carrier of exactly that shape and dtype."""
    family = family_of(x)
    if family:
        carrier: Carrier = tensors_named(family).export(x)
    elif isinstance(x, (int, float, complex, np.generic)) and not shape and dtype.carrier == dtype.name:
        if np.iscomplexobj(x) and not dtype.name.startswith("complex"):
            raise DtypeError(f"{what} must be {dtype.name} as the value is, not complex; take x.real")
        if isinstance(x, np.floating) and x.dtype.name != dtype.name:
            raise DtypeError(f"{what} must be {dtype.name} as the value is, not {x.dtype.name}; convert it")
        carrier = Carrier(np.asarray(x, dtype.carrier), dtype)
    else:
        raise UsageError(f"{what} must be a tensor of shape {tuple(shape)}, not {type(x).__name__}")
    if carrier.dtype != dtype:
        raise DtypeError(f"{what} must be {dtype.name} as the value is, not {carrier.dtype.name}; convert it")
    if carrier.array.shape != tuple(shape):
        raise UsageError(f"{what} must have shape {tuple(shape)}, not {carrier.array.shape}")
    return carrier
