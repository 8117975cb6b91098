"""The pure program of a module: what it takes beside the caller's operands is hidden from words and plans.

`Core` is a `Program` whose functions close over the values of a `Moment` and say what they move.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Dict, Iterator, Sequence, Tuple

import jax
import numpy as np
from jax.interpreters import partial_eval

from gradwire_wire.errors import UsageError
from gradwire_wire.tensors import jax as tensors
from gradwire_workers.jax import jaxprs
from gradwire_workers.jax.calls import Arguments, Call
from gradwire_workers.jax.flats import JaxFlat
from gradwire_workers.jax.functions import (
    Signature,
    Traced,
    as_array,
    has_rules,
    seeded,
    used_operands,
)
from gradwire_workers.jax.models import Model
from gradwire_workers.jax.programs import Program, innermost
from gradwire_workers.jax.store import Moment, Store
from gradwire_workers.program import Result, WorkerSite

__all__ = ["Core", "Form", "InLayer", "Replay", "with_buffers", "with_parameters", "without"]

Form = Callable[[Model, Call], Tuple[Any, Dict[str, Any]]]
"""How a caller's call becomes the model's: gives the result, and the buffers as the call leaves them."""


def without(model: Model, call: Call) -> tuple[Any, dict[str, Any]]:
    """``(*args)``: all state is the worker's."""
    return model.apply(call)


def with_parameters(model: Model, call: Call) -> tuple[Any, dict[str, Any]]:
    """``(parameters, *args)``."""
    given, *rest = call.arguments.args
    _check_names(given, model.parameters, "parameter")
    return model.apply(_at(call, given, rest))


def with_buffers(model: Model, call: Call) -> tuple[Any, dict[str, Any]]:
    """``(parameters, buffers, *args) -> (result, buffers)``: nothing moves in the worker."""
    given, buffers, *rest = call.arguments.args
    _check_names(given, model.parameters, "parameter")
    _check_names(buffers, model.buffers, "buffer")
    result, after = model.apply(_at(call, {**given, **buffers}, rest))
    moved = _moving(model, call.training, after)
    return (result, {name: moved.get(name, x) for name, x in buffers.items()}), {}


def _at(call: Call, arrays: dict[str, Any], args: Sequence[Any]) -> Call:
    """The call with these arrays in place of the worker's, and these arguments."""
    return call._replace(arrays={**call.arrays, **arrays}, arguments=Arguments(args, call.arguments.kwargs))


