"""Keras optimizers over a module's accumulated gradients, with groups, clipping and schedules. See `program.Optimizer`.

A Keras optimizer knows no groups, so each group is an optimizer of its own. A schedule is asked by us, before each step,
and not by the optimizer: it begins when it is given, and goes on where a state that is loaded says.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from gradwire_wire.errors import UsageError
from gradwire_workers.keras_layers import keras_path
from gradwire_workers.names import unique_names
from gradwire_workers.tensorflow.modules import problems_of_state, value_of

__all__ = ["TensorFlowOptimizer"]

_LEARNING_RATE = "learning_rate"
_UNNAMED = re.compile(r"^variable_\d+$")  # Nadam has one, and Keras numbers it by process


class Group:
    """One Keras optimizer, for the parameters of these names; None means all. Its slots are made when there are variables."""

    def __init__(self, name: str, optimizer: Any, members: Sequence[str] | None) -> None:
        self._name, self.optimizer, self._members = name, optimizer, members
        self._built = False
        self._paths: dict[str, str] = {}  # Keras's of the members -> names
        self._traced: dict[tuple[str, ...], Callable[..., Any]] = {}

    def has(self, name: str) -> bool:
        return self._members is None or name in self._members

    def build(self, variables: Mapping[str, Any]) -> None:
        """For all members at once: what has no gradient today may have one tomorrow."""
        members = [v for name, v in variables.items() if self.has(name)]
        if self._built or not members:
            return
        self._paths = {keras_path(v): name for name, v in variables.items() if self.has(name)}
        make = getattr(self.optimizer, "build", None) or getattr(self.optimizer, "_create_all_weights", None)
        if make is not None:
            make(members)
        self._built = True

    def apply(self, variables: Mapping[str, Any], gradients: Mapping[str, Any]) -> None:
        """One step. Traced once for each set of variables that have gradients."""
        names = tuple(gradients)
        if names not in self._traced:
            self._traced[names] = self._application([variables[n] for n in names])
        self._traced[names](list(gradients.values()))

    def _application(self, variables: list[Any]) -> Callable[..., Any]:
        def apply(gradients: list[Any]) -> None:
            scaled = [_of_scaled_loss(self.optimizer, g) for g in gradients]
            self.optimizer.apply_gradients(zip(scaled, variables))

        kinds = [c.__module__ for c in type(self.optimizer).__mro__]
        is_keras = any(kind.startswith(("keras.", "tf_keras.")) for kind in kinds)
        return tf.function(apply, autograph=False) if is_keras else apply

    # ---- Options -----------------------------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """Numbers that it was made with, or has been given since; the learning rate unless it follows a schedule."""
        return {name: x for _, own in self._owned_options() for name, x in own.items()}

    def _owned_options(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Of it and of each that it wraps, from the innermost outwards."""
        for optimizer in reversed(list(_nested(self.optimizer))):
            config = optimizer.get_config()
            yield optimizer, {name: _plain(x) for name, x in config.items() if _is_number(_plain(x))}

    def check_options(self, options: Mapping[str, Any]) -> None:
        known = self.options()
        unknown = [name for name in options if name not in known]
        if unknown:
            raise UsageError(
                f"{self._name} has no option {', '.join(unknown)} that can be set; there are {', '.join(known)}"
            )
        for name, value in options.items():
            if not _is_number(value) or (bool(value) != bool(known[name]) and name == "momentum"):
                raise UsageError(
                    f"{self._name}: set({name}={value!r:.40}) would change what it remembers. Make a new optimizer"
                )
        try:
            for optimizer, own in self._owned_options():
                type(optimizer).from_config({**optimizer.get_config(), **_among(options, own)})
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self._name}: set({_shown(options)}): {error}") from error

    def set(self, options: Mapping[str, Any]) -> None:
        known = self.options()
        new = {name: value for name, value in options.items() if value != known.get(name)}
        for optimizer, own in self._owned_options():
            for name, value in _among(new, own).items():
                setattr(optimizer, name, value)
        if set(new) - {_LEARNING_RATE}:
            self._traced.clear()  # the others are constants of what was traced

    def set_learning_rate(self, value: Any) -> None:
        self.optimizer.learning_rate = float(value)

    # ---- State -------------------------------------------------------------------------------------------------------

    def variables(self) -> dict[str, Any]:
        """Step count and slots by name, without the optimizer's own and with those of the parameters: Keras numbers its."""
        found = getattr(self.optimizer, "variables", ())
        listed = list(found() if callable(found) else found)
        names = [_without_owner(keras_path(v), self.optimizer) for v in listed]
        short = [_UNNAMED.sub("variable", n) for n in names]
        return unique_names((_slot_name(n, self._paths), v) for n, v in zip(short, listed))


