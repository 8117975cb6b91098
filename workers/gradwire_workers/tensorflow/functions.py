"""The target at one site, as functions of flat tensors: traced where that is possible, else eager."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from typing import Any, Callable, Hashable, Iterator, NamedTuple, Sequence

import numpy as np
import tensorflow as tf

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.errors import UsageError
from gradwire_wire.tensors import numpy as numpy_family
from gradwire_wire.tensors.tensorflow import adopt, aval, is_tensor, tf_dtype
from gradwire_workers.flat import Flat
from gradwire_workers.keras_layers import derived_anew
from gradwire_workers.program import Result, WorkerSite
from gradwire_workers.tensorflow.graphs import MakesVariables, Traced, variables_may_be_made
from gradwire_workers.tensorflow.modules import Module, built_outside, value_of
from gradwire_workers.tensorflow.randomness import seeded
from gradwire_workers.tensorflow.replays import NotReplayable
from gradwire_workers.tensorflow.residuals import Keeping, Replayed, Taped, taped
from gradwire_workers.tensorflow.words import outermost

__all__ = ["SiteFunction"]

MAX_TRACES = 256
# Parts of messages that say: this tensor has no value yet.
_ABOUT_TRACING = ("ymbolic", "'Tensor' object has no attribute", "raph execution", "AutoGraph", "tf.function")
# Parts of messages that say: this tensor is of another graph. The latter two are of TensorFlow before 2.12.
_KEPT = (
    "is out of scope",
    "defined in another function",
    "external symbolic tensor",
    'a "Graph" tensor',
)
_NOT_IN_GRAPH = getattr(tf.errors, "OperatorNotAllowedInGraphError", TypeError)
_MOVED = (
    "the module makes variables at its first call and assigns to them at every call; to tell its results' shapes it was called with zeros, "
    "which has moved its state. worker.restart(), and call it once before this (outside of compiled code), or make its variables in its "
    "factory"
)


def _call(target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return target(*args, **kwargs)


class Target:
    """The module in one mode. around: what calls it, with the way to do so in front of what the caller gave."""

    def __init__(self, module: Module, mode: bool | None, around: Callable[..., Any] | None = None) -> None:
        self._module, self._mode, self._around, self._call = module, mode, around, _call

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return (
            self._plain(*args, **kwargs)
            if self._around is None
            else self._around(self._plain, *args, **kwargs)
        )

    def _plain(self, /, *args: Any, **kwargs: Any) -> Any:
        layers = self._module.layers()
        with derived_anew(layers), built_outside(layers):
            return self._call(self._module.target, args, self._module.keywords(kwargs, self._mode))

    @contextmanager
    def with_control_flow(self) -> Iterator[None]:
        """Python's ``if`` and ``while`` over tensors become TensorFlow's; for good, if the body does not raise."""
        before = self._call
        self._call = tf.autograph.to_graph(_call)
        try:
            yield
        except BaseException:
            self._call = before
            raise


class Trace(NamedTuple):
    """A traced word and the structure of the target's result in it."""

    graph: Traced
    structure: bytes


