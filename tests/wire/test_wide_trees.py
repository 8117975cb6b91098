"""Wide trees: the same bytes and the same trees as leaf by leaf, and None for all that is left to the general way."""

from __future__ import annotations

import collections
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire_wire import structures
from gradwire_wire.errors import UnsupportedTensorError
from gradwire_wire.structures import LEAF, TUPLE, Leaf, fill, flatten
from gradwire_wire.wide_trees import MIN_WIDTH, filling_of, pack_wide


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def leaf_by_leaf(tree: Any) -> tuple[bytes, list[Any]]:
    """What the protocol says, from the packer alone."""
    leaves: list[Any] = []

    def other(x: Any) -> msgpack.ExtType:
        if isinstance(x, tuple):
            return msgpack.ExtType(TUPLE, pack(list(x)))
        leaves.append(x)
        return msgpack.ExtType(LEAF, msgpack.packb(len(leaves) - 1))

    def pack(x: Any) -> bytes:
        packed: bytes = msgpack.packb(x, default=other, strict_types=True)
        return packed

    return pack(tree), leaves


arrays = st.builds(np.zeros, st.integers(0, 3))
names = st.text(max_size=40)
wide = st.one_of(
    st.lists(arrays, min_size=MIN_WIDTH, max_size=300),
    st.lists(arrays, min_size=MIN_WIDTH, max_size=40).map(tuple),
    st.dictionaries(names, arrays, min_size=MIN_WIDTH, max_size=40),
)
scalars = st.none() | st.booleans() | st.floats() | names
trees = st.recursive(
    wide | arrays | scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(names, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
def test_structure_and_tree_are_those_of_the_general_way(tree: Any) -> None:
    found: list[Any] = []
    packed, (structure, leaves) = pack_wide(tree, is_array, found), leaf_by_leaf(tree)
    if packed is not None:
        assert packed == structure
        assert list(map(id, found)) == list(map(id, leaves))
    else:
        assert found == []
    again = fill(structure, leaves)
    assert leaf_by_leaf(again)[0] == structure
    assert list(map(id, leaf_by_leaf(again)[1])) == list(map(id, leaves))


def many(count: int) -> list[np.ndarray]:
    return [np.full(2, i) for i in range(count)]


@pytest.mark.parametrize("count", [8, 15, 16, 127, 128, 200, 4096, 4097, 70_000])
def test_wide_lists_of_any_length(count: int) -> None:
    xs = many(count)
    structure, leaves = flatten([[xs], {}], is_array)
    assert structure == leaf_by_leaf([[xs], {}])[0] and list(map(id, leaves)) == list(map(id, xs))
    (back,), nothing = fill(structure, leaves)
    assert list(map(id, back)) == list(map(id, xs)) and back is not leaves and nothing == {}


@pytest.mark.parametrize(
    "tree",
    [
        [*many(9), np.float32(1)],
        [many(9), collections.OrderedDict(a=np.zeros(1))],
        {1: np.zeros(1), **{str(i): x for i, x in enumerate(many(9))}},
        [many(9), 3 + 4j],
        [many(9), 1 << 70],
        many(7),
        [[[[[[[[many(9)]]]]]]]],
    ],
)
def test_what_is_left_to_the_general_way_has_taken_no_leaves(tree: Any) -> None:
    leaves: list[Any] = [None]
    assert pack_wide(tree, is_array, leaves) is None and leaves == [None]
    structure, leaves = flatten(tree, is_array)
    np.testing.assert_equal(fill(structure, leaves), tree)


def test_what_cannot_be_sent_is_refused_as_ever() -> None:
    for tree in ([*many(9), object()], {**{str(i): x for i, x in enumerate(many(9))}, "x": {1, 2}}):
        with pytest.raises(UnsupportedTensorError, match="cannot be sent"):
            flatten(tree, is_array)


def test_containers_are_new_each_time() -> None:
    tree = [{"a": many(9), "b": (many(2), [])}, many(20)]
    structure, leaves = flatten(tree, is_array)
    first, second = fill(structure, leaves), fill(structure, leaves)
    first[0]["a"].clear()
    first[0]["b"][1].append(1)
    first[1].append(1)
    assert len(second[0]["a"]) == 9 and second[0]["b"][1] == [] and len(second[1]) == 20
    assert len(fill(structure, leaves)[0]["a"]) == 9 and len(leaves) == 31


def test_holes_out_of_order_are_filled_by_their_numbers() -> None:
    tree = [[Leaf(2), Leaf(1), Leaf(0)], {"x": Leaf(3)}]
    filling = filling_of(tree, Leaf)
    assert filling is not None and filling(list("abcd")) == [["c", "b", "a"], {"x": "d"}]
    packed = [msgpack.ExtType(LEAF, msgpack.packb(i)) for i in (1, 0)]
    assert structures.fill(msgpack.packb([packed, {}]), ["a", "b"]) == [["b", "a"], {}]


def test_what_can_be_changed_is_not_shared() -> None:
    assert filling_of([Leaf(0), collections.OrderedDict()], Leaf) is None
    assert filling_of([Leaf(0), np.float32(1)], Leaf) is None
    assert filling_of({Leaf(0): 1}, Leaf) is None
