"""A remote function or module as an ordinary function of its caller: what users hold.

The whole idea on one screen: flatten the arguments, see which family they are of, and let that
family's face make the call a node of its own autodiff. All ways lead to `Handle.invoke`.
"""

from __future__ import annotations

import operator
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradwire import pullback
from gradwire.answers import checked_state
from gradwire.background import Background, futures_in, raising, with_results
from gradwire.families import (
    FAMILIES,
    barrier,
    compiling_face,
    exported,
    face_named,
    family_of,
    family_of_call,
    in_callers_modes,
    is_leaf,
    naming,
    tensors_named,
)
from gradwire.handle import Handle
from gradwire.orders import checked_shape
from gradwire.pullback import Pullback
from gradwire.site import Site, SpecResult
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import dtype_named
from gradwire_wire.errors import DtypeError, UnsupportedTensorError, UsageError
from gradwire_wire.interruption import postponed, raise_postponed
from gradwire_wire.structures import fill, flatten, positional

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gradwire.pipeline import Pipeline
    from gradwire.submissions import Submission

__all__ = ["Options", "Optimizer", "Remote", "ShapeDtype"]


MAX_SITES = 1024


class ShapeDtype(NamedTuple):
    """Shape and dtype (by name) of a tensor that is not there: in `Remote.spec` and ``options(out_spec=...)``."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Options:
    """What `Remote.options` sets; never mixed with the function's own keywords."""

    timeout: float | None = None
    seed: Any = None
    residuals: str = "keep"
    compile: bool | str = "auto"
    vmap: str = "batch"
    out_spec: Any = None
    family: str | None = None
    retry: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        if self.timeout is not None and not (number and self.timeout > 0):
            raise UsageError(f"timeout must be a positive number of seconds or None, not {self.timeout!r}")
        is_number = type(self.seed) is int and 0 <= self.seed < 2**63
        if not (self.seed is None or self.is_seed_traced or is_number):
            raise UsageError(f"seed must be an integer from 0 to 2**63 - 1 or None, not {self.seed!r}")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in allowed):
                raise UsageError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}")

    @property
    def is_seed_traced(self) -> bool:
        """Whether the seed is a scalar of a program being traced: an operand of the call rather than part of its site."""
        return family_of(self.seed) != ""


_CHOICES: dict[str, tuple[Any, ...]] = {
    "residuals": ("keep", "recompute"),
    "compile": ("auto", True, False),
    "vmap": ("batch", "sequential"),
    "family": (None, "numpy", *FAMILIES),
    "retry": (True, False),
}


