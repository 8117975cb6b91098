"""Every transformation of every caller through every worker equals the caller's own framework in process.

The table is in `tests.conformance.support`: which cells there are, and which are refused with which
sentence. A cell that is not refused gives the same to 1e-9 relative to the largest entry, in float64.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from tests.conformance import support

TARGETS = pathlib.Path(__file__).parent / "targets"
TOLERANCE = 1e-9
RNG = np.random.default_rng(3)
X, W = RNG.normal(size=4), RNG.normal(size=(4, 4))


def leaves(tree: Any) -> list[np.ndarray]:
    """All arrays of a result, in order, as numpy arrays."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for child in tree for leaf in leaves(child)]
    return [tree.detach().numpy() if hasattr(tree, "detach") else np.asarray(tree)]


def assert_equal(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert [(a.shape, a.dtype) for a in got] == [(b.shape, b.dtype) for b in wanted]
    for a, b in zip(got, wanted, strict=True):
        if a.dtype == bool:
            np.testing.assert_array_equal(a, b)
        else:
            scale = max(1.0, float(np.abs(b).max(initial=0)))
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * scale)


@pytest.mark.parametrize("wrong", [np.full(2, 1e-8), np.zeros(2, "f4"), np.zeros(3), np.zeros(2, bool)])
def test_the_comparison_can_fail(wrong: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        assert_equal([wrong], [np.zeros(2)])


@pytest.fixture(scope="module")
def bridge() -> Iterator[gw.Bridge]:
    with gw.connect() as made:
        yield made


@pytest.fixture(scope="module")
def remote_of(bridge: gw.Bridge, request: pytest.FixtureRequest) -> Callable[[str], gw.Remote]:
    """The function in a worker of that framework, each started when it is first asked for."""

    @cache
    def remote(framework: str) -> gw.Remote:
        python = None if framework == "numpy" else request.getfixturevalue(f"{framework}_python")
        x64 = True if framework == "jax" else None
        worker = bridge.worker(framework, python=python, path=[TARGETS], threads=1, x64=x64)
        return worker.function(f"in_{framework}:smooth")

    return remote


@pytest.fixture(scope="module")
def wanted_of() -> Iterator[Callable[[str, str], list[np.ndarray]]]:
    """What the caller's own framework makes of its own function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TARGETS))
        for framework in support.WORKERS:  # other suites have targets of the same name
            patch.delitem(sys.modules, f"in_{framework}", raising=False)

        @cache
        def wanted(framework: str, cell: str) -> list[np.ndarray]:
            *_, caller = (name for name, c in support.CALLERS.items() if c.framework == framework)
            function = importlib.import_module(f"in_{framework}").smooth
            return leaves(support.run(caller, cell, function, X, W))

        yield lambda caller, cell: wanted(support.CALLERS[caller].framework, cell)
        for framework in support.WORKERS:
            sys.modules.pop(f"in_{framework}", None)


@pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr Node:UserWarning"
)  # torch's linearize's own
@pytest.mark.parametrize("worker", support.WORKERS)
@pytest.mark.parametrize(
    ("caller", "cell"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] if "hessian" in row[1] or "compile" in row[1] else [])
        for row in support.ROWS
    ],
)
def test_cell(
    remote_of: Callable[[str], gw.Remote],
    wanted_of: Callable[[str, str], list[np.ndarray]],
    caller: str,
    cell: str,
    worker: str,
) -> None:
    refusal = support.refusal(caller, cell, worker)
    if refusal is None:
        assert_equal(leaves(support.run(caller, cell, remote_of(worker), X, W)), wanted_of(caller, cell))
        return
    with pytest.raises(
        Exception
    ) as caught:  # compiled programs raise their framework's errors, with our words
        support.run(caller, cell, remote_of(worker), X, W)
    assert refusal in str(caught.value)


def test_nothing_is_refused_that_is_not_there() -> None:
    cells = {(support.CALLERS[caller].framework, cell) for caller, cell in support.ROWS}
    assert {(c, cell) for c, those in support.OF_NUMPY.items() for cell in those} <= cells
    assert {cell for those in support.OF_ALL.values() for cell in those} <= {cell for _, cell in cells}


def test_the_page_is_the_table() -> None:
    page = support.PAGE.read_text(encoding="utf-8")
    assert page == support.page(), "write it anew: python -m tests.conformance.support"