class SiteFunction:
    """The target at one site and in one mode; ``owner`` is the program, for its trainable variables.

    around: see `Target`. seed: of the call that is made next, for a trace serves calls with any.
    """

    def __init__(
        self,
        owner: Any,
        module: Module,
        site: WorkerSite,
        mode: bool | None,
        around: Callable[..., Any] | None = None,
    ) -> None:
        self._owner, self._site, self._module = owner, site, module
        self.seed: int | None = None
        self._target = Target(module, mode, around)
        self._flat = Flat(self._target, site, is_tensor)
        self._eager = site.compile is False
        self._trace_failed = self._has_made_variables = False
        self._cache: OrderedDict[Hashable, Any] = OrderedDict()

    def _function(self, *operands: Any) -> list[Any]:
        return [_as_tensor(y) for y in self._flat(*operands)]

    # ---- Evaluation --------------------------------------------------------------------------------------------------

    def run(self, word: tuple[Any, ...], operands: Sequence[Any]) -> Result:
        with _explained():
            return self._run(word, operands)

    def _run(self, word: tuple[Any, ...], operands: Sequence[Any]) -> Result:
        if self._site.accumulate and word and word[-1][0] == "T":
            return self._run_accumulating(word, operands)
        trace = self._traced(word, operands)
        if trace is not None:
            return _result(word, trace.graph(operands), trace.structure)
        with self._eagerly():
            results = outermost(self._function, word)(*[tf.identity(x) for x in operands])
        return _result(word, results, self._flat.structure)

    def _run_accumulating(self, word: tuple[Any, ...], operands: Sequence[Any]) -> Result:
        at = len(operands) - word[-1][2]
        _, kept = self.keep(word[:-1], operands[:at])
        found, _ = kept.derive(word[-1], operands[at:], keep=False, accumulate=True)
        return Result(found)

    def keep(
        self, word: tuple[Any, ...], operands: Sequence[Any], *, rows: bool = False
    ) -> tuple[Result, Replayed | Taped]:
        with _explained():
            return self._keep(word, operands, rows)

    def _keep(
        self, word: tuple[Any, ...], operands: Sequence[Any], rows: bool
    ) -> tuple[Result, Replayed | Taped]:
        trace = self._traced(word, operands)
        keeping = None if trace is None else self._keeping(word, operands, trace.graph)
        if trace is not None and keeping is not None:
            results, replayed = keeping(operands)
            return _result(word, results, trace.structure), replayed
        function: Callable[..., list[Any]] = self._function
        if trace is not None and not word:
            graph = trace.graph
            function = lambda *operands: graph(operands)  # noqa: E731
        with self._eagerly():
            results, kept = taped(self._owner, function, word, operands, self._site.accumulate, rows)
        return _result(word, results, trace.structure if trace is not None else self._flat.structure), kept

    def spec(self, avals: Sequence[Aval]) -> tuple[list[Aval], bytes]:
        """See `Program.spec`. Weights that the target makes at its first call are made."""
        try:
            with _explained():
                trace = self._of(avals)
        except Exception as error:
            if isinstance(error, UsageError) or not any(text in str(error) for text in _ABOUT_TRACING):
                raise
            raise UsageError(
                f"the shapes of the results cannot be told without running the target: it looks at values "
                f"({type(error).__name__}: {error}). Say what it returns: remote.options(out_spec=...)"
            ) from error
        return [_result_aval(i, y) for i, y in enumerate(trace.graph.outputs)], trace.structure

    def has_rules(self, avals: Sequence[Aval]) -> bool:
        """See `Program.has_rules`."""
        found: bool = self._of(avals).graph.has_custom_gradients
        return found

    def _of(self, avals: Sequence[Aval]) -> Trace:
        specs = [tf.TensorSpec(a.shape, tf_dtype(a.dtype)) for a in avals]

        def make() -> Trace:
            try:
                return self._trace((), specs)
            except MakesVariables:
                self._run_at_zeros(specs)
                made = self._trace((), specs, may_make=True)
                if self._module.has_state and made.graph.assigns:
                    raise UsageError(_MOVED) from None
                return made

        trace: Trace = self._cached(((), _signature(specs)), make)
        return trace

    def _run_at_zeros(self, specs: Sequence[Any]) -> None:
        """A target that loads a model, or makes variables, at its first call has them from then on, with what it assigns to them."""
        had = self._module.named().values() if self._module.has_state else ()
        before = [(v, tf.identity(value_of(v))) for v in had]
        try:
            with seeded(self.seed, self._module):
                self._function(*[tf.zeros(s.shape, s.dtype) for s in specs])
        except Exception as error:
            raise UsageError(
                "the target makes variables at its first call (a model that is loaded when it is needed?), and so its results' shapes "
                f"cannot be told before; with zeros it raised {type(error).__name__}: {error}. Load the model when its file is imported, "
                "or call the function once before this"
            ) from error
        finally:
            for variable, value in before:
                variable.assign(value)

    # ---- Tracing -----------------------------------------------------------------------------------------------------

    def _traced(self, word: tuple[Any, ...], operands: Sequence[Any]) -> Trace | None:
        """None: it must be run eagerly."""
        if self._eager:
            return None
        if self._module.is_unbuilt and not self._has_made_variables:
            self._has_made_variables = True
            return None  # once, and as in one process: what its build() assigns is assigned
        try:
            trace: Trace = self._cached((word, _signature(operands)), lambda: self._trace(word, operands))
        except Exception as error:
            if isinstance(error, MakesVariables) and not self._has_made_variables:
                self._has_made_variables = True  # once: it has them then, unless it makes some at each call
                return None
            if self._site.compile:
                raise
            self._trace_failed = True  # `_eagerly` decides whether the target or the tracing is to blame
            return None
        if self.seed is None or trace.graph.is_pure:
            return trace
        if self._site.compile:
            raise UsageError(
                "a traced function draws its random numbers inside TensorFlow, where options(seed=...) cannot "
                "reach them; leave compile=True out"
            )
        return None

    def _trace(self, word: tuple[Any, ...], specs: Sequence[Any], may_make: bool = False) -> Trace:
        """may_make: that the target makes variables is no matter. Keras may: stopped in the middle, it would leave a layer half built."""
        may_make = may_make or self._module.is_keras
        try:
            graph = Traced(outermost(self._function, word), specs, may_make=may_make)
        except _NOT_IN_GRAPH:
            with self._target.with_control_flow():
                graph = Traced(outermost(self._function, word), specs, may_make=may_make)
        return Trace(graph, self._flat.structure)

    def _keeping(self, word: tuple[Any, ...], operands: Sequence[Any], forward: Traced) -> Keeping | None:
        """None: a tape must be kept."""

        def make() -> Keeping | None:
            try:
                return Keeping(self._owner, self._function, word, forward, operands, self._site.accumulate)
            except NotReplayable:
                return None

        return self._cached(("keep", word, _signature(operands)), make)

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        made = self._cache[key] = make()
        if len(self._cache) > MAX_TRACES:
            self._cache.popitem(last=False)
        return made

    @contextmanager
    def _eagerly(self) -> Iterator[None]:
        """What succeeds here and could not be traced is not traced again."""
        failed, self._trace_failed = self._trace_failed, False
        with seeded(self.seed, self._module), variables_may_be_made(self._module.is_keras):
            yield
        self._eager = self._eager or failed


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        if not any(text in str(error) for text in _KEPT):
            raise
        raise UsageError(
            "the target keeps a tensor that it made in one call for those after it (a table that is computed at the first?), and that call "
            "was traced, or its shapes were asked for: the tensor was a part of that graph. worker.restart(), and make the tensor when the "
            "file is imported, or as a numpy array; or use options(compile=False), with out_spec=... in compiled programs, from the first "
            f"call on ({str(error).strip().partition(chr(10))[0]})"
        ) from error


def _signature(tensors: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        (*x.shape, x.dtype) for x in tensors
    )  # (a TensorShape cannot be hashed before TensorFlow 2.9)


def _result(word: tuple[Any, ...], tensors: Sequence[Any], structure: bytes) -> Result:
    return Result(tensors, b"" if word else structure)


def _as_tensor(y: Any) -> Any:
    if isinstance(y, tf.Tensor):
        return y
    if not isinstance(y, np.ndarray):
        aval(y)  # refuses what is not plain, by name
        return tf.convert_to_tensor(y)
    carrier = numpy_family.export(y)
    if not tf.executing_eagerly():  # a trace must not follow what becomes of the target's array
        carrier = Carrier(carrier.array.copy(), carrier.dtype)
    return adopt(carrier)


def _result_aval(number: int, y: Any) -> Aval:
    if not y.shape.is_fully_defined():
        raise UsageError(
            f"the shape of result {number} depends on values: {y.shape}. Say what it is: "
            "remote.options(out_spec=...)"
        )
    return aval(y)
