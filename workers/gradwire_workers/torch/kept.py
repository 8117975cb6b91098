"""Kept forwards: graphs that pullbacks and tangents are taken from, any number of times."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import torch

from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import ResidualLostError, UsageError
from gradwire_wire.words import pulled_results
from gradwire_workers.program import Residual
from gradwire_workers.torch.tape import filled, is_inexact, leaves_of, pull, push

__all__ = ["ZERO", "Kept", "KeptRows", "is_of_earlier_calls", "nodes_made", "own_leaves", "saved_nbytes"]

ZERO = Carrier(np.zeros((), np.float32), BY_NAME["float32"])
"""The anchor's gradient, on its way out."""
nodes_made: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
"""How many nodes of graphs were made so far: the number of the next one."""


class Kept(Residual):
    """A kept forward: leaves, results, and between them torch's graph. See `program.Residual`.

    owner: the program, for its parameters and its generation.
    nbytes: estimated, see `saved_nbytes`. measure: makes that estimate later, where there is time for it.
    accumulates: whether pullbacks add to the owner's parameters.
    has_hooks: see `gradwire_workers.torch.hooks`.
    alone: of the operands that are leaves here, only the anchor is differentiated.
    within: runs ``function(*args)`` as the forward was run, given the leaves.
    """

    __slots__ = (
        "_alone",
        "_anchored",
        "_generation",
        "_has_hooks",
        "_leaves",
        "_owner",
        "_results",
        "_trainable",
        "_training",
        "accumulates",
        "measure",
        "nbytes",
        "within",
    )

    def __init__(
        self,
        owner: Any,
        leaves: Sequence[Any],
        results: Sequence[Any],
        anchored: bool,
        nbytes: int,
        has_hooks: bool = False,
        alone: bool = False,
    ) -> None:
        self.within: Callable[..., Any] | None = None
        self.measure: Callable[[], int] | None = None
        self.accumulates, self._trainable = False, None
        self._alone = len(leaves) if alone else 0
        self._has_hooks = has_hooks
        self._owner, self._leaves, self._anchored, self.nbytes = owner, list(leaves), anchored, nbytes
        self._results = [y for y in results if is_inexact(y)]
        self._generation, self._training = owner.generation, owner.training

    def settle(self) -> int:
        if self.measure is not None:
            self.nbytes, self.measure = self.measure(), None
        if self.accumulates:
            self._trainable = self._owner.trainable()
        return self.nbytes

    def _parameters(self) -> Sequence[Any]:
        """Those that a pullback adds to; of later ones than the forward there is nothing in its graph."""
        found = self._trainable
        return self._owner.trainable() if found is None else [p for p in found if p.requires_grad]

    def derive(
        self, op: tuple[Any, ...], linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], Kept | None]:
        if self._alone and any(0 < i < self._alone and is_inexact(self._leaves[i]) for i in op[1]):
            raise ResidualLostError(
                "a derivative by an argument is asked for that did not require a gradient when the call was made, so its graph has none. "
                "Call requires_grad_() before the call"
            )
        linear = self._owner.place(linear)
        if keep:
            linear = leaves_of(linear)
        parameters = self._parameters() if accumulate else ()
        wrt = [self._leaves[i] for i in op[1]]
        derive: Any = (
            self._derived if self.within is None else partial(self.within, self._leaves, self._derived)
        )
        results = derive(op, self._results, wrt, linear, keep, parameters)
        if not keep:
            return self._anchored_zero(op, results), None
        whole = filled(results, wrt) if op[0] == "T" else results
        nbytes = self.nbytes + sum(x.nbytes for x in (*linear, *whole))
        kept = Kept(self._owner, [*self._leaves, *linear], whole, self._anchored, nbytes, self._has_hooks)
        kept._generation, kept._training, kept.within = self._generation, self._training, self.within
        kept._alone = self._alone
        return self._anchored_zero(op, [None if y is None else y.detach() for y in results]), kept

    def derive_batch(
        self, op: tuple[Any, ...], mapped: tuple[bool, ...], linear: Sequence[Any]
    ) -> list[Any] | None:
        if self._alone or self._has_hooks or self.within is not None or not all(mapped):
            return None
        rows = self._owner.place(linear)
        try:
            return self._derived(op, self._results, [self._leaves[i] for i in op[1]], rows, False, rows=True)
        except (
            Exception
        ):  # many kinds, of backwards that torch cannot batch; what else is wrong, each row will say
            return None

    def _derived(
        self,
        op: tuple[Any, ...],
        ys: Sequence[Any],
        wrt: Sequence[Any],
        linear: Sequence[Any],
        keep: bool,
        parameters: Sequence[Any] = (),
        rows: bool = False,
    ) -> list[Any]:
        if self._has_hooks and self._generation != self._owner.generation:
            raise _lost("it would be computed again with the new ones (torch.utils.checkpoint)")
        if self._has_hooks and self._training != self._owner.training:
            raise ResidualLostError(
                "train() or eval() was called after the forward whose gradient is asked for, and torch.utils.checkpoint would "
                "compute it again in the new mode. Run the forward again, or change the mode after the last pullback"
            )
        try:
            if op[0] == "J":
                return push(ys, wrt, linear, create_graph=keep, rows=rows)
            ys = pulled_results(op, ys)
            return pull(ys, wrt, linear, create_graph=keep, parameters=parameters, rows=rows)
        except RuntimeError as error:
            if "sparse tensors" in str(error):
                raise UsageError(
                    f"torch says {str(error)!r}: a gradient that is sparse (embedding with sparse=True) cannot be had for an "
                    "argument of a remote function. Say sparse=False, or let a module in the worker own those weights"
                ) from error
            if self._generation == self._owner.generation or "inplace operation" not in str(error):
                raise
            raise _lost("its graph no longer holds") from error

    def _anchored_zero(self, op: tuple[Any, ...], results: list[Any]) -> list[Any]:
        if self._anchored and op[0] == "T" and 0 in op[1]:
            results[op[1].index(0)] = ZERO
        return results


