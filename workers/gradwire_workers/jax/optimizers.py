"""optax optimizers, and whatever else has ``init`` and ``update``, over a module's accumulated gradients."""

from __future__ import annotations

import inspect
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradwire_wire.errors import UsageError
from gradwire_workers.jax.functions import needs_values
from gradwire_workers.jax.store import Store
from gradwire_workers.jax.trees import Tree, as_numbers, copied, is_array

__all__ = ["OptaxOptimizer"]

RATE, ALIAS = "learning_rate", "lr"


class Group(NamedTuple):
    """Parameters with options of their own."""

    names: list[str]
    options: dict[str, Any]


class OptaxOptimizer:
    """Made by ``target(**kwargs)``, as `optax.adam` is: once for each group. See `gradwire_workers.program.Optimizer`.

    It is given the parameters as the library's own tree (`Model.tree_of`). The learning rate is an argument of the compiled
    step, so that it can change at each, unless the target looks at it; other options are constants of the step. What a state
    has of an option (as that of `optax.inject_hyperparams`) changes with it. As in optax, a parameter without a gradient
    moves as with a gradient of zeros, and frozen ones do not move.
    """

    search = None

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
        self._looks_at_rate = False
        self._has_traced_rate = False
        self._following: list[list[int]] = []
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
        count, rates = np.int32(self._steps - self._scheduled_at), self._rates()
        if self._schedule is not None:
            self._follow_rate()
        try:
            made = self._compiled(bars, self._states, held, rates, count, clip_norm)
        except Exception as error:
            if isinstance(error, TypeError) and "missing" in str(error) and "update" in str(error):
                raise UsageError(
                    f"{self._name} wants to evaluate the loss itself, and is given gradients alone: {error}. optax.lbfgs does without "
                    "it as linesearch=None. Or keep the parameters and the optimizer in the program that calls: apply, params = "
                    "gw.jax.functional(net), with value_fn=lambda params: apply(params, ...)"
                ) from error
            if not needs_values(error) or (self._looks_at_rate and self._schedule is None):
                raise
            self._look_at_rate(error)
            return self._run_compiled(bars, held, clip_norm)
        self._has_traced_rate = None not in rates
        return jax.block_until_ready(made)

    def _look_at_rate(self, error: Exception) -> None:
        """From now on the rate is a constant of the step. UsageError where a schedule would move it."""
        if self._schedule is not None:
            raise UsageError(
                f"{self._name} looks at the value of its {self._alias} ({type(error).__name__}), so nothing can give it "
                "another at each step. Have it make the schedule itself"
            ) from error
        self._looks_at_rate = True
        self._compiled = jax.jit(self._updated)

    def _rates(self) -> list[Any]:
        """Of each group, what is an argument of the step; None where that is a constant."""
        rates = [None if self._looks_at_rate else g.options.get(self._alias) for g in self._groups]
        return [rate if _is_rate(rate) else None for rate in rates]

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
        group, tree_of = self._groups[i], self._store.model.tree_of
        if self._schedule is not None:
            rate = self._schedule(count)
            if self._following[i]:
                state = _put(state, self._initial(group, rate, held), self._following[i])
        own = tree_of(held)
        whole = tree_of({n: bars[n] if n in bars else jnp.zeros_like(x) for n, x in held.items()})
        updates, state = self._transformation(group, rate).update(whole, state, own)
        names = jax.tree_util.tree_leaves(tree_of({n: n for n in held}))
        moves = dict(zip(names, jax.tree_util.tree_structure(own).flatten_up_to(updates)))
        return {n: (x + moves[n]).astype(x.dtype) for n, x in held.items()}, state

    def zero_grad(self) -> None:
        self._store.forget_gradients(n for g in self._groups for n in g.names)

    # -- options ---------------------------------------------------------------------------------

    def set(self, options: dict[str, Any]) -> None:
        options = self._named(options)
        groups = [Group(g.names, {**g.options, **options}) for g in self._groups]
        if not self._is_argument(options):
            olds = zip(self._states, self._groups)
            self._states = [self._with_options(*old, new) for old, new in zip(olds, groups)]
            self._following = []
        self._groups = groups
        is_compiled_in = self._schedule is not None or self._looks_at_rate
        if self._alias in options:
            self._schedule = None  # an explicit rate is one that holds
        if is_compiled_in or set(options) != {self._alias} or not _is_rate(options[self._alias]):
            self._compiled = jax.jit(self._updated)

    def _is_argument(self, options: dict[str, Any]) -> bool:
        """Whether they are the rate alone, of which neither the states nor what they are made of has anything."""
        if set(options) != {self._alias} or not (_is_rate(options[self._alias]) and self._has_traced_rate):
            return False
        return not any(self._follow_rate())

    def _follow_rate(self) -> list[list[int]]:
        """Which leaves of each group's state are as the rate is. Found once, by two rates."""
        if not self._following:
            for group in self._groups:
                own = group.options.get(self._alias)
                rate = own if own and _is_rate(own) else 0.1
                self._following.append(_differing(self._start(group, rate), self._start(group, rate / 2)))
        return self._following

    def _with_options(self, state: Any, old: Group, new: Group) -> Any:
        """The state with what it has of the options; all else in it goes on."""
        before, after = self._start(old), self._start(new)
        if jax.tree_util.tree_structure(state) != jax.tree_util.tree_structure(after):
            raise UsageError(
                f"{self._name}: nothing was set, for with these options it would keep other state; make a new optimizer"
            )
        return _put(state, after, _differing(before, after))

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
        if any(g.options.get(self._alias) != self._groups[0].options.get(self._alias) for g in self._groups):
            raise UsageError(
                f"{name}: a schedule gives the {self._alias} itself, and groups have some of their own. Make an optimizer "
                f"without them or one for each group, or call set({self._alias}=...) first"
            )
        self._schedule, self._scheduled_at = schedule, self._steps
        self._compiled = jax.jit(self._updated)

    def _named(self, options: dict[str, Any]) -> dict[str, Any]:
        """``lr`` and ``learning_rate`` mean the same."""
        other = ALIAS if self._alias == RATE else RATE
        return {self._alias if name == other else name: value for name, value in options.items()}

    # -- making ----------------------------------------------------------------------------------

    def _start(self, group: Group, rate: Any = None) -> Any:
        return self._initial(group, rate, {n: self._store.parameters[n] for n in group.names})

    def _initial(self, group: Group, rate: Any, parameters: dict[str, Any]) -> Any:
        """The state of no step. rate: see `_transformation`."""
        transformation = self._transformation(group, rate)
        if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
            raise UsageError(
                f"{self._name} makes no optimizer with init and update, but a {type(transformation).__qualname__}; "
                "try optax:adam"
            )
        state = transformation.init(self._store.model.tree_of(parameters))
        return jax.tree_util.tree_map(_as_array, state)

    def _transformation(self, group: Group, rate: Any) -> Any:
        """rate: a learning rate, traced or not, instead of the one in the options."""
        options = {name: self._as_tree(value, group) for name, value in group.options.items()}
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

    def _as_tree(self, option: Any, group: Group) -> Any:
        """What says something of each parameter by its name, such as a mask, as the tree that it is to optax."""
        if not (isinstance(option, dict) and option) or not set(group.names) <= set(option) <= set(
            self._store.parameters
        ):
            return option
        return self._store.model.tree_of({name: option[name] for name in group.names})

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
        try:
            states, groups = self._as_given(state["state"], state["options"])
            steps, scheduled_at = int(state["steps"]), int(state["scheduled_at"])
        except (TypeError, ValueError, AttributeError) as error:
            raise self._unfit(str(error)) from error
        self._states, self._groups, self._following = states, groups, []
        self._steps, self._scheduled_at = steps, scheduled_at
        self._compiled = jax.jit(self._updated)

    def _as_given(self, given: Any, options: Any) -> tuple[list[Any], list[Group]]:
        """UsageError also for options that this optimizer does not have, with which it could make no step."""
        if len(given) != len(self._states) or len(options) != len(self._states):
            raise self._unfit(f"it has {len(given)} groups of parameters and this one {len(self._states)}")
        states = [self._filled(*pair) for pair in zip(self._states, given)]
        groups = [Group(g.names, {**g.options, **new}) for g, new in zip(self._groups, options)]
        for group in groups:
            try:
                self._transformation(group, None)
            except UsageError as error:
                raise self._unfit(str(error)) from error
        return states, groups

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
        return tree.filled({name: copied(given[name]) for name in there})

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


def _differing(one: Any, other: Any) -> list[int]:
    """Which leaves of two states of one structure have other values."""
    pairs = zip(*(map(as_numbers, jax.tree_util.tree_leaves(state)) for state in (one, other)))
    return [
        i for i, (x, y) in enumerate(pairs) if not (is_array(x) and jnp.array_equal(x, y, equal_nan=True))
    ]


def _put(state: Any, other: Any, places: Sequence[int]) -> Any:
    """The state with these leaves of another one of its structure, in the dtypes that they have here.

    A schedule may give a dtype of its own, and a state of others than at the start could not be loaded.
    """
    leaves, structure = jax.tree_util.tree_flatten(state)
    there = jax.tree_util.tree_leaves(other)
    for i in places:
        leaves[i] = there[i].astype(leaves[i].dtype)
    return jax.tree_util.tree_unflatten(structure, leaves)


def _is_rate(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _shown(kwargs: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in kwargs.items())
