"""A remote call as an operation of TensorFlow's tapes and graphs, to any order.

`apply` evaluates a derived function and says how to differentiate it: its pullback is its word with
('T', wrt, n) at the end, at the token of its own evaluation. Two ways::

    eager    the worker is asked at once. The token belongs to the tape's record and is given back with it
    graph    (in a tf.function) the worker is asked by a numpy_function when the graph runs. The token is a
             tensor of the graph; what was kept under it is dropped by the worker when it runs short of memory
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import tensorflow as tf

from gradwire.derived import Derived
from gradwire.static_shapes import StaticAval, static_results
from gradwire.tensorflow.graphs import hold, with_rule
from gradwire.tensorflow.tapes import has_tangents, is_forward_mode, is_in_rows, is_inner, is_recorded
from gradwire_wire.dtypes import dtype_named
from gradwire_wire.errors import UnsupportedTensorError, UsageError
from gradwire_wire.tensors import numpy as numpy_tensors
from gradwire_wire.tensors.tensorflow import adopt, export
from gradwire_wire.words import pullback_op

__all__ = ["apply"]

# All that a user who compiles by XLA gets to see of this operation is its name.
OPERATION = "gradwire_calls_another_process__use_jit_compile_False"


_SECOND_ORDER = "A tf.autodiff.ForwardAccumulator asks for the pullback of a pullback, where remote.jvp needs a first derivative only"


class _Token:
    """A kept forward; given back when the tape's record of it goes."""

    __slots__ = ("handle", "number")

    def __init__(self, handle: Any, number: int) -> None:
        self.handle, self.number = handle, number

    def __del__(self) -> None:
        if self.number:
            self.handle.release(self.number)


def apply(fn: Derived, operands: Sequence[Any], token: Any = None) -> list[Any]:
    """The results of ``fn`` at the operands, recorded by the tapes that watch them.

    Results of an eager pullback may be None. ``token``: a `_Token`, a token tensor of a graph, or None.
    """
    return (_eager if tf.executing_eagerly() else _graph)(fn, list(operands), token)


def _inexact(x: Any) -> bool:
    return x.dtype.is_floating or x.dtype.is_complex


# ---- Eager ----------------------------------------------------------------------------------------------------------


def _eager(fn: Derived, operands: list[Any], token: _Token | None) -> list[Any]:
    everything = is_forward_mode()
    watched = {i for i, x in enumerate(operands) if _inexact(x) and (everything or is_recorded([x]))}
    fn.keep = int(bool(watched) and fn.site.residuals == "keep")
    try:
        outcome = fn.invoke([export(x) for x in operands], token.number if token is not None else 0)
    except UsageError as error:
        if everything and len(fn.word) > 1:
            raise UsageError(f"{error}. {_SECOND_ORDER}") from None
        raise
    results = outcome.adopted(adopt)
    present = [i for i, y in enumerate(results) if y is not None]
    if not watched or not present:
        return results
    kept = _Token(fn.handle, outcome.token)

    @tf.custom_gradient
    def node(*xs: Any) -> Any:
        def grad(*cotangents: Any) -> list[Any]:
            given = dict(zip(present, cotangents, strict=True))
            return _pullback(fn, xs, kept, watched, results, given)

        return [results[i] for i in present], grad

    recorded = iter(node(*operands))
    return [None if y is None else next(recorded) for y in results]


# ---- Graph ----------------------------------------------------------------------------------------------------------


def _graph(fn: Derived, operands: list[Any], token: Any) -> list[Any]:
    if has_tangents(operands):
        raise UsageError(
            f"{fn.handle.name}: a tf.autodiff.ForwardAccumulator cannot pass through a remote call inside a "
            "tf.function (TensorFlow would take its tangent for zero). Call it outside of the tf.function, "
            "or use remote.jvp"
        )
    in_rows = is_in_rows()
    if in_rows and fn.site.stateful and not fn.word:
        raise _row_too_many(fn, "its call, which moves state,")
    avals, fn.structure = static_results(fn, [_static_aval(x) for x in operands])
    # Tensors of this graph: a second derivative, traced in a third one, could not reach those of the first.
    operands = [tf.identity(x) for x in operands]
    token = tf.identity(token) if tf.is_tensor(token) else token

    results, kept, call = _operation(fn, operands, token, avals)
    entry = call.entry

    def rule(*cotangents: Any) -> list[Any]:
        if in_rows and fn.site.anchored and fn.site.accumulate and is_in_rows():
            raise _row_too_many(fn, "its gradient, which adds to those in the worker,")
        return _graph_pullback(fn, entry, operands, kept, results, cotangents)

    found, call.rule = with_rule(results, operands, rule, fn.handle)
    return found


