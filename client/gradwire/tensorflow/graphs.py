"""What a graph holds of ours, so that it goes when the graph does.

TensorFlow keeps two things for ever: rules, in a table of the process by name, where `tf.custom_gradient` puts one that holds the
tensors of its graph, and so the graph and what it has captured; and host functions, in the program's outermost graph. Each
model that a program makes, calls in a `tf.function` and drops would stay, here and in its worker. So both have weak
references from us, and what they lead to is held by the graphs that need it.
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
    """As long as the graph that is traced is there, or one that it is a part of (a loop's body, a function called in a function)."""
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
    """Of what is held by graphs that nobody can call any more: their variables are gone, and the functions made of them.

    Keras's optimizers have rules of that kind, and so keep the graph of each model that was trained.
    """
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
    """Whether anything refers to it but its own parts: the functions to call it, and tapes with such a call, do. Takes a while."""
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
    """The results, differentiated by ``rule(*cotangents)``, which gives one for each operand; and what the graph must hold for that.

    called: what is kept for ever once the graph is saved, since this program may load it at any time.
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
