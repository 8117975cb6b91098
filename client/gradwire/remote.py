"""A remote function or module as an ordinary function of its caller: what users hold.

The whole idea on one screen: flatten the arguments, see which family they are of, and let that
family's face make the call a node of its own autodiff. All ways lead to `Handle.invoke`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gradwire import hints, pullback
from gradwire.answers import checked_state
from gradwire.background import Background
from gradwire.exits import end_daemon
from gradwire.families import (
    barrier,
    compiling_face,
    exported,
    face_named,
    family_of,
    family_of_call,
    is_leaf,
    is_tracing,
    naming,
    tensors_named,
    untraced,
    watching_face,
)
from gradwire.handle import Handle
from gradwire.notes import face_call
from gradwire.optimizer import Optimizer
from gradwire.options import Options
from gradwire.orders import checked_target
from gradwire.proxies import no_attribute, stays_here
from gradwire.pullback import Pullback
from gradwire.regularizers import warn_of_regularizers
from gradwire.selection import checked_groups, checked_names, checked_options
from gradwire.site import Outcome, Site
from gradwire.specs import ShapeDtype, avals_of, is_described, spec_result
from gradwire.submitting import submit
from gradwire_wire.carriers import Carrier
from gradwire_wire.errors import ClosedError, DtypeError, UnsupportedTensorError, UsageError
from gradwire_wire.messages import WHOLE_VERBS
from gradwire_wire.structures import fill, flatten, positional

__all__ = ["Remote"]

MAX_SITES = 1024
_ACTING = WHOLE_VERBS | {"save"}
"""Verbs that are asked for what they do, and not for what they give."""
_PLAIN = frozenset((int, bool, str, type(None)))
"""Types of which equal values are the same one. (Not float: 0.0 == -0.0.)"""


class Remote:
    """Call it like the function it stands for: tensors of one framework in, tensors of that framework out."""

    # Without a dictionary: `remote.timeout = 5` would be taken, and do nothing.
    __slots__ = ("__weakref__", "_background", "_caches", "_options", "_routes", "_sites", "handle")

    def __init__(self, handle: Handle, background: Background, options: Options | None = None) -> None:
        self.handle, self._caches = handle, handle.share_caches()
        self._background = background
        self._options = options or Options()
        self._sites: dict[tuple[bytes, bool, bool | None], Site] = {}
        self._routes: dict[tuple[Any, ...], tuple[str, Site]] = {}

    def __repr__(self) -> str:
        state = " closed" if self._background.is_closed else " dead" if self.handle.is_dead else ""
        return f"<gradwire.Remote {self.handle.name}{state}>"

    def __copy__(self) -> Remote:
        """Itself, where it is a function, as with Python's own: who copies a model or a pipeline copies what holds it."""
        if self.handle.is_module:
            raise stays_here(
                "remote",
                self,
                " A function that calls it can be copied, and the copies share the module: lambda x: net(x).",
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Remote:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise stays_here("remote", self)

    if not TYPE_CHECKING:  # which is to find misspelt names

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(
                self,
                name,
                "only a call reaches what is in the worker. For another method of it give worker.module() a factory whose "
                "result does that when it is called; weights are in state_dict(). gw.torch.Module(remote), gw.keras.Layer(remote) and "
                "gw.jax.functional(remote) make a module of your own framework of it",
            )

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The call. Blocks until the worker answers, dies, or ``options(timeout=...)`` passes.

        Results belong to the caller and are writable; they stay valid whatever happens to the worker.
        Raises RemoteError (also as the builtin type) for what the remote code raises.
        """
        compiling = compiling_face()
        if compiling is not None:
            return compiling.traced(self, args, kwargs)
        watching = watching_face()
        if watching is not None:
            return watching.undisturbed(self, args, kwargs)
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
        site = self._plain_site(structure, self.handle.accumulates and face_named(family).ACCUMULATES)
        if not kwargs and not site.seeded and all(map(family_of, args)):
            self._note_route(family, site, args)
        return family, site, leaves

    def _along(self, family: str, site: Site, operands: list[Any]) -> Any:
        try:
            if self.handle.link.recorder is None:
                return face_named(family).call(self.handle, site, operands)
            with face_call():
                return face_named(family).call(self.handle, site, operands)
        except (UnsupportedTensorError, DtypeError) as error:
            refused = naming(error, operands[site.seeded :], site.structure)
        except ClosedError:
            end_daemon()
            raise
        raise refused

    def _note_route(self, family: str, site: Site, args: tuple[Any, ...]) -> None:
        """Positional tensors of these types, in this mode, go this way: it depends on nothing else."""
        if len(self._routes) >= MAX_SITES:
            self._routes.clear()
        self._routes[site.training, *map(type, args)] = (family, site)

    @property
    def __name__(self) -> str:
        """The target's own name, for what names things after functions (`jax.named_call`, profilers)."""
        return self.handle.name.rpartition(":")[2]

    autograph_info__ = None  # TensorFlow's AutoGraph calls what says so as it is, instead of rewriting it

    def described(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Handle, Site]:
        """For a compiler that traces the call: what is called, and everything fixed about the call."""
        structure, _ = self._flatten(tuple(args), kwargs)
        return self.handle, self._plain_site(structure, self.handle.accumulates)

    @untraced
    def vjp(self, /, *args: Any, **kwargs: Any) -> tuple[Any, Pullback]:
        """Results and pullback, for any caller (see `Pullback`).

        If this is a module, each pullback adds to the gradients of its parameters, which stay in the worker (see `grads`), as
        ``backward()`` does.
        """
        site, family, carriers = self._exported(args, kwargs, accumulate=self.handle.accumulates)
        return pullback.vjp(self.handle, site, family, carriers)

    @untraced
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

    @untraced
    def spec(self, /, *args: Any, **kwargs: Any) -> Any:
        """The result tree with a `ShapeDtype` in place of each tensor; user code does not run for real.

        Arguments may be tensors, also those without values (on torch's device meta), or whatever has a shape and a dtype: `ShapeDtype`,
        jax.ShapeDtypeStruct, tf.TensorSpec. UsageError where the shape depends on values.
        """
        structure, leaves = flatten([list(args), kwargs], is_described)
        result = self.handle.spec(self._site(structure, seeded=False), avals_of(leaves, structure))
        return fill(result.structure, [ShapeDtype(a.shape, a.dtype.name) for a in result.avals])

    @untraced
    def submit(self, /, *args: Any, **kwargs: Any) -> hints.Future[Any]:
        """Make the call without waiting for its answer; tensors must not be written until it is done.

        Calls from numpy, and from torch if no gradient is recorded, are made in the order of their submission. Many of them are
        under way at once: up to 128 calls, or 16 MiB of arguments, and `submit` waits while there are more (but never in a thread
        that runs an event loop). ``train``, ``step`` and the like wait until these calls are done.

        All other calls, and all calls by tcp or with ``retry``, are made by eight threads, in any order.
        ``train``, ``step`` and the like do not wait for these, so wait for their futures yourself.

        An argument may be the future of another ``submit``, also inside lists, tuples and dicts. The call is made when that
        result is there, and fails if that call fails. torch's ``no_grad``, ``enable_grad`` and ``inference_mode`` hold as they are
        when ``submit`` is called. A ``tf.GradientTape`` or a tracer of JAX records only its own thread. Cancelling the future does
        not interrupt a call that has begun; ``options(timeout=...)`` does.
        """
        return submit(self, args, kwargs, may_wait=True)

    async def aio(self, /, *args: Any, **kwargs: Any) -> Any:
        """``await remote.aio(x)``: the event loop goes on meanwhile."""
        import asyncio  # here, for it takes longer than all of ours

        try:
            return await asyncio.wrap_future(submit(self, args, kwargs, may_wait=False))
        except ClosedError:
            end_daemon()
            raise

    def options(self, **changes: Any) -> Remote:
        """A new proxy of the same remote thing.

        timeout: seconds a call may take; DeadlineError after that.
        seed: an integer that makes calls reproducible (in JAX programs also a traced one, or a PRNG key).
        residuals: "keep" the forward's graph in the worker for the pullback, or "recompute" the forward then.
        compile: whether a JAX or TensorFlow worker traces the target: "auto" (if it can be traced), True, False.
        vmap: "batch" (one message for all rows), or "sequential" (a call for each row, for functions that must not see a batch).
        out_spec: the result as a tree of `ShapeDtype` or the like (see `spec`), where a compiled program cannot find it out.
        family: the framework of the result, where no argument tells it: "numpy", "torch", "jax" or "tensorflow".
        retry: whether a call whose worker died is made once more in the new process. For functions that may run twice, in a
        worker that was made with ``restart=``.

        An option that is not given stays as it was. UsageError for an option that there is not, or a value that it cannot have.
        """
        changed = self._options.changed(changes)
        if changes.get("retry"):
            self._check_retry()
        return Remote(self.handle, self._background, changed)

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
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise UsageError(
                f"a state is a dict of tensors by name, as state_dict() gives it, not {state!r:.80}"
            )
        self._change("load_state_dict", dict(state), strict=bool(strict))

    def save(self, path: str | os.PathLike[str]) -> None:
        """The worker writes all of the state to a safetensors file, completely or not at all; nothing is sent to this program.

        A relative path is in this program's working directory. UsageError if its folder is missing.
        """
        self._change("save", os.path.abspath(path))

    def load(self, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Replace the state by that of a safetensors file, all or nothing, as `load_state_dict` does.

        Anybody may have written the file, which has names and tensors and nothing of gradwire's own. A tied parameter may be in it
        under any one of its names.
        """
        self._change("load", os.path.abspath(path), strict=bool(strict))

    def grads(self) -> dict[str, Any]:
        """Gradients accumulated in the worker by parameter name; None where there are none."""
        warn_of_regularizers(self, "grads")
        return dict(self._change("grads"))

    def requires_grad_(self, flag: bool = True, names: str | Sequence[str] | None = None) -> Remote:
        """Whether parameters learn from now on. A frozen one gets no gradient, loses the one it has, and no optimizer moves it.

        names: of parameters, beginnings of names ("encoder" means "encoder.weight" and so on), or patterns with ``*``; None
        means all parameters. UsageError for a name that no parameter has.
        """
        if not isinstance(flag, (bool, np.bool_)):
            raise UsageError(f"requires_grad_() takes True or False, and then the names, not {flag!r:.80}")
        self._change("requires_grad", bool(flag), checked_names(names))
        return self

    def optimizer(
        self, target: str, parameters: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> Optimizer:
        """An optimizer of the worker's framework over this module's parameters, such as ``"torch.optim:Adam"``.

        kwargs: the optimizer's options. They are sent, so none can be a function: let the target be a function of yours that makes it.
        parameters: groups with options of their own, ``[{"names": ["encoder"], "lr": 1e-4}, ...]``, with names as in
        `requires_grad_`. Parameters that are in no group are not moved.
        """
        groups = checked_groups(parameters)
        settings = {} if groups is None else {"groups": groups}
        warn_of_regularizers(self)
        number = self._change("optimizer", checked_target(target), checked_options(kwargs), **settings)
        return Optimizer(self, target, number)

    def _check_that_it_happens(self, verb: str) -> None:
        """UsageError where a program is traced: it would be done now, once, and never when that runs."""
        if is_tracing():
            raise UsageError(
                f"{verb} of {self.handle.name} inside a function that is being traced (jax.jit, lax.scan, tf.function, model.fit) would be "
                "done once, now, and not when the compiled program runs. Make it outside, behind the compiled step; a Keras model trains with "
                "run_eagerly=True"
            )

    def _drain(self) -> None:
        """Or what is asked next would overtake what a compiled program has dispatched, and what was submitted."""
        barrier()
        self._background.anteroom.drain()
        self.handle.drain()

    @untraced
    def _change(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        if verb in _ACTING:
            self._check_that_it_happens(verb)
        self._drain()
        if not kwargs and _PLAIN.issuperset(map(type, args)):
            structure, given = _structure_of(*args), []
        else:
            structure, leaves = self._flatten(args, kwargs)
            given = exported(leaves, structure)
        tree, carriers = self.handle.change_state(verb, structure, given, self._options.timeout)
        adopt = tensors_named(self._options.family or "numpy").adopt
        return checked_state(verb, Outcome(carriers, tree, 0).tree(adopt))

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
            "stateful": bool(handle.training) or handle.moves_in_evaluation,
            "seed": None if options.is_seed_traced else options.seed,
            "seeded": options.is_seed_traced,
            "compile": None if options.compile == "auto" else bool(options.compile),
            "timeout_s": options.timeout,
            "residuals": options.residuals,
            "vmap": options.vmap,
            "retry": options.retry,
            "out_spec": None if options.out_spec is None else spec_result(options.out_spec),
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
        structure, leaves, family = self._read(args, kwargs)
        return self._plain_site(structure, accumulate), family, exported(leaves, structure)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, list[Any], str]:
        """The arguments of what is done here and now: their tree, its tensors, and whose these are."""
        if self._options.is_seed_traced:
            raise UsageError(
                "vjp(), jvp() and minimize() take a seed that is a number; a traced one goes with a plain call under jit"
            )
        structure, leaves = self._flatten(args, kwargs)
        return structure, leaves, family_of_call(leaves, structure, self._options.family)


@lru_cache(maxsize=1024, typed=True)
def _structure_of(*args: Any) -> bytes:
    """The structure of a call with these arguments, of `_PLAIN` types: of what is asked again and again."""
    return flatten([list(args), {}], is_leaf)[0]