def _lost(why: str) -> ResidualLostError:
    return ResidualLostError(
        "the parameters were changed (an optimizer step or load_state_dict) after the forward whose gradient is asked for, "
        f"so {why}. Run the forward again, or step after the last pullback"
    )


class KeptRows(Kept):
    """A kept batch: between the leaves and the graph lie ``rows``, the operands with one row each."""

    __slots__ = ("_rows", "_size")

    def __init__(
        self,
        owner: Any,
        leaves: Sequence[Any],
        rows: Sequence[Any],
        size: int,
        results: Sequence[Any],
        anchored: bool,
        nbytes: int,
    ) -> None:
        super().__init__(owner, leaves, results, anchored, nbytes)
        self._rows, self._size = list(rows), size

    def derive_rows(
        self, op: tuple[Any, ...], axes: tuple[bool, ...], linear: Sequence[Any], rows: np.ndarray
    ) -> list[Any] | None:
        numbers = rows[:, 1] if rows.ndim == 2 else rows
        if not np.array_equal(numbers, np.arange(self._size)):
            return None
        linear = [
            x if mapped else x.expand(self._size, *x.shape)
            for x, mapped in zip(self._owner.place(linear), axes[len(axes) - len(linear) :])
        ]
        wrt = [self._rows[i] for i in op[1]]
        results = self._derived(op, self._results, wrt, linear, False)
        return filled(results, wrt) if op[0] == "T" else results


def saved_nbytes(
    results: Sequence[Any], leaves: Sequence[Any], shared: Sequence[Any], has_hooks: bool = False
) -> int:
    """Bytes of memory that stay because of this graph: operands, results and what its nodes saved.

    shared: tensors that would be there anyway (parameters, buffers). Walks the graph: about 20 µs a
    node, so ask once per signature. Constants that the user's code holds are counted too. has_hooks: what the
    nodes saved is not looked at.
    """
    seen = {_memory_of(x)[0] for x in shared}
    nbytes = 0
    for x in (*leaves, *results, *([] if has_hooks else _saved(results))):
        place, size = _memory_of(x)
        if place not in seen:
            seen.add(place)
            nbytes += size
    return nbytes


def _memory_of(x: Any) -> tuple[int, int]:
    """Where its memory is, and how much. What a torch.func transform of the user's has wrapped does not tell, nor a sparse one: then its own size."""
    try:
        storage = x.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return -id(x), x.numel() * x.element_size()


def _saved(results: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for node in _nodes(results):
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                found += _tensors_at(node, name)
    return found


def own_leaves(results: Sequence[Any]) -> list[Any]:
    """The leaves that results depend on."""
    variables = [getattr(node, "variable", None) for node in _nodes(results)]
    return [x for x in variables if x is not None]


def is_of_earlier_calls(results: Sequence[Any], first: int, here: int) -> bool:
    """Whether the graph has nodes that were made from number ``first`` on, and before number ``here``."""
    return here > first and any(first <= _number(node) < here for node in _nodes(results))


def _number(node: Any) -> int:
    """Of the node; leaves have the largest there is, and those of a torch that tells none -1."""
    return int(getattr(node, "_sequence_nr", lambda: -1)())


def _nodes(results: Sequence[Any]) -> Iterator[Any]:
    """The graph behind results."""
    nodes = [y.grad_fn for y in results if y.grad_fn is not None]
    visited = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                nodes.append(following)


def _tensors_at(node: Any, name: str) -> list[Any]:
    try:
        value = getattr(node, name)
    except RuntimeError:  # freed already, or modified in place
        return []
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [x for x in values if isinstance(x, torch.Tensor) and x.layout is torch.strided]
