"""Any tree of any tensors, through every worker and back: bit for bit, and element by element inside the worker."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradwire as gw
from tests.integration.inhabitants import (
    DTYPES,
    WORKERS,
    as_family,
    assert_same_bits,
    has,
    numpy_dtype,
    wide,
)
from tests.integration.targets import elements as in_process

Workers = Callable[[str], gw.Worker]


class Pair(NamedTuple):
    """A namedtuple whose class the worker does not have."""

    first: Any
    second: Any


@st.composite
def arrays(draw: st.DrawFn, names: list[str]) -> np.ndarray:
    """Of any dtype and bits; few axes, of few elements or of pages; any strides that a view can have, and any address."""
    name = draw(st.sampled_from(names))
    dtype = numpy_dtype(name)
    large = draw(st.integers(0, 5)) == 0  # large enough for shared memory
    shape = draw(st.lists(st.integers(0, 3), max_size=4)) + ([draw(st.integers(2000, 4500))] if large else [])
    steps = [draw(st.integers(1, 2)) for _ in shape]
    whole = [n * step for n, step in zip(shape, steps, strict=True)]
    offset = draw(st.sampled_from([0, 0, 1, 4, 16]))
    count = math.prod(whole) * dtype.itemsize
    bits = np.random.default_rng(draw(st.integers(0, 99))).integers(
        0, 2 if name == "bool" else 256, count + offset, np.uint8
    )
    x = bits[offset:].view(dtype).reshape(whole)
    x = x[*(slice(None, None, draw(st.sampled_from([step, -step]))) for step in steps), ...]
    x = x.transpose(draw(st.permutations(range(x.ndim))))
    change = draw(st.sampled_from(["none", "none", "Fortran", "row", "broadcast", "big-endian", "read-only"]))
    if change == "Fortran":
        return np.asfortranarray(x)
    if change == "row" and x.ndim and len(x):
        return x[0, ...]
    if change == "broadcast" and not large:
        return np.broadcast_to(x, (2, *x.shape))
    if change == "big-endian" and dtype.kind in "iufc" and dtype.itemsize > 1:
        return x.view(dtype.newbyteorder(">"))
    if change == "read-only":
        x.flags.writeable = False
    return x


PYTHON = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
)
SCALARS = st.one_of(
    PYTHON,
    st.sampled_from([np.float32(0.1), np.int8(-1), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1j)]),
)
KEYS = st.one_of(st.text(max_size=4), st.integers(-(2**63), 2**64 - 1), st.booleans(), st.none())


def trees(leaves: st.SearchStrategy[Any], framework: str) -> st.SearchStrategy[Any]:
    """A numpy worker's scalars are results: what numpy makes of arrays without axes, and arrays they become."""
    scalars = PYTHON if framework == "numpy" else SCALARS

    def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(children, max_size=4),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(KEYS, children, max_size=3),
            st.dictionaries(KEYS, children, max_size=3).map(OrderedDict),
            st.tuples(children, children).map(lambda x: Pair(*x)),
        )

    return st.recursive(st.one_of(leaves, leaves, scalars), containers, max_leaves=8)


def assert_same_tree(family: str, found: Any, sent: Any) -> None:
    """The same containers in the same order, scalars of the same type and value, tensors of the same bits."""
    if isinstance(sent, np.ndarray):
        assert_same_bits(family, found, sent)
    elif isinstance(sent, dict):
        assert type(found) is type(sent)
        assert [(type(k), k) for k in found] == [(type(k), k) for k in sent]
        for key in sent:
            assert_same_tree(family, found[key], sent[key])
    elif isinstance(sent, list | tuple):
        assert type(found) is type(sent)
        assert len(found) == len(sent)
        for x, y in zip(found, sent, strict=True):
            assert_same_tree(family, x, y)
    else:
        assert (type(found), repr(found)) == (type(sent), repr(sent))


def mapped(tree: Any, f: Callable[[np.ndarray], Any]) -> Any:
    if isinstance(tree, np.ndarray):
        return f(tree)
    if isinstance(tree, dict):
        return type(tree)((key, mapped(child, f)) for key, child in tree.items())
    if isinstance(tree, list | tuple):
        items = [mapped(child, f) for child in tree]
        return Pair(*items) if isinstance(tree, Pair) else type(tree)(items)
    return tree


def test_the_comparison_can_fail() -> None:
    x = np.zeros(2)
    assert_same_tree("numpy", [x, {1: (None,)}], [x, {1: (None,)}])
    for found, sent in [([x], (x,)), ({1: x, 2: x}, {2: x, 1: x}), (1, True), (0.0, -0.0), ([x], [x, x])]:
        with pytest.raises(AssertionError):
            assert_same_tree("numpy", found, sent)
    with pytest.raises(AssertionError):
        assert_same_tree("numpy", [x], [np.negative(x)])


quick = settings(
    max_examples=30,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("framework", WORKERS)
def test_any_tree_through_every_worker_and_back(worker_of: Workers, framework: str) -> None:
    """From a numpy caller. The tracing workers run it eagerly: a trace for each tree would show nothing more."""
    names = [name for name in DTYPES if has(framework, name)]
    remote = worker_of(framework).function("any_framework:identity")
    if framework in ("jax", "tensorflow"):
        remote = remote.options(compile=False)

    @quick
    @given(trees(arrays(names), framework), st.booleans())
    def run(tree: Any, by_keyword: bool) -> None:
        assert_same_tree("numpy", remote(x=tree) if by_keyword else remote(tree), tree)

    run()


@pytest.mark.parametrize("framework", WORKERS)
def test_every_element_is_what_it_was_inside_the_worker(worker_of: Workers, framework: str) -> None:
    """By indexing there; what numpy's own small floats print, all print. (NaN is the same text whatever its bits.)"""
    kinds = ["bool", "int16", "uint8", "int64", "float16", "float32", "float64", "complex64", "bfloat16"]
    remote = worker_of(framework).function("elements:tree_elements")
    if framework in ("jax", "tensorflow"):
        remote = remote.options(compile=False)

    @quick
    @given(st.lists(arrays(kinds).filter(lambda x: x.size < 100), max_size=2))
    def run(tree: list[np.ndarray]) -> None:
        assert remote(tree) == [in_process.elements(x) for x in tree]

    run()


@pytest.mark.parametrize("family", ["torch", "jax", "tensorflow"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_any_tree_from_every_caller(worker_of: Workers, family: str, framework: str) -> None:
    names = [name for name in DTYPES if has(framework, name) and has(family, name)]
    remote = worker_of(framework).function("any_framework:identity").options(family=family)

    @settings(quick, max_examples=12)
    @given(trees(arrays(names), framework))
    def run(tree: Any) -> None:
        with wide(family), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            sent = mapped(tree, lambda x: as_family(family, x if family == "numpy" else native(x)))
            assert_same_tree(family, remote(sent), tree)

    run()


def native(x: np.ndarray) -> np.ndarray:
    """What torch can take: no negative strides, its own byte order, an address of whole elements."""
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    sound = x.flags.aligned and all(s >= 0 and s % x.itemsize == 0 for s in x.strides)
    return x if sound else np.copy(x, order="K") if min(x.strides, default=0) >= 0 else x.copy()
