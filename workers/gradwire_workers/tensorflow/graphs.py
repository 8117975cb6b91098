"""Traces: functions of flat tensors as TensorFlow graphs, and what can be told about their nodes."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property
from typing import Any, Callable, Iterator, Sequence

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from gradwire_wire.errors import UsageError

__all__ = ["READS", "MakesVariables", "Traced", "node_of", "variables_may_be_made"]

# Stateful by registration only: the same again at each execution.
_HARMLESS = frozenset(("Assert", "VarHandleOp", "VariableShape"))
READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd"))
_MAKES = (
    "a target that makes variables at each call cannot be traced: leave compile=True out, or make them when its file "
    "is imported"
)
# What may differ without a difference in what a node computes.
_IRRELEVANT = ("_class", "_gradient_op_type")


class MakesVariables(UsageError):
    """Variables were about to be made in a trace, where what is assigned to them as well (weights of a file) would be an operation of
    a graph, and not happen."""


_allowed = [True]


@contextmanager
def variables_may_be_made(allowed: bool) -> Iterator[None]:
    """In traces that begin here and do not say so themselves."""
    _allowed.append(allowed)
    try:
        yield
    finally:
        _allowed.pop()


class Traced:
    """A function of flat tensors as a graph, for one signature. Calls take tensors of that signature.

    results: how many results the function has, None among them counted. Where the function gives None,
    so does a call. more: from the graph, right after the function, to tensors that a call returns as well,
    after the results. may_make: whether the function may make variables (None: as in what is around this); if not, it is
    stopped at the first, before it can keep anything that is half made, and `MakesVariables` is raised.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        specs: Sequence[Any],
        more: Callable[[Any], Sequence[Any]] | None = None,
        may_make: bool | None = None,
    ) -> None:
        self.results = 0
        self._body: frozenset[str] = frozenset()
        stopped: list[MakesVariables] = []  # the function may catch it, and Keras raises another in its place
        allowed = _allowed[-1] if may_make is None else may_make

        def made(make: Callable[..., Any], **options: Any) -> Any:
            if not allowed:
                stopped.append(MakesVariables(_MAKES))
                raise stopped[0]
            return make(**options)

        def body(*operands: Any) -> list[Any]:
            graph = tf.compat.v1.get_default_graph()
            with tf.variable_creator_scope(made), variables_may_be_made(allowed):
                results = list(function(*operands))
            self.results = len(results)
            self._body = frozenset(op.name for op in graph.get_operations())
            return [*results, *(more(graph) if more is not None else ())]

        named = [tf.TensorSpec(s.shape, s.dtype, name=f"operand_{i}") for i, s in enumerate(specs)]
        try:
            self.concrete = tf.function(body, autograph=False).get_concrete_function(*named)
        finally:
            if stopped:
                raise stopped[0]
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
    def has_custom_gradients(self) -> bool:
        """Whether a node of it, or of a function that it may call, is a `tf.custom_gradient`."""
        return any(
            node.attr["_gradient_op_type"].s.startswith(b"CustomGradient")
            for node in self._all_nodes()
            if "_gradient_op_type" in node.attr
        )

    @property
    def assigns(self) -> bool:
        """Whether it, or a function that it may call, assigns to a variable."""
        return any(node.op.startswith(("Assign", "ResourceScatter")) for node in self._all_nodes())

    def _all_nodes(self) -> Iterator[Any]:
        whole = self.concrete.graph.as_graph_def()
        for body in (whole.node, *(f.node_def for f in whole.library.function)):
            yield from body

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
        return {node_of(x.name): value for x, value in zip(self.concrete.inputs, fed)}

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
        """Whether nothing is assigned or drawn when it runs; variables may be read."""
        return all(self.only_reads(name) for name in self.stateful)

    def only_reads(self, name: str) -> bool:
        """Whether a stateful node gives the same again for as long as nobody assigns to the variables it is given."""
        return self._node_only_reads(self.nodes[name])

    def _node_only_reads(self, node: Any) -> bool:
        called = [a.func.name for a in node.attr.values() if a.func.name]
        called += [f.name for a in node.attr.values() for f in a.list.func]
        if not called:
            return node.op in READS
        return all(self._function_only_reads(name) for name in called)

    def _function_only_reads(self, name: str) -> bool:
        if name not in self._read_only:
            self._read_only[name] = False  # recursive functions: never mind
            nodes = self._library[name].node_def if name in self._library else None
            self._read_only[name] = nodes is not None and all(
                not _is_stateful(node.op) or node.op in _HARMLESS or self._node_only_reads(node)
                for node in nodes
            )
        return self._read_only[name]

    @cached_property
    def _library(self) -> dict[str, Any]:
        return {f.signature.name: f for f in self._definition.library.function}

    @cached_property
    def _read_only(self) -> dict[str, bool]:
        return {}

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
            elif node == twin and all(node_of(tensor) in same for tensor in node.input):
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
            name = node_of(tensor)
            if self.nodes[name].op == "Placeholder" or stops(tensor):
                edge[tensor] = None
            elif name not in needed:
                needed.add(name)
                todo += [_tensor_name(x) for x in self.nodes[name].input]
        return needed, list(edge)


def _is_same(a: Any, b: Any) -> bool:
    return a == b if isinstance(a, int) or isinstance(b, int) else a is b


def _is_stateful(op: str) -> bool:
    """Of a kind of operation; unknown ones are functions called by their name."""
    definition = op_def_registry.get(op)
    return definition is None or definition.is_stateful


def node_of(tensor: str) -> str:
    """The name of the node that a tensor comes from."""
    return tensor.partition(":")[0]


def _tensor_name(input_name: str) -> str:
    return input_name if ":" in input_name else f"{input_name}:0"
