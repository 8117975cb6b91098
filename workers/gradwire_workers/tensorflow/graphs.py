"""Traces, and what is cut out of them: how a forward is kept so that its derivatives are pure functions.

A kept forward is traced with further results: its *saved* tensors. These are the outputs of everything
stateful in it (variables read, random numbers drawn, tables looked up), and the intermediate tensors that
its pullback starts from. A derivative is traced as a whole, forward included; then, where a node of its
graph is the same as one of the forward, saved tensors take the place of what led to them, and what is no
longer reached falls away:

    kept forward    operands ──► f ──► results, saved
    derivative      operands, cotangents, saved ──► gradients

So the forward's state moves once, its random numbers are drawn once, and a variable that is assigned in
the meantime is not read again: its old value is among the saved tensors (a reference; variables copy on
write). Any derivative of any order follows from the same saved tensors, any number of times.

Two nodes are the same if their definitions are, names of inputs included, and so are their inputs. A
stateful node that is not the same (such as a call of a function that has variables, whose gradient rewrites
it) must not be executed again: `NotReplayable`. Nor must a constant of the forward be another one in the
derivative: then the target's Python gives something else at each trace (`np.random`, a counter).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Callable, Sequence

import tensorflow as tf

__all__ = ["NotReplayable", "Replay", "Traced", "saved_names"]

# Stateful by registration only: the same again at each execution.
_HARMLESS = frozenset(("VarHandleOp", "VariableShape"))
_NOT_VALUES = frozenset(("resource",))
_CHEAP = frozenset(("Const", "Placeholder"))
# What may differ without a difference in what a node computes.
_IRRELEVANT = ("_class", "_gradient_op_type")


class NotReplayable(Exception):
    """A derivative would execute something stateful of its forward once more, or belong to another forward."""


class Traced:
    """A function of flat tensors as a graph, for one signature. Calls take tensors of that signature.

    results: how many results the function has, None among them counted. Where the function gives None,
    so does a call. saved: names of tensors inside the graph that a call returns as well, after the results.
    """

    def __init__(
        self, function: Callable[..., Sequence[Any]], specs: Sequence[Any], saved: Sequence[str] = ()
    ) -> None:
        self.results = 0
        self._body: frozenset[str] = frozenset()

        def body(*operands: Any) -> list[Any]:
            graph = tf.compat.v1.get_default_graph()
            results = list(function(*operands))
            self.results = len(results)
            self._body = frozenset(op.name for op in graph.get_operations())
            return [*results, *(graph.get_tensor_by_name(name) for name in saved)]

        named = [tf.TensorSpec(s.shape, s.dtype, name=f"operand_{i}") for i, s in enumerate(specs)]
        self.concrete = tf.function(body, autograph=False).get_concrete_function(*named)
        self._captured = list(self.concrete.captured_inputs)
        self._operands = len(named)

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        # Calling the concrete function checks and sorts its arguments first, and costs twice as much.
        return self.concrete._call_flat(list(operands), self._captured)

    @property
    def outputs(self) -> list[Any]:
        """The results as symbolic tensors, None among them."""
        return self.concrete.structured_outputs[: self.results]

    @cached_property
    def nodes(self) -> dict[str, Any]:
        """The nodes' definitions by name, in order of creation, without control dependencies."""
        nodes = {node.name: node for node in self._definition.node}
        for node in nodes.values():
            inputs = [name for name in node.input if not name.startswith("^")]
            del node.input[:]
            node.input.extend(inputs)
            for attribute in _IRRELEVANT:
                if attribute in node.attr:
                    del node.attr[attribute]
        return nodes

    @cached_property
    def _definition(self) -> Any:
        return self.concrete.graph.as_graph_def()

    def part(self, names: set[str]) -> Any:
        """The definition of these nodes alone, and of all functions that they may call."""
        whole = self._definition
        part = type(whole)(versions=whole.versions, library=whole.library)
        part.node.extend(node for name, node in self.nodes.items() if name in names)
        return part

    @cached_property
    def fed(self) -> dict[str, Any]:
        """What each placeholder stands for: an operand's number, or the tensor that was captured."""
        fed = [*range(self._operands), *self._captured]
        return {_node_of(x.name): value for x, value in zip(self.concrete.inputs, fed)}

    @cached_property
    def stateful(self) -> dict[str, Any]:
        """The operations of the function's own graph that are not functions of their inputs."""
        operations = self.concrete.graph.get_operations()
        return {
            op.name: op
            for op in operations
            if op.name in self._body and op.op_def.is_stateful and op.type not in _HARMLESS
        }

    @property
    def is_pure(self) -> bool:
        """Whether nothing is assigned, drawn or printed when it runs; variables may be read."""
        reads = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
        return all(op.type in reads for op in self.stateful.values())

    def same_nodes(self, other: Traced) -> set[str]:
        """Names of this trace's nodes that compute the same in the other, whose operands come first in ours."""
        same: set[str] = set()
        for name, node in self.nodes.items():
            twin = other.nodes.get(name)
            if twin is None or name not in self._body or name not in other._body:
                continue
            if node.op == "Placeholder":
                if name in self.fed and name in other.fed and _is_same(self.fed[name], other.fed[name]):
                    same.add(name)
            elif node == twin and all(_node_of(tensor) in same for tensor in node.input):
                same.add(name)
        return same

    def sources(self, *, inexact: bool) -> list[str]:
        """Names of the function's constants and placeholders. inexact: constants of such types alone."""
        found = [
            n for n, node in self.nodes.items() if n in self._body and node.op in ("Const", "Placeholder")
        ]
        if not inexact:
            return found
        dtypes = {
            n: tf.as_dtype(self.nodes[n].attr["dtype"].type) for n in found if self.nodes[n].op == "Const"
        }
        return [n for n, dtype in dtypes.items() if dtype.is_floating or dtype.is_complex]

    def reach(self, stops: Callable[[str], bool]) -> tuple[set[str], list[str]]:
        """The nodes that lead to the outputs, going no further than tensors that stop; and these tensors.

        Placeholders always stop.
        """
        needed: set[str] = set()
        edge: dict[str, None] = {}
        todo = [x.name for x in self.concrete.outputs]
        while todo:
            tensor = todo.pop()
            name = _node_of(tensor)
            if self.nodes[name].op == "Placeholder" or stops(tensor):
                edge[tensor] = None
            elif name not in needed:
                needed.add(name)
                todo += [_tensor_name(x) for x in self.nodes[name].input]
        return needed, list(edge)


