"""What a target is: how it is told its mode, and which variables it has under which names."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from functools import wraps
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from gradwire_wire.errors import UsageError
from gradwire_workers.keras_layers import (
    awaits_weights,
    is_keras_layer,
    listed,
    rnn_states,
    stable_paths,
    weights_of,
)
from gradwire_workers.names import unique_names

__all__ = ["Module", "built_outside", "problems_of_state", "resource_of", "value_of"]

_MODE_NAMES = ("training", "is_training")


class Module:
    """A target: a Keras layer or model, a tf.Module, or any other callable.

    mode_name: the keyword that tells it whether it is training; None if it has no modes.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.is_keras = is_keras_layer(target)
        self.has_state = (
            self.is_keras or isinstance(target, tf.Module) or hasattr(target, "trainable_variables")
        )
        self.mode_name = self._find_mode_name() if self.has_state else None

    def _find_mode_name(self) -> str | None:
        if self.is_keras and hasattr(self.target, "_call_has_training_arg"):
            return "training"  # Keras 3 takes it for every layer, and tells it to those inside
        if self.is_keras:
            found = _keywords_of(self.target.call)
        else:
            found = _keywords_of(self.target)
        return next((name for name in _MODE_NAMES if name in found), None)

    def keywords(self, given: dict[str, Any], mode: bool | None) -> dict[str, Any]:
        """The keywords of a call in this mode."""
        if self.mode_name is None or mode is None:
            return given
        if given.get(self.mode_name, mode) != mode:
            raise UsageError(
                f"{self.mode_name}={given[self.mode_name]} in the call, and the module is in "
                f"{'training' if mode else 'evaluation'} mode: use remote.train() and remote.eval()"
            )
        return {**given, self.mode_name: mode}

    # ---- Variables ---------------------------------------------------------------------------------------------------

    def trainable(self) -> dict[str, Any]:
        """Trainable variables by name."""
        named, trainable = self._named()
        return {name: v for name, v in named.items() if id(v) in trainable}

    def rest(self) -> dict[str, Any]:
        """All other variables by name: running statistics, frozen weights."""
        named, trainable = self._named()
        return {name: v for name, v in named.items() if id(v) not in trainable}

    def named(self) -> dict[str, Any]:
        """All variables by name, without the states of Keras's random generators and metrics.

        A Keras path that is the same in every process (`stable_paths`), a tf.Module's attribute path, or the variable's
        name; numbered where that is not unique.
        """
        return self._named()[0]

    def _named(self) -> tuple[dict[str, Any], set[int]]:
        self.check_state()
        if isinstance(self.target, tf.Module) and not self.is_keras:
            return _named_in(self.target)
        found = listed(self.target, "weights" if self.is_keras else "variables") + self.moving_in_evaluation
        trainable = {id(v) for v in listed(self.target, "trainable_variables")}
        paths = (
            stable_paths(self.target, found) if self.is_keras else [v.name.partition(":")[0] for v in found]
        )
        return unique_names(zip(paths, found)), trainable

    @property
    def moving_in_evaluation(self) -> list[Any]:
        """States of Keras's stateful RNNs: they move in evaluation mode as well."""
        return [v for layer in self.layers() for v in rnn_states(layer)] if self.is_keras else []

    @property
    def is_unbuilt(self) -> bool:
        """Whether it is a Keras layer or model that makes its variables at its first call."""
        return self.is_keras and not getattr(self.target, "built", True)

    def random_states(self) -> list[Any]:
        """The variables of Keras's random generators in it."""
        if not self.is_keras:
            return []
        weights = {id(v) for v in listed(self.target, "weights")}
        others = [v for v in listed(self.target, "variables") if id(v) not in weights]
        return [v for v in others if "seed_generator" in getattr(v, "path", "")]

    def layers(self) -> list[Any]:
        """The outermost Keras layers of it: itself, or those in a tf.Module."""
        if self.is_keras:
            return [self.target]
        if not isinstance(self.target, tf.Module):
            return []
        return list(self.target._flatten(recursive=True, predicate=is_keras_layer))

    def check_state(self) -> None:
        """Raises UsageError where there is no state to speak of."""
        if not self.has_state:
            raise UsageError(
                f"a {type(self.target).__qualname__} has no variables, modes or optimizers that can be seen: only a Keras "
                "layer or model, a tf.Module or an object with trainable_variables has. Return one from the factory"
            )

    def check_weights(self) -> None:
        """Raises UsageError where there will be weights that are not there yet: a state without them would be taken for all of it."""
        self.check_state()
        if any(map(awaits_weights, self.layers())) and (self.is_keras or not self.named()):
            raise UsageError(
                f"a {type(self.target).__qualname__} makes weights when it is first called, and was not: call it once with an example, or "
                "have its factory make them (begin with keras.Input, or call build(shape))"
            )

    def check_mode(self, mode: bool) -> None:
        """Raises UsageError where the target could not be told."""
        self.check_state()
        if mode and self.mode_name is None:
            raise UsageError(
                f"{type(self.target).__qualname__} has no training mode: its call takes none of {', '.join(_MODE_NAMES)}"
            )


