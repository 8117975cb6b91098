"""The user's callable as a function of its tensors alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from gradwire_wire.errors import ProtocolError, UnsupportedTensorError
from gradwire_wire.structures import fill, flatten
from gradwire_workers.flat import Flat
from gradwire_workers.program import WorkerSite


class Tensor:
    def __init__(self, value: float) -> None:
        self.value = value


def is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def site(*args: Any, anchored: bool = False, **kwargs: Any) -> WorkerSite:
    return WorkerSite(flatten([list(args), kwargs], is_tensor)[0], anchored=anchored)


X, Y = Tensor(1), Tensor(2)


def test_operands_fill_the_tree_and_results_come_back_flat() -> None:
    def target(x: Any, pair: Any, *, scale: float, mask: Any = None) -> Any:
        assert (x, pair, scale, mask) == (X, (Y, "s"), 2.0, None)
        return {"y": x, "aux": (pair[0], None, 3)}

    flat = Flat(target, site(X, (Y, "s"), scale=2.0, mask=None), is_tensor)
    assert flat(X, Y) == (X, Y)
    assert fill(flat.structure, [1, 2]) == {"y": 1, "aux": (2, None, 3)}


def test_the_anchor_is_for_the_worker_alone() -> None:
    flat = Flat(lambda x: x, site(X, anchored=True), is_tensor)
    assert flat("anchor", X) == (X,)


def test_the_structure_is_that_of_the_latest_run() -> None:
    results = iter([X, (X, Y), 7, None])
    flat = Flat(lambda: next(results), site(), is_tensor)
    found = [(flat(), fill(flat.structure, [1, 2][: len(leaves)])) for leaves in ([X], [X, Y], [], [])]
    assert found == [((X,), 1), ((X, Y), (1, 2)), ((), 7), ((), None)]


def test_numpy_arrays_in_a_result_are_leaves_and_numpy_scalars_are_not() -> None:
    array = np.arange(3)
    flat = Flat(lambda x: [array, x, np.float32(2)], site(X), is_tensor)
    leaves = flat(X)
    assert leaves[0] is array and leaves[1] is X and len(leaves) == 2
    assert fill(flat.structure, ["a", "b"]) == ["a", "b", np.float32(2)]


def test_a_result_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"the result.*set"):
        Flat(lambda x: {1, 2}, site(X), is_tensor)(X)


def test_what_the_target_raises_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        Flat(lambda x: 1 / 0, site(X), is_tensor)(X)
    with pytest.raises(TypeError, match="unexpected keyword"):
        Flat(lambda x: x, site(X, no_such=1), is_tensor)(X)


@pytest.mark.parametrize(
    "tree", [7, None, [], [[], {}, 1], [[], []], [{}, {}], [(), {}], [[], {1: 2}], {"a": 1}]
)
def test_R57_what_is_no_call_is_refused(tree: Any) -> None:
    flat = Flat(lambda *a, **k: None, WorkerSite(flatten(tree, is_tensor)[0]), is_tensor)
    with pytest.raises(ProtocolError):
        flat()


@pytest.mark.parametrize("operands", [(), (X,), (X, Y, X)])
def test_too_few_and_too_many_operands(operands: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError, match="2 holes"):
        Flat(lambda x, y: x, site(X, (Y,)), is_tensor)(*operands)


def test_operands_are_let_go_after_the_call() -> None:
    flat = Flat(lambda x, nest: 1, site(Tensor(0), ({"a": Tensor(1)},)), is_tensor)
    gc.disable()
    try:
        x, y = Tensor(1), Tensor(2)
        gone = weakref.ref(x), weakref.ref(y)
        flat(x, y)
        del x, y
        assert gone[0]() is None and gone[1]() is None, "a reference cycle would keep their slots leased"
    finally:
        gc.enable()
