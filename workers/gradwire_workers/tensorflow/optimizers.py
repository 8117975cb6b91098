"""Keras optimizers over a module's accumulated gradients."""

from __future__ import annotations

from typing import Any, Callable

import tensorflow as tf

from gradwire_wire.errors import UsageError

__all__ = ["TensorFlowOptimizer"]


class TensorFlowOptimizer:
    """Made by ``target(**kwargs)``, as `keras.optimizers.Adam` is; its slots are made at the first step.

    A step of a Keras optimizer is traced once for each set of variables that have gradients.
    """

    def __init__(self, owner: Any, target: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        if not callable(target):
            raise UsageError(
                f"a {type(target).__qualname__} makes no optimizer; name a class, such as keras.optimizers:Adam"
            )
        self._owner, self._optimizer = owner, target(**kwargs)
        if not hasattr(self._optimizer, "apply_gradients"):
            raise UsageError(
                f"a {type(self._optimizer).__qualname__} is no Keras optimizer: it has no apply_gradients. "
                "Name one such as keras.optimizers:Adam"
            )
        self._built = False
        self._traced: dict[tuple[str, ...], Callable[..., Any]] = {}

    def step(self, clip_norm: float | None = None) -> float | None:
        if clip_norm is not None:
            raise UsageError(
                "step(clip_norm=...): a TensorFlow worker cannot do this; give the optimizer global_clipnorm"
            )
        variables = self._owner.trainable_variables()
        gradients = {n: g for n, g in self._owner.grads().items() if g is not None and n in variables}
        if not gradients:
            raise UsageError(
                "step(): no gradients were accumulated since they were last zeroed. Pull back through the module "
                "first; where nothing before it is differentiated, it needs the anchor (gw.jax.functional(net, "
                'owner="worker"))'
            )
        self._build(list(variables.values()))
        names = tuple(gradients)
        if names not in self._traced:
            self._traced[names] = self._apply([variables[n] for n in names])
        self._traced[names](list(gradients.values()))
        self._owner.generation += 1
        return None

    def _build(self, variables: list[Any]) -> None:
        """All variables at once: what has no gradient today may have one tomorrow."""
        if not self._built and hasattr(self._optimizer, "build"):
            self._optimizer.build(variables)
        self._built = True

    def _apply(self, variables: list[Any]) -> Callable[..., Any]:
        def apply(gradients: list[Any]) -> None:
            self._optimizer.apply_gradients(zip(gradients, variables))

        is_keras = any(
            c.__module__.startswith(("keras.", "tf_keras.")) for c in type(self._optimizer).__mro__
        )
        return tf.function(apply, autograph=False) if is_keras else apply

    def zero_grad(self) -> None:
        self._owner.zero_grad()
