"""Plain functions with their parameters: ``(apply, params)``, ``(apply, params, state)`` and ``(init, apply)``."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Sequence

import jax

from gradwire_wire.errors import UsageError
from gradwire_workers.jax.calls import Call, CallSignature
from gradwire_workers.jax.models import Model
from gradwire_workers.jax.trees import Tree, dotted, is_array, is_trainable

__all__ = ["KEYS", "Applied"]

KEYS = ("key", "rng", "rng_key", "prng_key", "rngs")
_MISSING = object()


class Applied(Model):
    """See `gradwire_workers.jax.models.Model`.

    ``apply(params, *args)``, or ``apply(params, state, *args) -> (result, state)``. A parameter of apply that is called
    as in `KEYS` or tells the mode is filled in. Where nothing tells it, the mode says whether the state moves. What takes a key
    is in training mode: no two of its calls are the same one.
    """

    is_pure = False

    def __init__(self, apply: Callable[..., Any], params: Any, state: Any = _MISSING) -> None:
        self.name = getattr(apply, "__qualname__", type(apply).__qualname__)
        if state is _MISSING and callable(params) and not _has_arrays(params):
            apply, params = params, _initialised(apply)
        self._apply, self._params = apply, Tree(params, numbers=True)
        arrays = self._params.arrays
        self.parameters = {n: x for n, x in arrays.items() if is_trainable(x)}
        self.buffers = {n: x for n, x in arrays.items() if n not in self.parameters}
        self._state = None if state is _MISSING else Tree(state, _state_name)
        self.buffers.update({} if self._state is None else self._state.arrays)
        self._signature = CallSignature(apply, 1 if self._state is None else 2)
        is_random = self._signature.first_of(KEYS) is not None
        self.training = True if self._signature.modes or is_random or self._state is not None else None

    def tree_of(self, parameters: dict[str, Any]) -> Any:
        return self._params.only(parameters)

    def apply(self, call: Call) -> tuple[Any, dict[str, Any]]:
        given = self._signature.with_mode(call.arguments, call.training)
        name = self._signature.first_of(KEYS)
        if name is not None:
            given = self._signature.having(given, name, call.key)
        params = self._params.filled(call.arrays)
        if self._state is None:
            return self._apply(params, *given.args, **given.kwargs), {}
        out = self._apply(params, self._state.filled(call.arrays), *given.args, **given.kwargs)
        if not isinstance(out, tuple) or len(out) != 2:
            raise UsageError(
                f"{self.name} was given with its state, so it must return (result, state), not a {type(out).__qualname__}"
            )
        return out[0], Tree(out[1], _state_name).arrays


def _has_arrays(x: Any) -> bool:
    return any(map(is_array, jax.tree_util.tree_leaves(x)))


def _initialised(init: Callable[..., Any]) -> Any:
    """The parameters of an ``(init, apply)`` pair: at load nothing is known but a key."""
    try:
        inspect.signature(init).bind(None)
    except TypeError:
        raise UsageError(
            "an (init, apply) pair is taken where init needs nothing but a key, and this one needs more, such as a shape or "
            "an example. Call it in the factory and return (apply, params): params = init(jax.random.key(0), example)"
        ) from None
    return init(jax.random.key(0))


def _state_name(path: Sequence[Any]) -> str:
    return f"state.{dotted(path)}"