def _of_scaled_loss(optimizer: Any, gradient: Any) -> Any:
    """As if the loss had been scaled as the optimizer wants it: one of Keras 3 divides by its scale what it is given."""
    scale = getattr(optimizer, "scale_loss", None)
    return gradient if scale is None else tf.cast(scale(gradient), gradient.dtype)


def _nested(optimizer: Any) -> Iterator[Any]:
    """It, the one that it wraps (`LossScaleOptimizer` does), and so on."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _without_owner(path: str, optimizer: Any) -> str:
    """A variable's path without the name of the optimizer that has it: the outermost, or one that is wrapped in it."""
    for one in _nested(optimizer):
        own = f"{getattr(one, 'name', '')}/"
        if path.startswith(own):
            return path[len(own) :]
    return path


def _among(options: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in own}


def _slot_name(name: str, paths: Mapping[str, str]) -> str:
    """With the name of its parameter in place of Keras's path of it (longest first: one may begin as another does)."""
    for path in sorted(paths, key=len, reverse=True):
        flat = path.replace("/", "_") + "_"  # Keras 3: path_of_it_momentum
        if name.startswith(flat):
            return paths[path].replace("/", "_") + "_" + name[len(flat) :]
        if name.endswith("/" + path):  # Keras 2.11 and later: m/path/of/it
            return name[: -len(path)] + paths[path]
        if name.startswith(path + "/"):  # Keras 2 before that: path/of/it/m
            return paths[path] + name[len(path) :]
    return name