class Remote:
    """Call it like the function it stands for: tensors of one framework in, tensors of that framework out."""

    # Without a dictionary: `remote.timeout = 5` would be taken, and do nothing.
    __slots__ = ("__weakref__", "_background", "_options", "_routes", "_sites", "handle")

    def __init__(self, handle: Handle, background: Background, options: Options | None = None) -> None:
        self.handle = handle
        self._background = background
        self._options = options or Options()
        self._sites: dict[tuple[bytes, bool, bool | None], Site] = {}
        self._routes: dict[tuple[Any, ...], tuple[str, Site]] = {}

    def __repr__(self) -> str:
        return f"<gradwire.Remote {self.handle.name}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise stays_here("remote", self)

    if not TYPE_CHECKING:  # which is to find misspelt names

        def __getattr__(self, name: str) -> Any:
            raise _no_attribute(
                self,
                name,
                "only a call reaches what is in the worker. For another method of it give worker.module() a factory whose "
                "result does that when it is called; weights are in state_dict()",
            )

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The call. Blocks until the worker answers, dies, or ``options(timeout=...)`` passes.

        Results belong to the caller and are writable; they stay valid whatever happens to the worker.
        Raises RemoteError (also as the builtin type) for what the remote code raises.
        """
        compiling = compiling_face()
        if compiling is not None:
            return compiling.traced(self, args, kwargs)
        if not kwargs:
            known = self._routes.get((self.handle.training, *map(type, args)))
            if known is not None:
                return self._along(*known, list(args))
        family, site, leaves = self._route(args, kwargs)
        return self._along(family, site, [*self.seed_operand, *leaves] if site.seeded else leaves)

    def _route(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Site, list[Any]]:
        """Which family's face makes a plain call, and of what; noted for the next one that is alike."""
        structure, leaves = self._flatten(args, kwargs)
        options = self._options
        family = family_of_call(
            leaves, structure, options.family or ("jax" if options.is_seed_traced else None)
        )
        site = self._plain_site(structure, self.handle.is_module and face_named(family).ACCUMULATES)
        if not kwargs and not site.seeded and all(map(family_of, args)):
            self._note_route(family, site, args)
        return family, site, leaves

    def _along(self, family: str, site: Site, operands: list[Any]) -> Any:
        try:
            return face_named(family).call(self.handle, site, operands)
        except (UnsupportedTensorError, DtypeError) as error:
            refused = naming(error, operands[site.seeded :], site.structure)
        raise refused

    def _note_route(self, family: str, site: Site, args: tuple[Any, ...]) -> None:
        """Positional tensors of these types, in this mode, go this way: it depends on nothing else."""
        if len(self._routes) >= MAX_SITES:
            self._routes.clear()
        self._routes[site.training, *map(type, args)] = (family, site)

    @property
    def __name__(self) -> str:
        """The target's own, for who names things by their functions (`jax.named_call`, profilers)."""
        return self.handle.name.rpartition(":")[2]

    autograph_info__ = None  # TensorFlow's AutoGraph calls what says so as it is, instead of rewriting it

    def described(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Handle, Site]:
        """For a compiler that traces the call: what is called, and everything fixed about the call."""
        structure, _ = self._flatten(tuple(args), kwargs)
        return self.handle, self._plain_site(structure, self.handle.is_module)

    def vjp(self, /, *args: Any, **kwargs: Any) -> tuple[Any, Pullback]:
        """Results and pullback, for any caller (see `Pullback`).

        A module's own gradients accumulate at each pullback, as with ``backward()``.
        """
        site, family, carriers = self._exported(args, kwargs, accumulate=self.handle.is_module)
        return pullback.vjp(self.handle, site, family, carriers)

    def jvp(self, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        """Forward mode: results and their tangents; a tangent of None is zero."""
        for what, given in (("primals", primals), ("tangents", tangents)):
            if not isinstance(given, (tuple, list)):  # the rows of a tensor are no arguments
                raise UsageError(
                    f"jvp takes two tuples, one item for each argument: {what} is a {type(given).__name__}"
                )
        if len(primals) != len(tangents):
            raise UsageError(f"{len(primals)} primals and {len(tangents)} tangents")
        site, family, carriers = self._exported(primals, {})
        return pullback.jvp(self.handle, site, family, carriers, [list(tangents), {}])

    def spec(self, /, *args: Any, **kwargs: Any) -> Any:
        """The result tree with a `ShapeDtype` in place of each tensor; user code does not run for real.

        Arguments may be tensors or `ShapeDtype`. UsageError where the shape depends on values.
        """
        structure, leaves = flatten([list(args), kwargs], lambda x: isinstance(x, ShapeDtype) or is_leaf(x))
        result = self.handle.spec(self._site(structure, seeded=False), tuple(_aval_of(x) for x in leaves))
        return fill(result.structure, [ShapeDtype(a.shape, a.dtype.name) for a in result.avals])

    def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Make the call without waiting for its answer; tensors must not be written until it is done.

        Calls from numpy, and from torch where no gradient is recorded, are made in this order, and many are under way at
        once: it waits while that are 128 calls or 16 MiB of arguments (a thread that runs an event loop never does). All
        others, those too long for a lane, and all of them by tcp, with ``GRADWIRE_LANE=zmq`` or ``retry``, are made by eight
        threads, in no order: wait for such a future before ``train``, ``step`` and the like, which wait for the former alone.

        An argument may be the future of another ``submit``, also inside lists, tuples and dicts: the call is made once its
        result is there, and fails as it failed. torch's ``no_grad``, ``enable_grad`` and ``inference_mode`` are those of the
        caller at ``submit``; a ``tf.GradientTape`` or a tracer of JAX records its own thread alone. Cancelling the future does not
        interrupt a call that has begun;
        ``options(timeout=...)`` does.
        """
        return self._submit(args, kwargs, may_wait=True)

    def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any], may_wait: bool) -> Future[Any]:
        if postponed:
            raise_postponed()
        known = None if kwargs else self._routes.get((self.handle.training, *map(type, args)))
        waited = () if known is not None else futures_in([args, kwargs])
        if not waited:
            return self._begin(args, kwargs, may_wait, None, known)
        future = self._future()

        def begin() -> None:
            try:
                args_there, kwargs_there = with_results([args, kwargs])
                self._begin(args_there, kwargs_there, False, future, None)
            except Exception as error:
                self._background.start(future, raising(error))

        self._background.after(waited, future, in_callers_modes(begin))
        return future

    def _future(self) -> Future[Any]:
        """One for a call that will begin later."""
        future = self._background.new_future()
        pipeline = self.handle.pipeline_or_none(self._background)
        return future if pipeline is None else pipeline.new_future()

    def _begin(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        may_wait: bool,
        future: Future[Any] | None,
        known: tuple[str, Site] | None,
    ) -> Future[Any]:
        """Submit a call by the pipeline, or by a thread that makes it. known: its route."""
        act: Any = in_callers_modes(partial(self, *args, **kwargs))
        begun = None
        if compiling_face() is None:
            try:
                pipeline = self.handle.pipeline(self._background)
                call = None if pipeline is None else self._submission(pipeline, args, kwargs, known, act)
                if call is not None and pipeline is not None:
                    begun = pipeline.submit(call, may_wait, future)
            except Exception as error:
                act = raising(error)
        if begun is not None:
            return begun
        future = future or self._background.new_future()
        self._background.start(future, act)
        return future

    def _submission(
        self,
        pipeline: Pipeline,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: tuple[str, Site] | None,
        again: Any,
    ) -> Submission | None:
        """The call as it goes by the pipeline; None where a gradient would be recorded, or it may be repeated."""
        family, site, leaves = self._route(args, kwargs) if known is None else (*known, list(args))
        is_plain = getattr(face_named(family), "is_plain", None)
        if site.seeded or site.retry or is_plain is None or not is_plain(site, leaves):
            return None
        carriers = exported(leaves, site.structure)
        adopt = tensors_named(family).adopt
        if family != "numpy":
            adopt = in_callers_modes(adopt)
        return self.handle.submission(pipeline, site, carriers, adopt, again)

    async def aio(self, /, *args: Any, **kwargs: Any) -> Any:
        """``await remote.aio(x)``: the event loop goes on meanwhile."""
        import asyncio  # here, for it takes longer than all of ours

        return await asyncio.wrap_future(self._submit(args, kwargs, may_wait=False))

    def options(self, **changes: Any) -> Remote:
        """A new proxy of the same remote thing.

        timeout: seconds a call may take. seed: makes calls reproducible (in JAX also one that is traced, or a key).
        residuals: "keep", or "recompute" the forward at the pullback. compile: "auto", True, False. vmap: "batch" (one
        message), or "sequential" (a call for each row, for functions that must not see a batch). out_spec: result tree
        of `ShapeDtype`, where it cannot be found out. family: the result's, where no argument tells it. retry: a call
        whose worker died is made once more in the new process; for functions that may run twice, with ``restart=`` of
        the worker. UsageError for anything else.
        """
        known = [f.name for f in fields(Options)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise UsageError(f"unknown option {', '.join(unknown)}; there are {', '.join(known)}")
        seed, timeout = changes.get("seed"), changes.get("timeout")
        if family_of(seed):
            changes["seed"] = _seed(seed)
        elif isinstance(seed, Integral) and not isinstance(seed, bool):
            changes["seed"] = operator.index(seed)
        if isinstance(timeout, Real) and not isinstance(timeout, bool):
            changes["timeout"] = _seconds(timeout)
        if changes.get("out_spec") is not None:
            _spec_result(changes["out_spec"])  # which refuses what cannot be one
        if changes.get("retry"):
            self._check_retry()
        return Remote(self.handle, self._background, replace(self._options, **changes))

    def _check_retry(self) -> None:
        if self.handle.is_module:
            raise UsageError(
                f"{self!r} is a module: it has state, which a new process does not have, so its calls are never repeated. "
                "Load what is pure with worker.function(...)"
            )
        if not self.handle.revives:
            raise UsageError(
                "retry=True needs a worker that is started again: bridge.worker(..., restart='on-failure')"
            )

    # -- state -----------------------------------------------------------------------------------

    @property
    def training(self) -> bool | None:
        """The module's mode; None for functions and modules that have none."""
        return self.handle.training

    def train(self, mode: bool = True) -> Remote:
        """Training mode for the calls that follow; what was dispatched before runs in the old one."""
        if not isinstance(mode, (bool, np.bool_)):
            raise UsageError(f"train() takes True or False, not {mode!r:.80}")
        self._change("train", bool(mode))
        self.handle.training = self._change("training")
        return self

    def eval(self) -> Remote:
        """Evaluation mode for the calls that follow."""
        return self.train(False)

    def parameters(self) -> dict[str, Any]:
        """Trainable tensors by name: copies, of ``options(family=...)`` or numpy."""
        return dict(self._change("parameters"))

    def buffers(self) -> dict[str, Any]:
        """The state that is not trained, by name."""
        return dict(self._change("buffers"))

    def state_dict(self) -> dict[str, Any]:
        """All of the state by name."""
        return dict(self._change("state_dict"))

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Replace the state, all or nothing. UsageError names what is missing, unexpected or misshapen."""
        if not isinstance(state, Mapping):
            raise UsageError(
                f"a state is a dict of tensors by name, as state_dict() gives it, not {state!r:.80}"
            )
        self._change("load_state_dict", dict(state), strict=bool(strict))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of the state to a safetensors file, whole or not at all, by the worker: nothing is sent here.

        A relative path is in this program's working directory. UsageError where its folder is missing.
        """
        self._change("save", os.path.abspath(path))

    def load(self, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Replace the state by that of a safetensors file, as `load_state_dict` does: all or nothing.

        Whoever wrote it: the file has names and tensors and nothing of gradwire's.
        """
        self._change("load", os.path.abspath(path), strict=bool(strict))

    def grads(self) -> dict[str, Any]:
        """Gradients accumulated in the worker by parameter name; None where there are none."""
        self.warn_of_regularizers("grads")
        return dict(self._change("grads"))

    def requires_grad_(self, flag: bool = True, names: str | Sequence[str] | None = None) -> Remote:
        """Whether parameters learn from now on: a frozen one gets no gradient, loses the one it has, and is not moved.

        names: parameters, beginnings of their names ("encoder" means "encoder.weight"), or patterns with ``*``; None
        means all. UsageError for one that means nothing.
        """
        self._change("requires_grad", bool(flag), _names(names))
        return self

    def optimizer(
        self, target: str, parameters: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> Optimizer:
        """An optimizer of the worker's framework over this module's parameters, such as ``"torch.optim:Adam"``.

        kwargs: its options. parameters: groups with options of their own, ``[{"names": ["encoder"], "lr": 1e-4}, ...]``,
        the names as in `requires_grad_`; what is in no group is not moved.
        """
        groups = None if parameters is None else [_group(g) for g in parameters]
        settings = {} if groups is None else {"groups": groups}
        self.warn_of_regularizers()
        return Optimizer(self, target, self._change("optimizer", target, kwargs, **settings))

    def warn_of_regularizers(self, once: str = "") -> None:
        """A UserWarning, once for each remote, where training by a call's result alone would leave losses of Keras out.

        once: an occasion on which the worker need not be asked a second time. (What ``add_loss`` is given may be known to it
        only after calls.)
        """
        handle = self.handle
        if handle.has_warned or once in handle.asked or not handle.is_module:
            return
        if once:
            handle.asked.add(once)
        names = list(self._change("regularizers"))
        handle.has_warned = bool(names)
        if names:
            shown = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
            warnings.warn(
                f"{self.handle.name} has regularizers or losses of its own ({shown}). As with a Keras model that is called, their losses are no part of "
                "the result, so training by the result leaves them out. gw.keras.Layer adds them to its losses; elsewhere have the "
                "factory return a model that returns them, such as (y, sum(net.losses)), and add them to your loss",
                UserWarning,
                stacklevel=_levels_to_the_user(),
            )

    def _change(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        barrier()  # or this would overtake what a compiled program has dispatched, and what was submitted
        self.handle.drain()
        structure, leaves = self._flatten(args, kwargs)
        tree, carriers = self.handle.change_state(
            verb, structure, exported(leaves, structure), self._options.timeout
        )
        adopt = tensors_named(self._options.family or "numpy").adopt
        return checked_state(verb, fill(tree, [adopt(c) for c in carriers]))

    @property
    def seed_operand(self) -> list[Any]:
        """The seed as an operand of the call, before the target's own; empty unless it is traced."""
        return [self._options.seed] if self._options.is_seed_traced else []

    # -- how a call is described -----------------------------------------------------------------

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, list[Any]]:
        if not kwargs and all(map(family_of, args)):
            return positional(len(args)), list(args)
        return flatten([list(args), kwargs], is_leaf)

    def _site(self, structure: bytes, **overrides: Any) -> Site:
        options, handle = self._options, self.handle
        settings: dict[str, Any] = {
            "training": handle.training,
            "stateful": bool(handle.training),
            "seed": None if options.is_seed_traced else options.seed,
            "seeded": options.is_seed_traced,
            "compile": None if options.compile == "auto" else bool(options.compile),
            "timeout_s": options.timeout,
            "residuals": options.residuals,
            "vmap": options.vmap,
            "retry": options.retry,
            "out_spec": None if options.out_spec is None else _spec_result(options.out_spec),
        }
        return Site(structure, **{**settings, **overrides})

    def _plain_site(self, structure: bytes, accumulate: bool) -> Site:
        """The site of a plain call, kept: making and hashing one costs more than finding it."""
        key = (structure, accumulate, self.handle.training)
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= MAX_SITES:
                self._sites.clear()
            site = self._sites[key] = self._site(structure, accumulate=accumulate)
        return site

    def _exported(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], accumulate: bool = False
    ) -> tuple[Site, str, list[Carrier]]:
        if self._options.is_seed_traced:
            raise UsageError(
                "vjp() and jvp() take a seed that is a number; a traced one goes with a plain call under jit"
            )
        structure, leaves = self._flatten(args, kwargs)
        family = family_of_call(leaves, structure, self._options.family)
        return self._plain_site(structure, accumulate), family, exported(leaves, structure)