def _moving(model: Model, training: Any, after: dict[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in after.items() if n in model.moving_in_evaluation} if training is False else after


class InLayer:
    """A form whose result is ``(result, losses, masks)``: see `gradwire_workers.program.Program.functional`."""

    def __init__(self, form: Form, trainable: bool) -> None:
        self._form, self._trainable = form, trainable

    def __call__(self, model: Model, call: Call) -> tuple[Any, dict[str, Any]]:
        return self._form(_Collecting(model, self._trainable), call)


class _Collecting(Model):
    """A model that gives losses and masks along with its result: those of Keras have some."""

    def __init__(self, model: Model, trainable: bool) -> None:
        self._model, self._trainable = model, trainable
        self.name, self.parameters, self.buffers = model.name, model.parameters, model.buffers
        self.training, self.is_pure, self.moving_in_evaluation = (
            model.training,
            model.is_pure,
            model.moving_in_evaluation,
        )

    def apply(self, call: Call) -> tuple[Any, dict[str, Any]]:
        return self._model.apply_in_layer(call, self._trainable)


def _check_names(given: Any, there: dict[str, Any], what: str) -> None:
    unknown = [name for name in given if name not in there]
    if unknown:
        raise UsageError(f"the module has no {what} {unknown[0]!r}; it has {', '.join(map(repr, there))}")


class Core(Program):
    """Plans over the values of the moment set by `at`; nothing but `settle` changes anything.

    lifted: parameters that are operands at a site that accumulates.
    """

    def __init__(self, store: Store, form: Form, lifted: Sequence[str]) -> None:
        super().__init__(form, is_module=True)
        self.store, self.form, self.lifted = store, form, list(lifted)
        self.moment = store.moment(0)
        self._moves = False

    @contextmanager
    def at(self, moment: Moment, moves: bool) -> Iterator[None]:
        """Calls see this moment; ``moves``: and what they move is kept."""
        before = self.moment, self._moves
        self.moment, self._moves = moment, moves
        try:
            yield
        finally:
            self.moment, self._moves = before

    def settle(self, names: Sequence[str], values: Sequence[Any]) -> None:
        if self._moves and names:
            self.store.move_buffers(names, values)

    def again(self) -> Replay:
        return Replay(self, self.moment)

    def _new_trace(self, site: WorkerSite, signature: Signature) -> Traced:
        return TracedModule(self, site, signature)

    def _new_eager(self, site: WorkerSite) -> Any:
        return EagerModule(self, site)

    def _new_runner(self, site: WorkerSite, word: Any, signature: Signature) -> Callable[..., Result]:
        self._refuse_batch(site, word, signature)
        return super()._new_runner(site, word, signature)

    def _new_keeper(self, site: WorkerSite, word: Any, rows: Any, signature: Signature) -> Callable[..., Any]:
        self._refuse_batch(site, word, signature)
        return super()._new_keeper(site, word, rows, signature)

    def _refuse_batch(self, site: WorkerSite, word: Any, signature: Signature) -> None:
        is_batch = bool(word) and all(op[0] == "V" for op in word)
        if is_batch and self._function(site, innermost(word, signature)).moves:
            raise UsageError(
                "a batched call of a module in training mode would move its state by a whole batch at once: use "
                "options(vmap='sequential'), or give it the batch as its own argument"
            )


class Replay:
    """The program as it was when a forward was kept, for what is computed from its operands afresh."""

    def __init__(self, core: Core, moment: Moment) -> None:
        self._core, self._moment = core, moment

    @property
    def lifted(self) -> tuple[list[str], list[Any]]:
        """The parameters that pullbacks accumulate for, and their values then."""
        return self._core.lifted, [self._moment.parameters[name] for name in self._core.lifted]

    def run(self, *call: Any) -> Any:
        with self._core.at(self._moment, moves=False):
            return self._core.run(*call)

    def keep(self, *call: Any) -> Any:
        with self._core.at(self._moment, moves=False):
            return self._core.keep(*call)


class FlatModel:
    """The model as a flat function of its whole state: lifted parameters and operands, and everything else.

    Results come first, then all buffers as the call leaves them.
    """

    def __init__(self, core: Core, site: WorkerSite) -> None:
        store = core.store
        self._core, self._site = core, site
        self.lifted = core.lifted if site.accumulate else []
        self.closed = [name for name in store.parameters if name not in self.lifted]
        self.buffers = list(store.buffers)
        self.structure = b""
        self.results = 0

    def hidden(self, moment: Moment) -> list[Any]:
        """What it is called with before lifted parameters and operands."""
        values = {**moment.parameters, **moment.buffers}
        return [*(values[name] for name in (*self.closed, *self.buffers)), moment.key]

    def __call__(self, hidden: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, ...]:
        arrays = dict(zip((*self.closed, *self.buffers), hidden))
        before = {name: arrays[name] for name in self.buffers}
        arrays.update(zip(self.lifted, operands))
        key = jax.random.wrap_key_data(hidden[-1], impl="threefry2x32")
        moved: dict[str, Any] = {}

        def target(*args: Any, **kwargs: Any) -> Any:
            core, training = self._core, self._site.training
            result, after = core.form(core.store.model, Call(training, arrays, key, Arguments(args, kwargs)))
            moved.update(_moving(core.store.model, training, after))
            return result

        flat = JaxFlat(target, self._site)
        results = tuple(map(as_array, flat(*operands[len(self.lifted) :])))
        self.structure, self.results = flat.structure, len(results)
        return (*results, *(_moved(moved, name, x, self._core) for name, x in before.items()))


def _moved(moved: dict[str, Any], name: str, before: Any, core: Core) -> Any:
    """A dtype may widen, as statistics that begin in float32 do."""
    after = moved.get(name, before)
    if after.shape != before.shape:
        raise UsageError(
            f"{core.store.model.name} makes its state {name} of shape {after.shape}, and it was {before.shape}: state keeps "
            "its shape"
        )
    return after


class TracedModule(Traced):
    """See `Traced`. Hidden values that the call does not use are not handed to it; buffers it leaves alone do not come out."""

    def __init__(self, core: Core, site: WorkerSite, signature: Signature) -> None:
        self._core, self._flat = core, FlatModel(core, site)
        hidden = self._flat.hidden(core.moment)
        operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in signature]
        is_checked = site.compile is not True and not core.store.model.is_pure
        with jax.checking_leaks() if is_checked else nullcontext():
            closed = jax.make_jaxpr(self._split_at(len(hidden)))(*hidden, *operands)
        self.lifted, self.structure = len(self._flat.lifted), self._flat.structure
        self._results = self._flat.results
        self.avals = [tensors.aval(a) for a in closed.out_avals[: self._results]]
        self.has_effects = bool(closed.jaxpr.effects)
        self.has_rules = has_rules(closed.jaxpr)
        self._own = [c if isinstance(c, jax.Array) else jax.device_put(np.asarray(c)) for c in closed.consts]
        self._prune(closed, len(hidden))

    def _split_at(self, hidden: int) -> Callable[..., Any]:
        return lambda *values: self._flat(values[:hidden], values[hidden:])

    def _prune(self, closed: Any, hidden: int) -> None:
        jaxpr, count = closed.jaxpr, self._results
        first = len(self._flat.closed)
        came = jaxpr.invars[first : first + len(self._flat.buffers)]
        stays = [after is before for after, before in zip(jaxpr.outvars[count:], came)]
        self._moved = [name for name, same in zip(self._flat.buffers, stays) if not same]
        self.moves = len(self._moved)
        wanted = [True] * count + [not same for same in stays]
        operands = len(jaxpr.invars) - hidden
        self._jaxpr, used = partial_eval.dce_jaxpr(jaxpr, wanted, [False] * hidden + [True] * operands)
        names = [*self._flat.closed, *self._flat.buffers]
        self._taken = [name for name, is_used in zip(names, used) if is_used]
        self._takes_key = used[len(names)]
        self.used = used_operands(closed, count)[hidden:]

    @property
    def consts(self) -> list[Any]:  # type: ignore[override]
        """Of the moment."""
        parameters, buffers, _, key = self._core.moment
        values = [parameters[n] if n in parameters else buffers[n] for n in self._taken]
        return [*self._own, *values, key] if self._takes_key else [*self._own, *values]

    def call(self, consts: Sequence[Any], *operands: Any) -> tuple[Any, ...]:
        return self.forward(consts, *operands)[: self._results]

    def forward(self, consts: Sequence[Any], *operands: Any) -> tuple[Any, ...]:
        own = len(self._own)
        return jaxprs.run(self._jaxpr, consts[:own], [*consts[own:], *operands])

    def settled(self, results: Sequence[Any]) -> Sequence[Any]:
        self._core.settle(self._moved, results[self._results :])
        return results[: self._results]


class EagerModule:
    """See `Eager`: the model's Python at every call, on real arrays."""

    def __init__(self, core: Core, site: WorkerSite) -> None:
        self._core, self._flat = core, FlatModel(core, site)
        self.lifted = len(self._flat.lifted)
        self.moves = len(self._flat.buffers) if site.training or core.store.model.moving_in_evaluation else 0

    @property
    def structure(self) -> bytes:
        return self._flat.structure

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        return self._evaluated(operands)[: self._flat.results]

    def forward(self, *operands: Any) -> tuple[Any, ...]:
        return self._evaluated(operands)[: self._flat.results + self.moves]

    def _evaluated(self, operands: Sequence[Any]) -> tuple[Any, ...]:
        moment = self._core.moment
        arrays = [jax.device_put(x) if isinstance(x, np.ndarray) else x for x in operands]
        with seeded(moment.seed):
            return self._flat(self._flat.hidden(moment), arrays)

    def settled(self, results: Sequence[Any]) -> Sequence[Any]:
        if self.moves:
            self._core.settle(self._flat.buffers, results[self._flat.results :])
        return results[: self._flat.results]
