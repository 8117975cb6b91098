"""Flax nnx: a module whose variables are taken out of it, and put into a copy of it for each call."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Iterable, Sequence

import jax
import jax.numpy as jnp

from gradwire_wire.errors import UsageError
from gradwire_workers.jax.calls import Call, CallSignature
from gradwire_workers.jax.models import Model
from gradwire_workers.jax.trees import Tree, dotted, is_trainable

__all__ = ["NnxModel"]


class NnxModel(Model):
    """See `gradwire_workers.jax.models.Model`. Parameters are its ``nnx.Param``; its random streams start anew at each
    call, from the call's key, so their state is none of the module's."""

    is_pure = True

    def __init__(self, module: Any) -> None:
        self._nnx = sys.modules["flax.nnx"]
        self.name = type(module).__qualname__
        graph, *parts = self._split(module)
        self._params, self._random_streams, self._rest = parts
        self._graphs: dict[bool | None, Any] = {None: graph, **self._modes(module)}
        params = Tree(self._params, _name).arrays
        self.parameters = {n: x for n, x in params.items() if is_trainable(x)}
        rest = {n: x for n, x in params.items() if n not in self.parameters}
        self.buffers = {**rest, **Tree(self._rest, _name).arrays}
        self.moving_in_evaluation = self._of_kind(module, self._nnx.Cache)  # what decoding writes to
        # Intermediates are there to be looked at, and no call reads them. What was warned of once is added.
        self._no_warning_for = set(self.moving_in_evaluation | self._of_kind(module, self._nnx.Intermediate))
        self._signature = CallSignature(module.__call__)
        differ = self._graphs[True] != self._graphs[False]
        takes_rngs = self._signature.first_of(["rngs"]) is not None
        is_random = takes_rngs or bool(jax.tree_util.tree_leaves(self._random_streams))
        self.training: bool | None = None
        # Without a mode equal calls may be merged, and no two random ones are the same.
        if differ or self._signature.modes or self.buffers or is_random:
            self.training = not differ or graph != self._graphs[False]

    def _of_kind(self, module: Any, kind: Any) -> frozenset[str]:
        """The buffers that are variables of this kind."""
        found = self._nnx.split(module, kind, ...)[1]
        return frozenset(n for n in Tree(found, _name).arrays if n in self.buffers)

    def _modes(self, module: Any) -> dict[bool | None, Any]:
        """How it is built in either mode; the module itself stays as it was made."""
        copy = self._nnx.clone(module)
        graphs: dict[bool | None, Any] = {}
        for mode in (True, False):
            copy.train() if mode else copy.eval()
            graphs[mode] = self._split(copy)[0]
        return graphs

    def _split(self, module: Any) -> Any:
        return self._nnx.split(module, self._nnx.Param, self._nnx.RngState, ...)

    def tree_of(self, parameters: dict[str, Any]) -> Any:
        return Tree(self._params, _name).only(parameters)

    def apply(self, call: Call) -> tuple[Any, dict[str, Any]]:
        params, rest = (Tree(x, _name).filled(call.arrays) for x in (self._params, self._rest))
        streams = _restarted(self._random_streams, call.key)
        module = self._nnx.merge(self._graphs[call.training], params, streams, rest)
        given = self._signature.with_mode(call.arguments, call.training)
        if self._signature.first_of(["rngs"]):
            given = self._signature.having(given, "rngs", self._nnx.Rngs(jax.random.fold_in(call.key, 0)))
        result = module(*given.args, **given.kwargs)
        _, after, _, moved = self._split(module)
        before = call.arrays
        self._check_unmoved(Tree(after, _name).arrays, before)
        found = Tree(moved, _name).arrays
        if call.training is False:
            self._warn_of_lost(n for n, x in found.items() if n in before and x is not before[n])
        return result, found

    def _warn_of_lost(self, written: Iterable[str]) -> None:
        """A call in evaluation mode writes to these: Flax would keep it, and here it moves in training mode only."""
        lost = [n for n in written if n not in self._no_warning_for]
        if lost:
            self._no_warning_for.update(lost)
            warnings.warn(
                f"{self.name} writes to {', '.join(lost)} in evaluation mode, and what it writes is lost there: state moves in "
                "training mode only, except for caches. Make it a variable of a class that derives from nnx.Cache, or write to it "
                "in training mode alone",
                stacklevel=1,
            )

    def _check_unmoved(self, after: dict[str, Any], before: dict[str, Any]) -> None:
        moved = [n for n in self.parameters if after.get(n) is not before[n]]
        if moved:
            raise UsageError(
                f"{self.name} writes to its parameter {moved[0]} when it is called, and an optimizer would too. Make it a "
                "variable of another kind, such as nnx.BatchStat"
            )


def _restarted(streams: Any, key: Any) -> Any:
    """All random streams with keys of their own from ``key``, and their counts at 0."""
    leaves, structure = jax.tree_util.tree_flatten(streams)
    fresh = [_fresh(x, jax.random.fold_in(key, i + 1)) for i, x in enumerate(leaves)]
    return jax.tree_util.tree_unflatten(structure, fresh)


def _fresh(x: Any, key: Any) -> Any:
    if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        is_raw_key = x.dtype == jnp.uint32 and x.shape[-1:] == (2,)
        return jax.random.bits(key, x.shape, jnp.uint32) if is_raw_key else jnp.zeros_like(x)
    keys = jax.random.split(key, x.shape)
    if keys.dtype == x.dtype:
        return keys
    data = jax.random.bits(key, jax.random.key_data(x).shape, jnp.uint32)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def _name(path: Sequence[Any]) -> str:
    """Without the variable's own attribute, which its path ends in."""
    inside = path[:-1] if getattr(path[-1], "name", None) == "value" else path
    return dotted(inside)
