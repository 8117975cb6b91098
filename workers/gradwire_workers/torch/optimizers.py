"""Optimizers of torch over a module's parameters, with clipping and schedules. See `gradwire_workers.program.Optimizer`."""

from __future__ import annotations

import inspect
from collections import Counter
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any, Callable, Sequence

import torch
from torch.optim import optimizer as _torch_optimizer

from gradwire_wire.errors import UsageError
from gradwire_workers.program import Search

__all__ = ["TorchOptimizer"]

_Base = torch.optim.Optimizer
_is_profiled: Callable[[], bool] = getattr(torch._C._autograd, "_profiler_enabled", lambda: True)
_HOOKED = "torch autograd profiler record_function _optimizer_step_pre_hooks _optimizer_step_post_hooks _optimizer_step_code"
_ABOUT_HOOKS = frozenset(
    f"{_HOOKED} cast Optimizer __class__ __name__ format chain values isinstance tuple len RuntimeError "
    "_global_optimizer_pre_hooks _global_optimizer_post_hooks".split()
)
"""What the code that torch puts around each `step` names: a name in one of these versions which is none of them may be anything."""
_LIKE_PARAMETERS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"}


class TorchOptimizer:
    """Made by ``target(parameters, **kwargs)``.

    program: whose generation each step advances. groups: see `gradwire_workers.program.Program.optimizer`.
    """

    def __init__(
        self,
        program: Any,
        module: Any,
        target: Callable[..., Any],
        kwargs: dict[str, Any],
        groups: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self._program = program
        self._name = getattr(target, "__qualname__", repr(target))
        self._schedules: list[Any] = []
        self._check_options(groups)
        try:
            self._optimizer = target(_parameters(module, groups), **kwargs)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self._name}(parameters, {_shown(kwargs)}): {error}") from error
        if not (hasattr(self._optimizer, "step") and hasattr(self._optimizer, "param_groups")):
            raise UsageError(f"{self._name} does not make a torch optimizer; try torch.optim:Adam")
        self._check_groups(groups)

    def _check_options(self, groups: Sequence[dict[str, Any]] | None) -> None:
        if any("params" in group for group in groups or ()):
            raise UsageError('a group of parameters has "names"; "params" would be the tensors themselves')

    def _check_groups(self, groups: Sequence[dict[str, Any]] | None) -> None:
        """torch keeps an option that it does not know, and ignores it."""
        for i, group in enumerate(groups or ()):
            unknown = sorted(set(group) - {"names"} - set(self._optimizer.defaults))
            if unknown:
                raise self._unknown(unknown, f"in parameters[{i}]")

    def _unknown(self, names: Sequence[str], where: str) -> UsageError:
        known = ", ".join(self._optimizer.defaults)
        return UsageError(f"{self._name} has no option {', '.join(names)} ({where}); there are {known}")

    def _members(self) -> list[Any]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def search(self) -> Search | None:
        """Where a step needs a closure, as that of LBFGS."""
        return self._search if _needs_closure(type(self._optimizer).step) else None

    def _search(self, accumulate: Callable[[], Any], clip_norm: float | None) -> None:
        def closure() -> Any:
            self.zero_grad()
            value = accumulate()
            if clip_norm is not None:
                self._clip([p for p in self._members() if p.grad is not None], clip_norm)
            return value

        self._move(self._members(), closure)
        self.zero_grad()
        self._advance_schedules()

    def step(self, clip_norm: float | None = None) -> float | None:
        moved = [p for p in self._members() if p.grad is not None]
        if not moved:
            raise UsageError(
                f"{self._name}.step(): no gradient was accumulated since the last zero_grad(), so nothing would be learned. "
                "Call a pullback of this module first. In JAX a module that is the first stage is reached through its anchor "
                "(gw.jax.functional(net, owner='worker')); in torch and TensorFlow give it their tensors: a call with numpy "
                "arrays alone gives numpy, which nothing records"
            )
        norm = None if clip_norm is None else self._clip(moved, clip_norm)
        self._move(moved)
        self._advance_schedules()
        return norm

    def _clip(self, moved: Sequence[Any], clip_norm: float) -> float:
        if any(p.grad.layout is not torch.strided for p in moved):
            raise UsageError(
                f"{self._name}.step(clip_norm={clip_norm}): a gradient is sparse (embedding with sparse=True), and torch clips no such "
                "ones. Say sparse=False, or leave clip_norm out"
            )
        return float(torch.nn.utils.clip_grad_norm_(moved, clip_norm))

    def _advance_schedules(self) -> None:
        try:
            for schedule in self._schedules:
                schedule.step()
        except ValueError as error:
            raise UsageError(
                f"{self._name}.step(): the parameters were moved, and there the schedule ended: {error}. Make a new optimizer, "
                "or a longer schedule"
            ) from error

    def _move(self, moved: Sequence[Any], *closure: Callable[[], Any]) -> None:
        try:
            _bare_step(self._optimizer)(*closure)
        except TypeError as error:
            if "closure" not in str(error):
                raise
            raise UsageError(
                f"{self._name} wants to evaluate the loss itself (a closure), which is not here: {error}. Give its module the loss as "
                "its result, and call optimizer.minimize(...) instead of step()"
            ) from error
        finally:
            self._program.generation += 1
            for p in moved:  # fused optimizers do not, and older graphs would go on with the new values
                torch.autograd.graph.increment_version(p)

    def zero_grad(self) -> None:
        if getattr(self._optimizer.zero_grad, "__func__", None) is not _Base.zero_grad or _is_profiled():
            self._optimizer.zero_grad(set_to_none=True)
            return
        for p in self._members():
            p.grad = None

    def set(self, options: dict[str, Any]) -> None:
        unknown = [name for name in options if name not in self._optimizer.defaults]
        if unknown:
            raise self._unknown(unknown, "in set()")
        self._check_values(options)
        for group in self._optimizer.param_groups:
            for name, value in options.items():
                if isinstance(group.get(name), torch.Tensor):  # a capturable optimizer's lr
                    group[name].fill_(value)
                else:
                    group[name] = value

    def _check_values(self, options: dict[str, Any]) -> None:
        """By the optimizer's own checks of its arguments."""
        kind = type(self._optimizer)
        settings = {**self._optimizer.defaults, **options}
        known = inspect.signature(kind).parameters
        try:
            kind(self._members()[:1], **{name: x for name, x in settings.items() if name in known})
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self._name}: set({_shown(options)}): {error}") from error

    def schedule(self, target: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        name = getattr(target, "__qualname__", repr(target))
        before = deepcopy([_options(group) for group in self._optimizer.param_groups])
        try:
            schedule = target(self._optimizer, **kwargs)
            if not hasattr(schedule, "step") or not hasattr(schedule, "state_dict"):
                raise UsageError(f"{name} makes no schedule; try torch.optim.lr_scheduler:StepLR")
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise UsageError(
                    f"{name} follows a metric, which only the caller knows: watch it there and call optimizer.set(lr=...)"
                )
        except BaseException as error:
            self._restore_options(before)
            if isinstance(error, UsageError) or not isinstance(error, (TypeError, ValueError)):
                raise
            raise UsageError(f"{name}(optimizer, {_shown(kwargs)}): {error}") from error
        self._schedules.append(schedule)

    def _restore_options(self, before: Sequence[dict[str, Any]]) -> None:
        """A schedule writes into the groups as soon as it is made."""
        for group, options in zip(self._optimizer.param_groups, before):
            for name in set(group) - set(options) - {"params"}:
                del group[name]
            group.update(options)

    # ---- State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's own, with the schedules' beside it."""
        schedules = [_with_plain_counts(s.state_dict()) for s in self._schedules]
        return {**self._optimizer.state_dict(), "schedules": schedules}

    def load_state_dict(self, state: Any) -> None:
        try:
            self._check_state(state)
            state = self._as_own(state)
            self._check_moments(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{self._name}: nothing was loaded, for this is no optimizer's state. {error}"
            ) from error
        before = deepcopy(self.state_dict())
        try:
            self._load(state)
        except Exception as error:
            self._load(before)
            raise UsageError(
                f"{self._name}: nothing was loaded, for this state is of another optimizer or module. {error}"
            ) from error

    def _check_state(self, state: Any) -> None:
        is_state = isinstance(state, dict) and isinstance(state.get("state"), dict)
        if not is_state or any("params" not in group for group in state.get("param_groups", [{}])):
            raise UsageError(
                f"{self._name}: nothing was loaded. The state of an optimizer is what its state_dict() gave, a dict with "
                f"'state', 'param_groups' and 'schedules', not {state!r:.80}"
            )
        schedules = state.get("schedules", [])
        if len(schedules) != len(self._schedules):
            raise UsageError(
                f"{self._name}: nothing was loaded. The state has {len(schedules)} schedules and this optimizer "
                f"{len(self._schedules)}; call schedule() as before the state was taken, then load it"
            )

    def _as_own(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state as `state_dict` gives it, whatever a file of the caller's has made of numbers: tensors, or of keys texts.

        torch would take parameters whose numbers it does not find for ones without moments.
        """
        own = self.state_dict()
        groups = _as_in(own["param_groups"], state["param_groups"])
        for group in groups:
            group["params"] = list(map(int, group["params"]))
        numbers = {number for group in groups for number in group["params"]}
        moments = {int(n) if str(n) in map(str, numbers) else n: x for n, x in state["state"].items()}
        strange = [n for n in moments if n not in numbers and str(n).isdigit()]
        if strange:
            raise UsageError(
                f"{self._name}: nothing was loaded. The state has moments of parameter {strange[0]}, and its groups have no such one"
            )
        return {**state, "state": moments, "param_groups": groups}

    def _check_moments(self, state: dict[str, Any]) -> None:
        """Shapes: torch would take any, and fail at the next step."""
        given = [p for group in state["param_groups"] for p in group["params"]]
        for number, p in zip(given, self._members()):
            for name in _LIKE_PARAMETERS & set(state["state"].get(number, ())):
                x = state["state"][number][name]
                if isinstance(x, torch.Tensor) and x.shape != p.shape:
                    raise UsageError(
                        f"{self._name}: nothing was loaded. {name} of parameter {number} has shape {tuple(x.shape)}, the "
                        f"parameter {tuple(p.shape)}"
                    )

    def _load(self, state: dict[str, Any]) -> None:
        known = [set(group) & set(self._optimizer.defaults) for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict({name: state[name] for name in ("state", "param_groups")})
        for group, names in zip(self._optimizer.param_groups, known):  # torch would fail at the next step
            missing = sorted(names - set(group))
            if missing:
                raise ValueError(f"It has no option {', '.join(missing)}")
        for p, moments in self._optimizer.state.items():
            moments.update({name: _laid_out_as(p, x) for name, x in moments.items()})
        for schedule, values in zip(self._schedules, state.get("schedules", [])):
            schedule.load_state_dict(_as_in(schedule.state_dict(), values))


@lru_cache(maxsize=64)
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _bare_step(optimizer: Any) -> Callable[[], Any]:
    """The optimizer's `step` without what torch puts around it for profilers and hooks, where there are none.

    That takes as long as the step of a small model by SGD. A schedule puts a step of its own into the optimizer.
    """
    bound = optimizer.step
    around = getattr(bound, "__func__", None)
    within = getattr(around, "__wrapped__", None)
    if within is None or not _only_tells_hooks(around) or _is_profiled():
        return bound
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or _global_hooks():
        return bound
    return partial(within, optimizer)


@lru_cache(maxsize=64)
def _only_tells_hooks(around: Any) -> bool:
    """Whether this is what torch puts around each `step`, as it is known here: a profiler's record, and hooks."""
    code = around.__code__
    names = {*code.co_names, *code.co_freevars} - {"func"}
    of_torch = code.co_filename == inspect.getfile(_Base) and getattr(around, "hooked", False)
    return bool(of_torch and names >= set(_HOOKED.split()) and names <= _ABOUT_HOOKS)


def _global_hooks() -> bool:
    names = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"  # which an old torch has not
    return any(getattr(_torch_optimizer, name, None) for name in names)


def _parameters(module: Any, groups: Sequence[dict[str, Any]] | None) -> Any:
    """What a torch optimizer is given."""
    if groups is None:
        return module.parameters()
    there = dict(module.named_parameters(remove_duplicate=False))
    return [
        {
            "params": [there[name] for name in group["names"]],
            **{name: value for name, value in group.items() if name != "names"},
        }
        for group in groups
    ]


def _with_plain_counts(state: Any) -> Any:
    """A schedule's state as it can be sent: MultiStepLR has its milestones in a Counter, also as a part of another schedule."""
    if isinstance(state, dict):
        kind = dict if isinstance(state, Counter) else type(state)
        return kind((name, _with_plain_counts(x)) for name, x in state.items())
    return list(map(_with_plain_counts, state)) if type(state) is list else state


def _laid_out_as(p: Any, moment: Any) -> Any:
    """As an optimizer makes its moments. Fused ones take memory as it lies, and files of numpy's or safetensors' lay all in C's order."""
    if not isinstance(moment, torch.Tensor) or moment.shape != p.shape or moment.stride() == p.stride():
        return moment
    return torch.empty_like(p, dtype=moment.dtype, requires_grad=False).copy_(moment)


def _as_in(own: Any, given: Any) -> Any:
    """A tree with its numbers as in its kin: not as tensors, nor as texts where they are keys; with tuples for lists and counters for dicts."""
    if isinstance(given, torch.Tensor) and not isinstance(own, torch.Tensor):
        return given.item() if given.dim() == 0 else given
    if isinstance(given, dict):
        kin = own if isinstance(own, dict) else {}
        are_numbers = bool(kin) and all(isinstance(name, int) for name in kin)
        names = [int(n) if are_numbers and isinstance(n, str) and n.isdigit() else n for n in given]
        made = {name: _as_in(kin.get(name), x) for name, x in zip(names, given.values())}
        return Counter(made) if isinstance(own, Counter) else made
    if isinstance(given, (list, tuple)):
        is_alike = isinstance(own, (list, tuple)) and len(own) == len(given)
        items = [_as_in(*pair) for pair in zip(own if is_alike else [None] * len(given), given)]
        return tuple(items) if isinstance(own, tuple) else items
    return given


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _shown(kwargs: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in kwargs.items())