def _graph_pullback(
    fn: Derived,
    entry: _Entry,
    operands: Sequence[Any],
    kept: Any,
    results: Sequence[Any],
    cotangents: Sequence[Any],
) -> list[Any]:
    entry.fn.keep = int(fn.site.residuals == "keep")  # in time: gradients are traced before the graph runs
    return _pullback(fn, operands, kept, set(range(len(operands))), results, dict(enumerate(cotangents)))


def _static_aval(x: Any) -> StaticAval:
    dtype = dtype_named(x.dtype.name)
    if dtype is None:
        raise UnsupportedTensorError(
            f"a TensorFlow tensor of dtype {x.dtype.name} cannot be sent: convert it"
        )
    return StaticAval(None if x.shape.rank is None else tuple(x.shape), dtype)


def _operation(
    fn: Derived, operands: Sequence[Any], token: Any, avals: Sequence[StaticAval]
) -> tuple[list[Any], Any, _Call]:
    """Results and token of one evaluation as symbolic tensors, and what the graph has for it."""
    held = token if isinstance(token, _Token) else None
    named = token if tf.is_tensor(token) else tf.constant(held.number if held else 0, tf.int64)
    dtypes = [tf.as_dtype(a.dtype.name) for a in avals]
    entry = _Entry(next(_marks), fn, avals)
    call = _Call(fn, avals, entry, held)
    hold(call)
    inputs = [tf.constant(entry.mark, tf.int64), named, *operands]
    with tf.compat.v1.get_default_graph().gradient_override_map({"PyFunc": GRADIENT}):
        *results, kept = tf.numpy_function(entry, inputs, [*dtypes, tf.int64], name=OPERATION)
    _calls[kept.op.get_attr("token")] = call
    call.set_shapes(results)
    kept.set_shape(())
    return results, kept, call


_marks = itertools.count(secrets.randbits(62))


class _Call:
    """What a graph holds of one operation: the function it derives, what its results were traced as, what TensorFlow calls for it.

    held: an eager token in the graph, which is alive as long as that. rule: of the node around it, for which it is there as well.
    """

    rule: object = None

    def __init__(self, fn: Derived, avals: Sequence[StaticAval], entry: _Entry, held: _Token | None) -> None:
        self.fn, self.avals, self.entry, self.held = fn, avals, entry, held

    def set_shapes(self, tensors: Sequence[Any]) -> None:
        """Of results, or of cotangents of them, some of which may be None."""
        for x, a in zip(tensors, self.avals, strict=True):
            if isinstance(x, tf.Tensor):  # (no IndexedSlices)
                x.set_shape(a.shape)


class _Entry:
    """What TensorFlow calls when the graph runs, in a thread of its own, and keeps for ever; so the remote's handle is not held.

    It numbers these by process, so that a graph that was saved would call another. One that is loaded in the process that saved
    it calls this one, whether or not the graph it was saved from is still there.
    """

    def __init__(self, mark: int, fn: Derived, avals: Sequence[StaticAval]) -> None:
        self.mark, self._handle, self._avals = mark, weakref.ref(fn.handle), avals
        nobody: Any = None
        self.fn = replace(fn, handle=nobody)

    def __call__(self, given: Any, token: Any, *arrays: np.ndarray) -> list[Any]:
        if int(given) != self.mark:
            raise UsageError(
                "this graph with a remote call was saved in another process, whose remote functions are not here. "
                "Save the weights instead, and build the graph anew where it runs"
            )
        handle = self._handle()
        if handle is None:
            raise UsageError(
                "the remote that this graph calls is gone, and so is the tf.function that made the graph. Keep one of them for as "
                "long as the graph is used"
            )
        fn = replace(self.fn, handle=handle)
        outcome = fn.invoke([numpy_tensors.export(np.asarray(x)) for x in arrays], int(token))
        if outcome.structure != self.fn.structure and not fn.word:
            raise _other_result(fn, "another result tree")
        results = []
        for i, (carrier, known) in enumerate(zip(outcome.carriers, self._avals, strict=True)):
            if carrier is None:
                results.append(np.zeros_like(arrays[fn.word[-1][1][i]]))
                continue
            if carrier.dtype != known.dtype or not tf.TensorShape(known.shape).is_compatible_with(
                carrier.array.shape
            ):
                raise _other_result(fn, f"result {i} as {carrier.dtype.name} of shape {carrier.array.shape}")
            results.append(numpy_tensors.adopt(carrier))
        return [*results, np.int64(outcome.token)]


