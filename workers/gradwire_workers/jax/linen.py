"""Flax linen: a module and its variables. Parameters have their path as name, others their collection before it."""

from __future__ import annotations

from typing import Any, Sequence

import jax

from gradwire_wire.errors import UsageError
from gradwire_workers.jax.calls import Call, CallSignature
from gradwire_workers.jax.draws import may_draw
from gradwire_workers.jax.models import Model
from gradwire_workers.jax.trees import Tree, dotted, is_trainable

__all__ = ["LinenModel"]

SOWN = "intermediates"  # what a call leaves for whoever looks into it: no state
CACHE = "cache"  # Flax's own name for what decoding writes to, in evaluation mode of all


class LinenModel(Model):
    """See `gradwire_workers.jax.models.Model`. Without a mode keyword in its ``__call__``, the mode says whether
    collections other than ``params`` move. One that may draw random numbers is in training mode: no two of its calls are the same one."""

    is_pure = True

    def __init__(self, module: Any, variables: Any) -> None:
        self.name = type(module).__qualname__
        self._module = module if module.scope is None else module.unbind()[0]
        try:
            collections = {name: tree for name, tree in variables.items() if name != SOWN}
        except AttributeError:
            raise UsageError(
                f"the variables of {self.name} must be what module.init(key, example) returns, a dict with 'params' in it, "
                f"not a {type(variables).__qualname__}"
            ) from None
        self._tree = Tree(collections, _name)
        self._trained = Tree({"params": collections.get("params", {})}, _name)
        arrays, trained = self._tree.arrays, self._trained.arrays
        self.parameters = {n: x for n, x in arrays.items() if n in trained and is_trainable(x)}
        self.buffers = {n: x for n, x in arrays.items() if n not in self.parameters}
        self._mutable = [name for name in collections if name != "params"]
        cached = Tree({CACHE: collections.get(CACHE, {})}, _name).arrays
        self.moving_in_evaluation = frozenset(n for n in cached if n in self.buffers)
        self._signature = CallSignature(self._module.__call__)
        has_modes = self._signature.modes or self._mutable or may_draw(self._module)
        self.training = True if has_modes else None

    def tree_of(self, parameters: dict[str, Any]) -> Any:
        return self._trained.only(parameters)["params"]

    def apply(self, call: Call) -> tuple[Any, dict[str, Any]]:
        """Any random stream of the module has its numbers from the key: "dropout" the key itself."""
        given = self._signature.with_mode(call.arguments, call.training)
        rngs = {"dropout": call.key, "params": jax.random.fold_in(call.key, 1)}
        result, moved = self._module.apply(
            self._tree.filled(call.arrays),
            *given.args,
            rngs=rngs,
            mutable=self._mutable if call.training else [name for name in self._mutable if name == CACHE],
            **given.kwargs,
        )
        return result, Tree(dict(moved), _name).arrays


def _name(path: Sequence[Any]) -> str:
    return dotted(path[1:] if dotted(path[:1]) == "params" else path)
