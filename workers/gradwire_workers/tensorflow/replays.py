"""How a forward is kept, so that its derivatives are pure functions of what was saved.

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

Two nodes are the same if their definitions are, names of inputs included, and so are their inputs. Loops
and calls of functions are not the same: their gradients rewrite them. They are executed again in the
derivative. If they read variables, then from *shadows* of these, which are given the values of the time of
the forward. What assigns or draws must not be executed again: `NotReplayable`. Nor must a constant of the
forward be another one in the derivative: then the target's Python gives something else at each trace
(`np.random`, a counter).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import tensorflow as tf

from gradwire_workers.tensorflow.graphs import Traced, node_of

__all__ = ["NotReplayable", "Replay", "Saved", "what_to_save"]

_CHEAP = frozenset(("Const", "Placeholder"))


class NotReplayable(Exception):
    """A derivative would assign or draw once more, or belong to another forward."""


class Saved(NamedTuple):
    """What a kept forward gives besides its results: first tensors of its graph by name, then values of variables.

    variables: by the name of the placeholder for the variable's handle.
    """

    tensors: list[str]
    variables: dict[str, Any]

    def find_in(self, graph: Any) -> list[Any]:
        """These tensors of a graph in which the forward was just traced. Raises NotReplayable."""
        try:
            handles = {name: graph.get_tensor_by_name(f"{name}:0") for name in self.variables}
            found = [graph.get_tensor_by_name(name) for name in self.tensors]
        except KeyError as error:
            raise NotReplayable(f"{error}: the target's Python does something else at each trace") from error
        reads = tf.raw_ops.ReadVariableOp
        return found + [reads(resource=h, dtype=self.variables[name].dtype) for name, h in handles.items()]


def what_to_save(forward: Traced, derivative: Traced | None) -> Saved:
    """derivative: the one that is most likely asked for. Raises NotReplayable."""
    tensors = {
        output.name: None
        for op in forward.stateful.values()
        for output in op.outputs
        if output.dtype != tf.resource
    }
    if derivative is None:
        return Saved(list(tensors), {})
    same = derivative.same_nodes(forward)
    needed, edge = derivative.reach(
        lambda tensor: node_of(tensor) in same and derivative.nodes[node_of(tensor)].op not in _CHEAP
    )
    tensors.update(dict.fromkeys(t for t in edge if derivative.nodes[node_of(t)].op != "Placeholder"))
    return Saved(list(tensors), _variables_read_again(forward, derivative, needed))


def _variables_read_again(forward: Traced, derivative: Traced, needed: set[str]) -> dict[str, Any]:
    """Those that the forward itself assigns have no one value at its time: NotReplayable."""
    by_handle = {id(v.handle): v for v in derivative.concrete.graph.variables}
    found = {}
    for name in _read_again(derivative, needed):
        for handle in _handles_of(derivative, name):
            if handle not in forward.fed or id(derivative.fed[handle]) not in by_handle:
                raise NotReplayable(f"{name} reads something that is no variable of the forward")
            found[handle] = by_handle[id(derivative.fed[handle])]
    for name in forward.stateful:
        if not forward.only_reads(name) and found.keys() & set(_handles_of(forward, name)):
            raise NotReplayable(f"{name} assigns to a variable that would be read again")
    return found


def _read_again(derivative: Traced, needed: set[str]) -> list[str]:
    """Stateful nodes among the needed ones, all of which only read; else NotReplayable."""
    again = sorted(name for name in needed if name in derivative.stateful)
    worse = [name for name in again if not derivative.only_reads(name)]
    if worse:
        raise NotReplayable(f"{', '.join(worse)} would be executed again")
    return again


def _handles_of(traced: Traced, name: str) -> list[str]:
    """Placeholders of the resources that a node is given."""
    inputs = [node_of(x) for x in traced.nodes[name].input]
    return [x for x in inputs if x in traced.fed and getattr(traced.fed[x], "dtype", None) == tf.resource]


class Replay:
    """A derivative of a kept forward, as a function of its operands and of what the forward saved.

    reshaped: the derivative has its forward in another shape (some operand has become a batch), so that
    constants about shapes differ by right. Raises NotReplayable.
    """

    def __init__(self, derivative: Traced, forward: Traced, saved: Saved, *, reshaped: bool = False) -> None:
        same, kept = derivative.same_nodes(forward), {name: i for i, name in enumerate(saved.tensors)}
        other = [name for name in forward.sources(inexact=reshaped) if name not in same]
        if other:
            raise NotReplayable(f"{', '.join(other)}: the target's Python gives something else at each trace")
        needed, edge = derivative.reach(lambda tensor: tensor in kept and node_of(tensor) in same)
        again = {h for name in _read_again(derivative, needed) for h in _handles_of(derivative, name)}
        if not again <= saved.variables.keys():
            raise NotReplayable(f"{', '.join(again - saved.variables.keys())} would be read again")
        self._given = [y is not None for y in derivative.outputs]
        fed = {t: derivative.fed[node_of(t)] for t in edge if t not in kept}
        operands = [t for t, x in fed.items() if isinstance(x, int)]
        tensors = [t for t in edge if t in kept]
        shadowed = [h for h in saved.variables if h in again]
        numbers = {h: len(kept) + i for i, h in enumerate(saved.variables)}
        self._operands = [fed[t] for t in operands]
        self._saved = [kept[t] for t in tensors] + [numbers[h] for h in shadowed]
        captured = {t: x for t, x in fed.items() if not isinstance(x, int)}
        self._trace(
            derivative, needed, [*operands, *tensors], captured, {h: saved.variables[h] for h in shadowed}
        )

    def _trace(
        self,
        derivative: Traced,
        needed: set[str],
        inputs: list[str],
        captured: dict[str, Any],
        shadowed: dict[str, Any],
    ) -> None:
        part, outputs = derivative.part(needed), [x.name for x in derivative.concrete.outputs]
        self._shadows = [tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in shadowed.values()]
        fed = {**captured, **{f"{h}:0": v.handle for h, v in zip(shadowed, self._shadows)}}

        def evaluate(*tensors: Any) -> list[Any]:
            for variable, value in zip(self._shadows, tensors[len(inputs) :]):
                variable.assign(value, read_value=False)
            capture = tf.compat.v1.get_default_graph().capture
            given = {**{t: capture(x) for t, x in fed.items()}, **dict(zip(inputs, tensors))}
            return tf.graph_util.import_graph_def(part, given, outputs, name="derivative")

        graph = derivative.concrete.graph
        specs = [graph.get_tensor_by_name(name) for name in inputs]
        self._traced = Traced(evaluate, [*specs, *self._shadows])

    def __call__(self, operands: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
        """operands: those of the derivative. Gives None where the derivative does."""
        inputs = [operands[i] for i in self._operands]
        inputs += [saved[i] for i in self._saved]
        found = iter(self._traced(inputs))
        return [next(found) if given else None for given in self._given]
