"""A TensorFlow module as a function of its parameters. See `gradwire_workers.program.Program.functional`."""

from __future__ import annotations

from typing import Any, Mapping

import tensorflow as tf

from gradwire_wire.errors import UsageError
from gradwire_workers.keras_layers import called_in_layer, check_unconstrained
from gradwire_workers.tensorflow.modules import Module, resource_of, value_of
from gradwire_workers.tensorflow.substitution import substituted

__all__ = ["WithBuffers", "WithParameters"]


class WithParameters:
    """``(parameters, *args, **kwargs) -> result`` in one mode; how the module itself is called is ``call``'s business."""

    def __init__(self, module: Module, trainable: bool | None = None) -> None:
        self._module, self._trainable = module, trainable
        self._there = set(module.trainable())

    def __call__(self, call: Any, parameters: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        given = _given("parameter", self._module.trainable(), parameters)
        with substituted(given):
            result = self._called(call, args, kwargs)
            _check_unwritten(given)
            return result

    def _called(self, call: Any, args: Any, kwargs: Any) -> Any:
        """With losses and masks where a layer of the caller's asks: see `gradwire_workers.program.Program.functional`."""
        if self._trainable is None:
            result = call(*args, **kwargs)
            self._check_unmade()
            return result
        return called_in_layer(self._module.layers(), self._trainable, call, args, kwargs)

    def _check_unmade(self) -> None:
        """What the module has made when it was first called, and since this form of it, the caller does not own, and would not learn."""
        made = [name for name in self._module.trainable() if name not in self._there]
        if made:
            raise UsageError(
                f"this module made {', '.join(made[:5])} when it was called, and the caller's parameters are without. Make the functional "
                "form anew, or have the factory call the module once with an example"
            )


class WithBuffers(WithParameters):
    """``(parameters, buffers, *args, **kwargs) -> (result, buffers)``."""

    def __call__(
        self,
        call: Any,
        parameters: Mapping[str, Any],
        buffers: Mapping[str, Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        moving = _given("buffer", self._module.rest(), buffers)
        given = _given("parameter", self._module.trainable(), parameters)
        with substituted({**given, **moving}):
            result = self._called(call, args, kwargs)
            _check_unwritten(given)
            return result, {name: tf.identity(variable.value()) for name, (variable, _) in moving.items()}


def _given(kind: str, variables: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{name: (variable, value)}; UsageError for a name that is unknown, or a value of another shape or dtype."""
    if not isinstance(values, Mapping):
        raise UsageError(f"the {kind}s must be a dict by name, not a {type(values).__qualname__}")
    unknown = [name for name in values if name not in variables]
    if unknown:
        hint = f"It has {', '.join(variables)}" if variables else "It has none yet: call it once"
        raise UsageError(f"the module has no {kind} {', '.join(map(str, unknown))}. {hint}")
    return {
        name: (resource_of(variables[name]), _checked(name, variables[name], values[name])) for name in values
    }


def _check_unwritten(given: Mapping[str, tuple[Any, Any]]) -> None:
    """What the module assigns to a parameter would end with the call, and the caller's own stay as it was."""
    for name, (variable, value) in given.items():
        if variable.value() is not value:
            raise UsageError(
                f"this module assigns to its parameter {name} when it is called, and the caller, who owns it, would not see that. "
                "Make it a variable that is not trainable, or let the worker own the parameters (Remote.optimizer)"
            )


def _checked(name: str, variable: Any, value: Any) -> Any:
    check_unconstrained({name: variable})
    want = value_of(variable)
    have = tf.convert_to_tensor(value)
    if tuple(have.shape) != tuple(want.shape) or have.dtype != want.dtype:
        raise UsageError(
            f"{name} is {want.dtype.name} of shape {tuple(want.shape)} in the module, and {have.dtype.name} of shape "
            f"{tuple(have.shape)} in what was given"
        )
    return have
