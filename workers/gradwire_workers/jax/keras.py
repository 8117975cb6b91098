"""A Keras layer or model with Keras's JAX backend: its variables are taken out, and given back for each call."""

from __future__ import annotations

from typing import Any, Callable, Collection

import jax
import keras

from gradwire_wire.errors import UsageError
from gradwire_workers.jax.calls import Call
from gradwire_workers.jax.models import Model
from gradwire_workers.keras_layers import (
    called_in_layer,
    derived_anew,
    regularized,
    rnn_states,
    stable_paths,
    weights_of,
)
from gradwire_workers.names import unique_names

__all__ = ["KerasModel"]


class KerasModel(Model):
    """See `gradwire_workers.jax.models.Model`. Random generators begin anew at each call, from the call's key.

    Raises UsageError for a layer that has not been built, or where Keras's backend is another.
    """

    is_pure = keeps_dtypes = True

    def __init__(self, layer: Any) -> None:
        self.name = f"{type(layer).__qualname__} {layer.name}"
        if keras.backend.backend() != "jax":
            raise UsageError(
                f"{self.name} is of Keras with the {keras.backend.backend()} backend, and this is a JAX worker. Start it "
                'with bridge.worker("jax", env={"KERAS_BACKEND": "jax"}, ...)'
            )
        if not layer.built:
            raise UsageError(
                f"{self.name} has no weights yet. Build it in its factory: begin with keras.Input, or call layer.build(shape)"
            )
        self._layer = layer
        self.training: bool | None = False
        every, moving = weights_of(layer), {id(v) for v in rnn_states(layer)}
        trainable, weights = ({id(v) for v in vs} for vs in (layer.trainable_variables, every))
        self._variables = unique_names(zip(stable_paths(layer, every), every))
        values = {name: v.value for name, v in self._variables.items()}
        self.parameters = {n: x for n, x in values.items() if id(self._variables[n]) in trainable}
        self.buffers = {n: x for n, x in values.items() if n not in self.parameters}
        self.moving_in_evaluation = frozenset(n for n, v in self._variables.items() if id(v) in moving)
        others = [v for v in layer.variables if id(v) not in weights]
        self._seeds = [v for v in others if v.path.endswith("seed_generator_state")]

    def apply(self, call: Call) -> tuple[Any, dict[str, Any]]:
        return self._applied(self._layer, call)

    def apply_in_layer(self, call: Call, trainable: bool) -> tuple[Any, dict[str, Any]]:
        """`apply` with ``(result, losses, masks)`` as the result."""

        def called(*args: Any, **kwargs: Any) -> Any:
            return called_in_layer([self._layer], trainable, self._layer, args, kwargs)

        return self._applied(called, call)

    def variables(self, names: Collection[str]) -> dict[str, Any]:
        """See `gradwire_workers.jax.models.Model.variables`."""
        return {name: self._variables[name] for name in names}

    def regularizers(self) -> list[str]:
        """See `gradwire_workers.program.Program.regularizers`."""
        return regularized(self._layer)

    def _applied(self, function: Callable[..., Any], call: Call) -> tuple[Any, dict[str, Any]]:
        training, arrays, key, (args, kwargs) = call
        if kwargs.get("training", training) != training:
            raise UsageError(
                f"training={kwargs['training']} in the call, and the module is in the other mode: use remote.train() and "
                "remote.eval()"
            )
        mapping = [(v, arrays[name]) for name, v in self._variables.items()]
        mapping += [(v, _seed(v, jax.random.fold_in(key, i))) for i, v in enumerate(self._seeds)]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            with derived_anew([self._layer]):
                result = function(*args, **{**kwargs, "training": training})
        moved = {name: scope.get_current_value(self._variables[name]) for name in self.buffers}
        return result, {name: arrays[name] if x is None else x for name, x in moved.items()}


def _seed(variable: Any, key: Any) -> Any:
    return jax.random.bits(key, variable.shape, "uint32").astype(variable.value.dtype)