@contextmanager
def built_outside(layers: Sequence[Any]) -> Iterator[None]:
    """What the ``build()`` of these Keras layers, and of those in them, does in a trace is done outside of it, at once.

    Keras 2 does so itself. With Keras 3 the variables alone are made outside, and what is assigned to them is not.
    """
    building: list[tuple[dict[str, Any], Any]] = []
    try:
        if not tf.executing_eagerly():
            for part in {id(part): part for layer in layers for part in layer._flatten_layers()}.values():
                own = part.__dict__
                if not part.built and "build" in own and not getattr(own["build"], "_is_default", False):
                    building.append((own, own["build"]))
                    own["build"] = _lifted(own["build"])
        yield
    finally:
        for own, build in building:
            own["build"] = build


def _lifted(build: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(build)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        with tf.init_scope():
            return build(*args, **kwargs)

    return lifted


def _keywords_of(function: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def _named_in(module: tf.Module) -> tuple[dict[str, Any], set[int]]:
    """Variables by attribute path (those of a Keras layer by its path and their own), and which are trainable."""
    found: dict[int, tuple[str, Any]] = {}
    trainable: set[int] = set()

    def wanted(x: Any) -> bool:
        return isinstance(x, tf.Variable) or is_keras_layer(x)

    for path, x in module._flatten(recursive=True, predicate=wanted, with_path=True):
        name = ".".join(str(part) for part in path)
        if isinstance(x, tf.Variable):
            found.setdefault(id(x), (name, x))
            trainable.update({id(x)} if x.trainable else ())
        else:
            every = weights_of(x)
            for own, v in zip(stable_paths(x, every), every):
                found.setdefault(id(v), (f"{name}/{own}", v))
            trainable.update(id(v) for v in listed(x, "trainable_variables"))
    return unique_names(found.values()), trainable


def value_of(variable: Any) -> Any:
    """The tf.Variable that a Keras variable has inside, or itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def resource_of(variable: Any) -> Any:
    """The same, without what Keras 2 wraps around it to cast it: what holds the memory."""
    value = value_of(variable)
    return value._variable if type(value).__name__.startswith("AutoCast") else value


def problems_of_state(variables: Mapping[str, Any], state: Mapping[str, Any], strict: bool) -> list[str]:
    """Why these values cannot be assigned to these variables."""
    missing = [name for name in variables if name not in state]
    unexpected = [name for name in state if name not in variables]
    found = []
    if strict and missing:
        found.append(f"missing: {', '.join(missing)}")
    if strict and unexpected:
        hint = "" if variables else " (the module has no variables yet: call it once)"
        found.append(f"unexpected: {', '.join(unexpected)}{hint}")
    for name in variables:
        if name not in state:
            continue
        want, have = value_of(variables[name]), tf.convert_to_tensor(state[name])
        if tuple(have.shape) != tuple(want.shape):
            found.append(f"{name} has shape {tuple(want.shape)}, not {tuple(have.shape)}")
        elif have.dtype != want.dtype:
            found.append(f"{name} has dtype {want.dtype.name}, not {have.dtype.name}: convert it first")
    return found