class Optimizer:
    """An optimizer in the worker. Its methods wait for what compiled programs have dispatched."""

    __slots__ = ("_number", "_remote", "_target")

    def __init__(self, remote: Remote, target: str, number: int) -> None:
        self._remote, self._target, self._number = remote, target, number

    def __repr__(self) -> str:
        return f"<gradwire.Optimizer {self._target} of {self._remote.handle.name}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise stays_here("optimizer", self, " Its values can be saved: optimizer.state_dict().")

    if not TYPE_CHECKING:  # which is to find misspelt names

        def __getattr__(self, name: str) -> Any:
            raise _no_attribute(
                self,
                name,
                "its options are in the worker, to be changed by set(lr=...) and read in state_dict()",
            )

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self.__slots__:
                getattr(self, name)
            super().__setattr__(name, value)

    def _change(self, verb: str, *args: Any) -> Any:
        return self._remote._change(verb, self._number, *args)

    def step(self, clip_norm: float | None = None, *, zero_grad: bool = False) -> float | None:
        """Apply the accumulated gradients, then advance the schedules. UsageError where no pullback has accumulated any.

        clip_norm: the most that the norm of all gradients together may be; they are scaled down to it. Returns what it
        was before; None without clip_norm. zero_grad: forget the gradients then, in the same message.
        """
        self._remote.warn_of_regularizers("step")
        norm = self._change("step", _clip_norm(clip_norm), bool(zero_grad))
        return None if norm is None else float(norm)

    def zero_grad(self) -> None:
        """Forget the accumulated gradients."""
        self._change("zero_grad")

    def set(self, **options: Any) -> None:
        """New values of its options, as in ``set(lr=1e-4)``, for all parameters."""
        self._change("set", options)

    def schedule(self, target: str, **kwargs: Any) -> None:
        """Have each step advance a schedule of the worker's framework, such as ``"torch.optim.lr_scheduler:StepLR"``.

        target: called with the kwargs, and in torch with the optimizer first; a function of the user's may combine
        several.
        """
        self._change("schedule", target, kwargs)

    def state_dict(self) -> Any:
        """Its moments, counts, options and schedules: a tree of tensors, copies, and scalars."""
        return self._change("optimizer_state")

    def load_state_dict(self, state: Any) -> None:
        """Go on from what `state_dict` gave, all or nothing. UsageError where it is of another optimizer or module."""
        self._change("load_optimizer_state", state)


