"""What a graph holds of ours, so that it goes when the graph does.

TensorFlow keeps two things for ever. Gradient rules are in a table of the process, by name; the rule of a `tf.custom_gradient` holds
the tensors of its graph, and so the graph and everything that it has captured. Host functions are kept by the program's outermost
graph. Every model that a program makes, calls in a `tf.function` and drops would therefore stay, here and in its worker.

So TensorFlow gets weak references from us, in its table and in its host functions. What they lead to is held (`hold`) by the graphs
that call it, as an attribute of each, and goes when these go. Two things follow:

- `with_rule` does what `tf.custom_gradient` does, but registers a rule that holds nothing. For the tapes that needs one private
  function of TensorFlow, which has no public way to tell them. Where it is gone, `tf.custom_gradient` is used, and graphs stay.
- Keras's optimizers use `tf.custom_gradient`, and so keep the graph of every model that was trained. Nothing in TensorFlow says that
  such a graph can no longer be called: functions and tapes refer to it, and it does not refer to them. So `_let_go` looks for
  graphs whose variables are gone, and asks the garbage collector whether anything but their own parts still refers to them.
"""

from __future__ import annotations

import gc
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from gradwire_wire.errors import UsageError

__all__ = ["hold", "with_rule"]

try:
    from tensorflow.python.eager.record import record_operation
except ImportError:
    record_operation = None

_HELD = "_gradwire_held"
_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
_sweeping = threading.RLock()


def hold(x: object) -> None:
    """Keep it for as long as the graph that is being traced, or one that this is a part of: a loop's body, or a function in a function."""
    with _sweeping:
        _let_go()
    graph = tf.compat.v1.get_default_graph()
    while True:
        if not hasattr(graph, _HELD):
            setattr(graph, _HELD, [])
            with _sweeping:
                _graphs.add(graph)
        getattr(graph, _HELD).append(x)
        outer = getattr(graph, "outer_graph", None)
        if not getattr(outer, "building_function", False):
            return
        graph = outer


def _let_go() -> None:
    """Empty graphs that nobody can call any more: their variables are gone, and so are the functions that were made of them."""
    graphs = list(_graphs)
    for graph in graphs:
        try:
            graph.variables  # noqa: B018
        except (AssertionError, ValueError):
            if not _is_used(graph, graphs):
                getattr(graph, _HELD).clear()
                _graphs.discard(graph)
        except AttributeError:  # a graph of a session
            pass


def _is_used(graph: Any, ours: list[Any]) -> bool:
    """Whether anything but its own parts refers to it, as functions to call it do, and tapes with such a call. Takes a while.

    Its operations and tensors refer to it, by themselves or by their ``__dict__``; so do ``ours`` and the frames of this very call.
    """
    operations = graph.get_operations()
    parts = {id(vars(x)) for op in operations for x in (op, *op.outputs) if hasattr(x, "__dict__")}
    return any(
        not (
            referrer is ours
            or isinstance(referrer, (tf.Operation, tf.Tensor, types.FrameType))
            or id(referrer) in parts
        )
        for referrer in gc.get_referrers(graph)
    )


Rule = Callable[..., list[Any]]
_numbers = itertools.count()
_saved: set[object] = set()


def with_rule(
    results: Sequence[Any], operands: Sequence[Any], rule: Rule, called: object
) -> tuple[list[Any], object]:
    """The results, differentiated by ``rule(*cotangents)``, which gives a cotangent for each operand; and what the graph must hold for that.

    called: what is called in the graph. If the graph is saved, this is kept for ever, since the program may load the graph at any time.
    """
    if record_operation is None:  # TensorFlow has no public way to tell its tapes
        return list(tf.custom_gradient(lambda *_: (list(results), rule))(*operands)), None
    count = len(results)

    def padded(*cotangents: Any) -> list[Any]:
        return [*[None] * count, *rule(*cotangents[:count])]

    name = f"GradwireNode{next(_numbers)}"
    _register(name, weakref.ref(padded), weakref.ref(called))
    given = [*results, *operands]
    with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": name}):
        same = tf.identity_n(given)  # of the operands as well: so their gradients have a way
    record_operation(name, same, given, padded)
    return list(same[:count]), padded


def _register(name: str, rule: weakref.ref[Rule], called: weakref.ref[object]) -> None:
    @tf.RegisterGradient(name)
    def of_operation(operation: Any, *cotangents: Any) -> list[Any]:
        found = rule()
        if found is None:
            raise UsageError(
                "the graph with a remote call that this one was saved from is gone, and this derivative was not saved: TensorFlow saves "
                "first ones, with SaveOptions(experimental_custom_gradients=True). Build the graph anew"
            )
        if operation is None:  # it is traced to be saved
            _saved.add(called())
        return found(*cotangents)