class TensorFlowOptimizer:
    """Made by ``target(**kwargs)``, as `keras.optimizers.Adam` is.

    owner: the program. groups: see `gradwire_workers.program.Program.optimizer`.
    """

    search = None

    def __init__(
        self,
        owner: Any,
        target: Callable[..., Any],
        kwargs: dict[str, Any],
        groups: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self._owner, self._name = owner, getattr(target, "__qualname__", repr(target))
        self._target, self._schedule, self._scheduled = target, None, 0
        if groups is None:
            self._groups = [self._group(kwargs, None)]
        else:
            self._groups = [self._group({**kwargs, **_options(g)}, g["names"]) for g in groups]
        self._has_own_rates = any(_LEARNING_RATE in g for g in groups or ())
        self._build()

    def _group(self, kwargs: dict[str, Any], members: Sequence[str] | None) -> Group:
        try:
            optimizer = self._target(**kwargs)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self._name}({_shown(kwargs)}): {error}") from error
        if not hasattr(optimizer, "apply_gradients") or not hasattr(optimizer, "get_config"):
            raise UsageError(
                f"{self._name} makes a {type(optimizer).__qualname__}, which is no Keras optimizer. Name one such as "
                "keras.optimizers:Adam, or a function that returns one"
            )
        return Group(self._name, optimizer, members)

    def _build(self) -> None:
        variables = self._owner.all_trainable()
        for group in self._groups:
            group.build(variables)

    def step(self, clip_norm: float | None = None) -> float | None:
        variables = self._owner.trainable_variables()
        gradients = {
            n: g
            for n, g in self._owner.grads().items()
            if g is not None and n in variables and any(group.has(n) for group in self._groups)
        }
        if not gradients:
            raise UsageError(
                f"{self._name}.step(): no gradients were accumulated since they were last zeroed. "
                "Call a pullback of this module first. In JAX a module that is the first stage is reached through its anchor "
                "(gw.jax.functional(net, owner='worker')); in torch and TensorFlow give it their tensors: a call with numpy "
                "arrays alone gives numpy, which nothing records"
            )
        norm = None
        if clip_norm is not None:
            gradients, norm = _clipped(gradients, clip_norm)
        self._build()
        try:
            for group in self._groups:
                own = {n: g for n, g in gradients.items() if group.has(n)}
                if own:
                    group.apply(variables, own)
        finally:
            self._owner.generation += 1
        self._advance_schedule()
        return norm

    def zero_grad(self) -> None:
        names = self._owner.grads()
        self._owner.forget_gradients(n for n in names if any(group.has(n) for group in self._groups))

    # ---- Options and schedules ----------------------------------------------------------------------------------------

    def set(self, options: dict[str, Any]) -> None:
        if self._schedule is not None and _LEARNING_RATE in options:
            raise UsageError(
                f"{self._name}: set(learning_rate=...): it follows a schedule. Make a new optimizer"
            )
        for group in self._groups:
            group.check_options(options)
        for group in self._groups:
            group.set(options)

    def schedule(self, target: Any, kwargs: dict[str, Any]) -> None:
        name = getattr(target, "__qualname__", repr(target))
        if self._has_own_rates:
            raise UsageError(
                f"{name}: a Keras schedule gives the learning rate itself, and some groups have one of their own. Make an "
                "optimizer without them, or call set(learning_rate=...)"
            )
        try:
            schedule = target(**kwargs)
            _learning_rate(schedule, 0)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{name}({_shown(kwargs)}) makes no schedule, which is called with the number of the step: {error}. Try "
                "keras.optimizers.schedules:ExponentialDecay"
            ) from error
        if any(_LEARNING_RATE not in group.options() for group in self._groups):
            raise UsageError(f"{self._name} was made with a schedule of its own; leave one of them out")
        self._schedule, self._scheduled = schedule, 0
        self._follow()

    def _advance_schedule(self) -> None:
        if self._schedule is not None:
            self._scheduled += 1
            self._follow()

    def _follow(self) -> None:
        rate = _learning_rate(self._schedule, self._scheduled)
        for group in self._groups:
            group.set_learning_rate(rate)

    # ---- State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """{"groups": [{"variables": {name: tensor}, "options": {name: number}}], "scheduled": steps or None}."""
        self._build()
        groups = [
            {
                "variables": {n: tf.convert_to_tensor(value_of(v)) for n, v in g.variables().items()},
                "options": g.options(),
            }
            for g in self._groups
        ]
        return {"groups": groups, "scheduled": None if self._schedule is None else self._scheduled}

    def load_state_dict(self, state: Any) -> None:
        self._build()
        try:
            state = self._checked_state(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._refused(f"{type(error).__name__}: {error}") from error
        for group, given in zip(self._groups, state["groups"]):
            for name, variable in group.variables().items():
                variable.assign(given["variables"][name])
            group.set({n: x for n, x in given["options"].items() if n != _LEARNING_RATE})
            if self._schedule is None and _LEARNING_RATE in given["options"]:
                group.set_learning_rate(given["options"][_LEARNING_RATE])
        if self._schedule is not None:
            self._scheduled = state["scheduled"]
            self._follow()

    def _checked_state(self, state: Any) -> dict[str, Any]:
        """With its numbers as such, of which files of the caller's may have made tensors."""
        if not isinstance(state, dict) or set(state) != {"groups", "scheduled"}:
            raise self._refused(f"the state of an optimizer is what its state_dict() gave, not {state!r:.80}")
        if len(state["groups"]) != len(self._groups):
            raise self._refused(
                f"it has {len(state['groups'])} groups and this optimizer {len(self._groups)}"
            )
        if (state["scheduled"] is None) is not (self._schedule is None):
            raise self._refused(
                "one has a schedule and the other has not: call schedule() as before it was taken"
            )
        groups = [{**g, "options": {n: _plain(x) for n, x in g["options"].items()}} for g in state["groups"]]
        for group, given in zip(self._groups, groups):
            problems = problems_of_state(group.variables(), given["variables"], True)
            if problems:
                raise self._refused("; ".join(problems))
            group.check_options({n: x for n, x in given["options"].items() if n != _LEARNING_RATE})
            float(given["options"].get(_LEARNING_RATE, 0))
        scheduled = _plain(state["scheduled"])
        return {"groups": groups, "scheduled": None if scheduled is None else int(scheduled)}

    def _refused(self, why: str) -> UsageError:
        return UsageError(
            f"{self._name}: nothing was loaded, for this state is of another optimizer or module: {why}"
        )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "names"}


def _clipped(gradients: Mapping[str, Any], most: float) -> tuple[dict[str, Any], float]:
    """All together scaled down to this norm, and what it was; in float64, so that it does not overflow on the way.

    As `tf.clip_by_global_norm` does it: exactly to the norm, and to NaN where the norm is not finite.
    """
    norm = float(np.sqrt(sum(float(np.sum(np.abs(np.asarray(_wide(g))) ** 2)) for g in gradients.values())))
    scale = most / max(norm, most) if np.isfinite(norm) else np.nan
    return {n: g * tf.constant(scale, g.dtype) for n, g in gradients.items()}, norm


def _wide(x: Any) -> Any:
    return tf.cast(x, tf.complex128 if x.dtype.is_complex else tf.float64)


def _learning_rate(schedule: Any, step: int) -> float:
    return float(schedule(step))


def _plain(x: Any) -> Any:
    """A number as Python's; anything else as it is."""
    if tf.is_tensor(x) and x.shape.rank == 0:
        x = x.numpy()
    return x.item() if isinstance(x, np.generic) else x


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _shown(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in kwargs.items())