def _no_attribute(proxy: Any, name: str, advice: str) -> AttributeError:
    kind = type(proxy).__name__
    return AttributeError(f"{kind!r} object has no attribute {name!r}: {advice}", name=name, obj=proxy)


def _clip_norm(norm: Any) -> float | None:
    if norm is None:
        return None
    try:
        if isinstance(norm, (bool, str)):
            raise ValueError
        return float(norm)
    except (TypeError, ValueError):
        raise UsageError(f"step(clip_norm={norm!r:.80}): the norm must be a positive number") from None


def _levels_to_the_user() -> int:
    """How far up the stack from the caller of this the first frame is that is none of gradwire's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "gradwire":
        frame, level = frame.f_back, level + 1
    return level


def stays_here(what: str, x: Any, instead: str = "") -> UsageError:
    """What copying and pickling a proxy raise: a copy would share the worker's state, silently or not at all."""
    return UsageError(
        f"{x!r} stands for something in a worker and cannot be copied or pickled.{instead} Keep one {what} and share it; "
        "another process makes its own with gradwire.connect(...)"
    )


def _names(names: str | Sequence[str] | None) -> list[str] | None:
    if names is None or isinstance(names, str):
        return None if names is None else [names]
    found = list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(name, str) for name in found):
        raise UsageError(
            f"names of parameters are texts, or beginnings of names, in a list, not {names!r:.80}"
        )
    return found


