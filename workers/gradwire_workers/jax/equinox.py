"""Equinox: a module is a pytree itself. With `eqx.nn.State`, it takes the state and returns it after its result."""

from __future__ import annotations

import sys
from typing import Any

import jax

from gradwire_wire.errors import UsageError
from gradwire_workers.jax.calls import Arguments, Call, CallSignature
from gradwire_workers.jax.models import Model, is_of
from gradwire_workers.jax.pairs import KEYS
from gradwire_workers.jax.trees import Tree, dotted, is_trainable

__all__ = ["EquinoxModel"]


class EquinoxModel(Model):
    """See `gradwire_workers.jax.models.Model`. The mode sets all ``inference`` flags, as `eqx.nn.inference_mode` does."""

    is_pure = True

    def __init__(self, module: Any, state: Any) -> None:
        self.name = type(module).__qualname__
        if not callable(module):
            raise UsageError(f"the Equinox module {self.name} has no __call__; give it one")
        self._module, self._state = Tree(module), None
        arrays = self._module.arrays
        self.parameters = {n: x for n, x in arrays.items() if is_trainable(x)}
        self.buffers = {n: x for n, x in arrays.items() if n not in self.parameters}
        if state is not None:
            self._state = Tree(state, _state_name)
            self.buffers.update(self._state.arrays)
        self._signature = CallSignature(module.__call__)
        self.training = self._mode_of(module, state)
        if self.training is None and _may_draw(module):  # no two calls are the same one
            self.training = True

    def _mode_of(self, module: Any, state: Any) -> bool | None:
        inference, training = (_flags(self._in_mode(module, mode)) for mode in (False, True))
        if inference == training and not self._signature.modes and state is None:
            return None
        return inference == training or _flags(module) != inference

    def _in_mode(self, module: Any, training: bool | None) -> Any:
        return module if training is None else sys.modules["equinox"].nn.inference_mode(module, not training)

    def tree_of(self, parameters: dict[str, Any]) -> Any:
        return self._module.only(parameters)

    def apply(self, call: Call) -> tuple[Any, dict[str, Any]]:
        given = self._signature.with_mode(call.arguments, call.training)
        name = self._signature.first_of(KEYS)
        if name is not None:
            given = self._signature.having(given, name, call.key)
        module = self._in_mode(self._module.filled(call.arrays), call.training)
        if self._state is None:
            return module(*given.args, **given.kwargs), {}
        return self._with_state(module, self._state.filled(call.arrays), given)

    def _with_state(self, module: Any, state: Any, given: Arguments) -> tuple[Any, dict[str, Any]]:
        name = self._signature.first_of(["state"])
        if name is None:
            given = Arguments([*given.args, state], given.kwargs)
        else:
            given = self._signature.having(given, name, state)
        out = module(*given.args, **given.kwargs)
        if not isinstance(out, tuple) or len(out) < 2 or not is_of(out[-1], "equinox", "State"):
            raise UsageError(
                f"{self.name} was given with its state, so it must return (result, state), not a {type(out).__qualname__}"
            )
        result = out[0] if len(out) == 2 else out[:-1]
        return result, Tree(out[-1], _state_name).arrays


def _may_draw(module: Any) -> bool:
    """Whether a class in it that is the user's takes a key. Those of Equinox do so for the sake of others, or have a flag."""

    def is_users(x: Any) -> bool:
        return is_of(x, "equinox", "Module") and not type(x).__module__.startswith("equinox.")

    if is_users(module) and callable(module) and CallSignature(module.__call__).first_of(KEYS) is not None:
        return True
    parts = jax.tree_util.tree_leaves(module, is_leaf=lambda x: x is not module and is_users(x))
    return any(_may_draw(part) for part in parts if is_users(part))


def _flags(module: Any) -> list[Any]:
    return [x for x in jax.tree_util.tree_leaves(module) if isinstance(x, bool)]


def _state_name(path: Any) -> str:
    return f"state.{dotted(path)}"