def _is_same(a: Any, b: Any) -> bool:
    return a == b if isinstance(a, int) or isinstance(b, int) else a is b


def _node_of(tensor: str) -> str:
    return tensor.partition(":")[0]


def _tensor_name(input_name: str) -> str:
    return input_name if ":" in input_name else f"{input_name}:0"


def saved_names(forward: Traced, derivative: Traced | None) -> list[str]:
    """What a kept forward has to return besides its results: see the theory above."""
    names = {
        output.name: None
        for op in forward.stateful.values()
        for output in op.outputs
        if output.dtype.name not in _NOT_VALUES
    }
    if derivative is not None:
        same = derivative.same_nodes(forward)
        _, edge = derivative.reach(lambda tensor: _node_of(tensor) in same and not _cheap(derivative, tensor))
        names.update(dict.fromkeys(t for t in edge if derivative.nodes[_node_of(t)].op != "Placeholder"))
    return list(names)


def _cheap(traced: Traced, tensor: str) -> bool:
    return traced.nodes[_node_of(tensor)].op in _CHEAP


class Replay:
    """A derivative of a kept forward, as a function of its operands and of the forward's saved tensors.

    reshaped: the derivative has its forward in another shape (some operand has become a batch), so that
    constants about shapes differ by right. Raises NotReplayable.
    """

    def __init__(
        self, derivative: Traced, forward: Traced, saved: Sequence[str], *, reshaped: bool = False
    ) -> None:
        same, kept = derivative.same_nodes(forward), {name: i for i, name in enumerate(saved)}
        needed, edge = derivative.reach(lambda tensor: tensor in kept and _node_of(tensor) in same)
        other = [name for name in forward.sources(inexact=reshaped) if name not in same]
        if other:
            raise NotReplayable(f"{', '.join(other)}: the target's Python gives something else at each trace")
        again = sorted(name for name in needed if name in derivative.stateful)
        if again:
            raise NotReplayable(f"{', '.join(again)} would be executed again")
        part = derivative.part(needed)
        self._saved = [kept[t] for t in edge if t in kept]
        placeholders = {t: derivative.fed[_node_of(t)] for t in edge if t not in kept}
        self._operands = [i for i in placeholders.values() if isinstance(i, int)]
        names = [t for t, i in placeholders.items() if isinstance(i, int)] + [t for t in edge if t in kept]
        captured = {t: x for t, x in placeholders.items() if not isinstance(x, int)}
        outputs = [x.name for x in derivative.concrete.outputs]

        def evaluate(*tensors: Any) -> list[Any]:
            fed = {**dict(zip(names, tensors)), **captured}
            return tf.graph_util.import_graph_def(part, fed, outputs, name="derivative")

        graph = derivative.concrete.graph
        self._traced = Traced(evaluate, [graph.get_tensor_by_name(name) for name in names])
        self._given = [y is not None for y in derivative.outputs]

    def __call__(self, operands: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
        """operands: those of the derivative. Gives None where the derivative does."""
        inputs = [operands[i] for i in self._operands]
        inputs += [saved[i] for i in self._saved]
        found = iter(self._traced(inputs))
        return [next(found) if given else None for given in self._given]