def _seconds(timeout: Any) -> float:
    try:
        return float(timeout)
    except OverflowError:
        raise UsageError(
            f"timeout={timeout!r:.40} is more seconds than can be waited; None waits for ever"
        ) from None


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "names" not in group:
        raise UsageError(
            'a group of parameters is a dict with their names and options, such as {"names": ["encoder"], "lr": 1e-4}, '
            f"not {group!r:.80}"
        )
    return {**group, "names": _names(group["names"])}


def _seed(x: Any) -> Any:
    """A seed that is a tensor: its number, or itself where a JAX program is being traced."""
    family = family_of(x)
    if family == "jax":
        return face_named("jax").seed(x)  # type: ignore[attr-defined]
    try:
        return operator.index(x.item() if hasattr(x, "item") else x)
    except Exception as error:
        raise UsageError(
            f"seed must be an integer, and of {family} one whose value is known: {error}. Under jit a seed may be "
            "traced in JAX programs only"
        ) from None


def _aval_of(x: Any) -> Aval:
    if not isinstance(x, ShapeDtype):
        aval: Aval = tensors_named(family_of(x)).aval(x)
        return aval
    name = x.dtype if isinstance(x.dtype, str) else np.dtype(x.dtype).name
    dtype = dtype_named(name)
    if dtype is None:
        raise UsageError(f"{x.dtype!r} is not a dtype that can be sent")
    return Aval(checked_shape(x.shape), dtype)


def _spec_result(tree: Any) -> SpecResult:
    structure, leaves = flatten(tree, lambda x: isinstance(x, ShapeDtype), "out_spec")
    return SpecResult(tuple(_aval_of(x) for x in leaves), structure)
