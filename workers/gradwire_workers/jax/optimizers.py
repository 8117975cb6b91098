"""optax optimizers, and whatever else has ``init`` and ``update``, over a module's accumulated gradients."""

from __future__ import annotations

import inspect
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradwire_wire.errors import UsageError
from gradwire_workers.jax.store import Store
from gradwire_workers.jax.trees import Tree

__all__ = ["OptaxOptimizer"]

RATE, ALIAS = "learning_rate", "lr"


class Group(NamedTuple):
    """Parameters with options of their own."""

    names: list[str]
    options: dict[str, Any]


class OptaxOptimizer:
    """Made by ``target(**kwargs)``, as `optax.adam` is: once for each group. See `gradwire_workers.program.Optimizer`.

    The learning rate is an argument of the compiled step, so that it can change at each; other options are constants
    of it. As in optax, a parameter without a gradient moves as with a gradient of zeros, and frozen ones do not move.
    """

    def __init__(
        self,
        store: Store,
        target: Callable[..., Any],
        kwargs: dict[str, Any],
        groups: Sequence[dict[str, Any]] | None,
    ) -> None:
        self._store, self._target = store, target
        self._name = getattr(target, "__qualname__", repr(target))
        self._alias = RATE if ALIAS not in _parameters_of(target) else ALIAS
        self._groups = [
            Group(names, self._named({**kwargs, **own}))
            for names, own in _split(groups, list(store.parameters))
        ]
        self._steps = 0
        self._schedule: Callable[[Any], Any] | None = None
        self._scheduled_at = 0
        self._states = [self._start(group) for group in self._groups]
        self._compiled = jax.jit(self._updated)

    # -- steps -----------------------------------------------------------------------------------

    def step(self, clip_norm: float | None = None) -> float | None:
        moving = [[n for n in g.names if n not in self._store.frozen] for g in self._groups]
        gradients = self._store.gradients
        if not any(n in gradients for names in moving for n in names):
            raise UsageError(
                f"{self._name}: step() with no gradient accumulated since the last zero_grad(), so nothing would be learned. "
                "Call a pullback of this module first. In JAX a module that is the first stage is reached through its anchor "
                "(gw.jax.functional(net, owner='worker')); in torch and TensorFlow give it their tensors: a call with numpy "
                "arrays alone gives numpy, which nothing records"
            )
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm must be a positive number, not {clip_norm!r}")
        parameters = self._store.parameters
        held = [{n: parameters[n] for n in g.names} for g in self._groups]
        bars = [{n: gradients[n] for n in g.names if n in gradients} for g in self._groups]
        new, states, norm = self._run_compiled(bars, held, clip_norm)
        self._states = states
        self._steps += 1
        self._store.step({n: new[i][n] for i, names in enumerate(moving) for n in names})
        return None if clip_norm is None else float(norm)

    def _run_compiled(self, bars: Any, held: Any, clip_norm: float | None) -> Any:
        count = np.int32(self._steps - self._scheduled_at)
        try:
            made = self._compiled(bars, self._states, held, self._rates(), count, clip_norm)
        except TypeError as error:
            if "missing" not in str(error) or "update" not in str(error):
                raise
            raise UsageError(
                f"{self._name} wants to evaluate the loss itself, which is not here: {error}"
            ) from error
        return jax.block_until_ready(made)

    def _rates(self) -> list[Any]:
        return [
            g.options.get(self._alias) if _is_rate(g.options.get(self._alias)) else None for g in self._groups
        ]

    def _updated(self, bars: Any, states: Any, held: Any, rates: Any, count: Any, clip_norm: Any) -> Any:
        """New parameters and states, and the norm of all gradients."""
        leaves = jax.tree_util.tree_leaves(bars)
        norm = jnp.sqrt(sum(jnp.sum(jnp.abs(x) ** 2) for x in leaves))
        if clip_norm is not None:
            scale = jnp.where(norm > clip_norm, clip_norm / norm, 1.0)
            bars = jax.tree_util.tree_map(lambda x: (x * scale).astype(x.dtype), bars)
        made = [
            self._group_updated(i, *values, count) for i, values in enumerate(zip(bars, states, held, rates))
        ]
        return [new for new, _ in made], [state for _, state in made], norm

    def _group_updated(self, i: int, bars: Any, state: Any, held: Any, rate: Any, count: Any) -> Any:
        """Gradients of complex parameters are adjoints, as on the wire: the way up, which optax goes down."""
        if self._schedule is not None:
            rate = self._schedule(count)
        whole = {n: bars[n] if n in bars else jnp.zeros_like(x) for n, x in held.items()}
        updates, state = self._transformation(self._groups[i].options, rate).update(whole, state, held)
        return {n: (x + updates[n]).astype(x.dtype) for n, x in held.items()}, state

    def zero_grad(self) -> None:
        self._store.forget_gradients(n for g in self._groups for n in g.names)

    # -- options ---------------------------------------------------------------------------------

    def set(self, options: dict[str, Any]) -> None:
        options = self._named(options)
        groups = [Group(g.names, {**g.options, **options}) for g in self._groups]
        for group, state in zip(groups, self._states):
            self._check_same(state, self._start(group))
        self._groups = groups
        if self._alias in options:
            self._schedule = None  # an explicit rate is one that holds
        if set(options) - {self._alias} or not _is_rate(options.get(self._alias)):
            self._compiled = jax.jit(self._updated)

    def _check_same(self, state: Any, new: Any) -> None:
        if jax.tree_util.tree_structure(state) != jax.tree_util.tree_structure(new):
            raise UsageError(
                f"{self._name}: nothing was set, for with these options it would keep other state; make a new optimizer"
            )

    def schedule(self, target: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        name = getattr(target, "__qualname__", repr(target))
        try:
            schedule = target(**kwargs)
            value = schedule(np.int32(0)) if callable(schedule) else ()
        except (TypeError, ValueError) as error:
            raise UsageError(f"{name}({_shown(kwargs)}): {error}") from error
        if np.shape(value) != () or not hasattr(value, "__float__"):
            raise UsageError(
                f"{name} makes no schedule, a function from the number of steps to a learning rate; try "
                "optax:cosine_decay_schedule"
            )
        if self._alias not in _parameters_of(self._target):
            raise UsageError(f"{self._name} has no {self._alias} that a schedule could give")
        self._schedule, self._scheduled_at = schedule, self._steps
        self._compiled = jax.jit(self._updated)

    def _named(self, options: dict[str, Any]) -> dict[str, Any]:
        """``lr`` and ``learning_rate`` mean the same."""
        other = ALIAS if self._alias == RATE else RATE
        return {self._alias if name == other else name: value for name, value in options.items()}

    # -- making ----------------------------------------------------------------------------------

    def _start(self, group: Group) -> Any:
        transformation = self._transformation(group.options, None)
        if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
            raise UsageError(
                f"{self._name} makes no optimizer with init and update, but a {type(transformation).__qualname__}; "
                "try optax:adam"
            )
        state = transformation.init({n: self._store.parameters[n] for n in group.names})
        return jax.tree_util.tree_map(_as_array, state)

    def _transformation(self, options: dict[str, Any], rate: Any) -> Any:
        """rate: a traced learning rate instead of the one in the options."""
        chosen = options if rate is None else {**options, self._alias: rate}
        if not callable(self._target):
            raise UsageError(f"a {type(self._target).__qualname__} makes no optimizer; try optax:adam")
        try:
            inspect.signature(self._target).bind(**chosen)
        except ValueError:
            pass  # it hides its signature
        except TypeError as error:
            known = ", ".join(_parameters_of(self._target))
            raise UsageError(f"{self._name}({_shown(options)}): {error}; there are {known}") from error
        try:
            return self._target(**chosen)
        except (TypeError, ValueError) as error:
            if rate is not None:
                raise
            raise UsageError(f"{self._name}({_shown(options)}): {error}") from error

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The arrays of each group's state by path; the options that are numbers; the steps made."""
        return {
            "state": [Tree(state).arrays for state in self._states],
            "options": [
                {n: v for n, v in g.options.items() if isinstance(v, (bool, int, float, str))}
                for g in self._groups
            ],
            "steps": self._steps,
            "scheduled_at": self._scheduled_at,
        }

    def load_state_dict(self, state: Any) -> None:
        if not isinstance(state, dict) or not {"state", "options", "steps", "scheduled_at"} <= set(state):
            raise self._unfit("it is not what state_dict() of such an optimizer gave")
        given, options = state["state"], state["options"]
        if len(given) != len(self._states) or len(options) != len(self._states):
            raise self._unfit(f"it has {len(given)} groups of parameters and this one {len(self._states)}")
        states = [self._filled(*pair) for pair in zip(self._states, given)]
        self._states = states
        self._groups = [Group(g.names, {**g.options, **new}) for g, new in zip(self._groups, options)]
        self._steps, self._scheduled_at = int(state["steps"]), int(state["scheduled_at"])
        self._compiled = jax.jit(self._updated)

    def _filled(self, old: Any, given: Any) -> Any:
        tree = Tree(old)
        there = tree.arrays
        if not isinstance(given, dict) or set(given) != set(there):
            raise self._unfit("its arrays have other names")
        for name, x in there.items():
            if np.shape(given[name]) != x.shape or given[name].dtype != x.dtype:
                raise self._unfit(
                    f"{name} is {given[name].dtype}{list(np.shape(given[name]))}, not {x.dtype}{list(x.shape)}"
                )
        return tree.filled({name: jnp.array(given[name], copy=True) for name in there})

    def _unfit(self, reason: str) -> UsageError:
        return UsageError(
            f"{self._name}: nothing was loaded, for this state is of another optimizer or module: {reason}"
        )


def _split(
    groups: Sequence[dict[str, Any]] | None, names: list[str]
) -> list[tuple[list[str], dict[str, Any]]]:
    if groups is None:
        return [(names, {})]
    found = [(list(g["names"]), {n: v for n, v in g.items() if n != "names"}) for g in groups]
    every = [name for group, _ in found for name in group]
    twice = sorted({name for name in every if every.count(name) > 1})
    if twice:
        raise UsageError(f"{twice[0]} is in more than one group of parameters")
    return found


def _parameters_of(target: Any) -> list[str]:
    try:
        return list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return []


def _as_array(x: Any) -> Any:
    """A Python number of a state as the array that the compiled step makes of it."""
    return jnp.asarray(x) if isinstance(x, (int, float, complex)) else x


def _is_rate(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _shown(kwargs: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in kwargs.items())