# By the name that TensorFlow gives the host function; graphs hold the calls.
_calls: WeakValueDictionary[bytes, _Call] = WeakValueDictionary()

GRADIENT = "GradwireCall"


@tf.RegisterGradient(GRADIENT)
def _gradient_of_copy(operation: Any, *cotangents: Any) -> list[Any]:
    """Where TensorFlow has copied the operation without the node around it, whose rule it is otherwise.

    `tf.vectorized_map`, `jacobian` and `batch_jacobian` do so, into a loop over the rows, and would have zeros there.
    """
    if operation is None:  # it is traced to be saved with a graph, of which it is told nothing
        return _refused_when_run(cotangents)
    call = _calls[operation.get_attr("token")]
    (_, _, *operands), (*results, kept) = operation.inputs, operation.outputs
    call.set_shapes(results)
    call.set_shapes(cotangents[:-1])
    return [None, None, *_graph_pullback(call.fn, call.entry, operands, kept, results, cotangents[:-1])]


def _refused_when_run(tensors: Sequence[Any]) -> list[Any]:
    """So many tensors which nobody will have. (With the node around the call its own rule is saved.)"""
    why = (
        "gradwire: the derivative by tf.vectorized_map or with experimental_use_pfor=True of a remote call in a saved graph "
        "is not saved with it. Build the graph anew, or use experimental_use_pfor=False"
    )
    with tf.control_dependencies([tf.debugging.Assert(tf.constant(False), [why])]):
        return [tf.identity(x) for x in tensors]


def _row_too_many(fn: Derived, what: str) -> UsageError:
    return UsageError(
        f"{fn.handle.name}: {what} cannot be made in tf.vectorized_map, which makes that of the first row once more. "
        "Use tf.map_fn, let the target take the whole batch, or call the module in evaluation mode and differentiate outside of the map"
    )


def _other_result(fn: Derived, what: str) -> UsageError:
    return UsageError(
        f"{fn.handle.name}: the worker gave {what}, which is not what this tf.function was traced with. If it depends "
        "on values, call it outside of the tf.function; if options(out_spec=...) said so, correct that"
    )


# ---- Pullback -------------------------------------------------------------------------------------------------------


def _pullback(
    fn: Derived,
    operands: Sequence[Any],
    kept: Any,
    watched: set[int],
    results: Sequence[Any],
    given: Mapping[int, Any],
) -> list[Any]:
    """A cotangent, or None, for each operand of ``fn``; for the watched ones only.

    results: of ``fn``, None where it had none; given: the cotangents of the others.
    """
    found: list[Any] = [None] * len(operands)
    like = [operands[fn.word[-1][1][i]] if y is None else y for i, y in enumerate(results)]
    cotangents = [_dense(given.get(i), y) for i, y in enumerate(like) if _inexact(y)]
    everything = [*operands, *[c for c in cotangents if c is not None]]
    anchor = fn.site.anchored and 0 in watched
    # What an outer derivative will pull back again is not yet the loss, and a row of a Jacobian never is.
    inner = is_in_rows() or is_inner(everything) if anchor and fn.site.accumulate else True
    wrt = tuple(i for i in sorted(watched) if _inexact(operands[i]) and (i or not anchor or not inner))
    if wrt:
        pullback = fn.then(pullback_op(wrt, [c is not None for c in cotangents]), accumulate=not inner)
        every = _undecided(pullback, everything) if inner is None else apply(pullback, everything, kept)
        for i, c in zip(wrt, every, strict=True):
            found[i] = c
    if anchor:
        found[0] = tf.zeros((), tf.float32)  # what is accumulated is in the worker
    return found


def _undecided(pullback: Derived, everything: Sequence[Any]) -> list[Any]:
    """In place of a pullback of which it is not known whether it accumulates: an error when it is run."""

    def refuse(*_: Any) -> Any:
        raise UsageError(
            f"{pullback.handle.name}: a tf.function that calls a module whose parameters the worker owns is "
            "differentiated by several tapes, or by a persistent one, outside of it; so it cannot be told which "
            "derivative is the loss's. Put the tapes inside the tf.function, or use one that is not persistent"
        )

    wrt = pullback.word[-1][1]
    return list(tf.numpy_function(refuse, everything, [everything[i].dtype for i in wrt], name=OPERATION))


def _dense(cotangent: Any, like: Any) -> Any:
    if isinstance(cotangent, tf.IndexedSlices):
        return tf.math.unsorted_segment_sum(cotangent.values, cotangent.indices, tf.shape(like)[0])
    return cotangent
