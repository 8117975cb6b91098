"""The table: every caller × every worker × every kind of function, equal to the worker's framework in process.

Forward bit for bit (one thread on both sides, the same grad mode, compiled where the worker compiles);
gradients and tangents to 1e-6 in float32 and 1e-12 in float64, relative to the largest entry.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from tests.conformance.callers import (
    CALLERS,
    JaxCaller,
    NumpyCaller,
    TensorflowCaller,
    TorchCaller,
    inexact,
    leaves_of,
)

TARGETS = pathlib.Path(__file__).parent / "targets"
WORKERS = ("torch", "tensorflow", "jax", "numpy")
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
FUNCTIONS = ("affine", "two", "keywords", "pick", "tree")


def arguments(function: str, dtype: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of one row of the table."""
    rng = np.random.default_rng(7)
    x, w = rng.normal(size=(5, 4)).astype(dtype), rng.normal(size=(4, 3)).astype(dtype)
    index = np.array([0, 2, 2], np.int64 if dtype == "float64" else np.int32)
    return {
        "affine": ((x, w), {}),
        "two": ((x, w), {}),
        "keywords": ((x,), {"scale": 3.0, "mode": "a", "mask": None}),
        "pick": ((w, index), {}),
        "tree": (({"a": x, "b": [x * 2, 0.5]},), {"step": 3}),
    }[function]


class InProcess:
    """The oracle: the worker's framework in this process, called as its own users would."""

    def __init__(self, worker: str, function: str) -> None:
        self.worker = worker
        self.function = getattr(importlib.import_module(f"in_{worker}"), function)
        oracles = {
            "torch": TorchCaller,
            "numpy": NumpyCaller,
            "jax": lambda: JaxCaller(True),
            "tensorflow": lambda: TensorflowCaller(False),
        }
        self.caller = oracles[worker]()

    def forward(self, args: Any, kwargs: Any) -> list[np.ndarray]:
        return self.caller.forward(self.function, args, kwargs)

    def gradients(self, args: Any, kwargs: Any, cts: Any) -> list[np.ndarray]:
        if self.worker == "numpy" and kwargs:
            out, pullback = self.function.vjp(*args, **kwargs)
            return [x for x in leaves_of(pullback(_bar(out, cts)))]
        return self.caller.gradients(self.function, args, kwargs, cts)

    def tangents(self, args: Any, kwargs: Any, dots: Any) -> list[np.ndarray]:
        if (
            self.worker == "tensorflow"
        ):  # the pullback is linear: its transpose, by finite sums, is the tangent
            return _transposed_pullback(self, args, kwargs, dots)
        if self.worker == "numpy":
            given = iter(dots)
            from tests.conformance.callers import with_leaves

            tangents = with_leaves(
                args,
                [
                    next(given) if i in inexact(leaves_of(args)) else None
                    for i, _ in enumerate(leaves_of(args))
                ],
            )
            return leaves_of(self.function.jvp(args, tangents, **kwargs)[1])
        return self.caller.tangents(self.function, args, kwargs, dots)


def _bar(out: Any, cts: Any) -> Any:
    from tests.conformance.callers import with_leaves

    leaves = leaves_of(out)
    given = iter(cts)
    return with_leaves(out, [next(given) if i in inexact(leaves) else None for i, _ in enumerate(leaves)])


def _transposed_pullback(oracle: InProcess, args: Any, kwargs: Any, dots: Any) -> list[np.ndarray]:
    outs = oracle.forward(args, kwargs)
    shapes = [(outs[i].shape, outs[i].dtype) for i in inexact(outs)]
    tangents = [np.zeros(shape, dtype) for shape, dtype in shapes]
    for k, (shape, _) in enumerate(shapes):
        for where in np.ndindex(*shape):
            cts = [np.zeros(s, d) for s, d in shapes]
            cts[k][where] = 1
            grads = oracle.gradients(args, kwargs, cts)
            tangents[k][where] = sum((g * d).sum() for g, d in zip(grads, dots, strict=True))
    return tangents


def assert_close(got: list[np.ndarray], wanted: list[np.ndarray], tolerance: float) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max(initial=0))))


def test_the_comparison_can_fail() -> None:
    with pytest.raises(AssertionError):
        assert_close([np.zeros(2)], [np.full(2, 1e-11)], 1e-12)
    with pytest.raises(AssertionError):
        assert_close([np.zeros(2, "f4")], [np.zeros(2, "f8")], 1e-12)


@pytest.fixture(scope="module")
def bridge() -> Iterator[gw.Bridge]:
    with gw.connect() as made:
        yield made


@pytest.fixture(scope="module", params=WORKERS)
def worker(request: pytest.FixtureRequest, bridge: gw.Bridge) -> Iterator[gw.Worker]:
    framework = request.param
    python = None if framework == "numpy" else request.getfixturevalue(f"{framework}_python")
    made = bridge.worker(
        framework, python=python, path=[TARGETS], threads=1, x64=True if framework == "jax" else None
    )
    made.framework = framework
    yield made
    made.close()


@pytest.fixture(scope="module", autouse=True)
def targets_in_process() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TARGETS))
        for framework in WORKERS:  # other suites have targets of the same name
            patch.delitem(sys.modules, f"in_{framework}", raising=False)
        yield
        for framework in WORKERS:
            sys.modules.pop(f"in_{framework}", None)
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("caller", CALLERS)
def test_cell(worker: gw.Worker, caller: str, function: str, dtype: str) -> None:
    args, kwargs = arguments(function, dtype)
    remote, oracle = (
        worker.function(f"in_{worker.framework}:{function}"),
        InProcess(worker.framework, function),
    )

    wanted = oracle.forward(args, kwargs)
    got = CALLERS[caller].forward(remote, args, kwargs)
    assert [x.dtype for x in got] == [x.dtype for x in wanted]
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)

    rng = np.random.default_rng(8)
    cts = [np.asarray(rng.normal(size=wanted[i].shape), dtype) for i in inexact(wanted)]
    grads = CALLERS[caller].gradients(remote, args, kwargs, cts)
    assert_close(grads, oracle.gradients(args, kwargs, cts), TOLERANCE[dtype])

    arrays = leaves_of(args)
    dots = [np.asarray(rng.normal(size=arrays[i].shape), dtype) for i in inexact(arrays)]
    tangents = CALLERS[caller].tangents(remote, args, kwargs, dots)
    if tangents is not None:
        assert_close(tangents, oracle.tangents(args, kwargs, dots), TOLERANCE[dtype])


@pytest.mark.parametrize("caller", CALLERS)
def test_result_tree(worker: gw.Worker, caller: str) -> None:
    """Containers, keywords and scalars come back as they were, in every caller's eager mode."""
    args, kwargs = arguments("keywords", "float32")
    remote = worker.function(f"in_{worker.framework}:keywords")
    if CALLERS[caller].compiled or caller == "numpy":
        out = remote(*args, **kwargs)
        assert out["aux"][1:] == (None, "a", 3) and list(out) == ["y", "aux"] and type(out["aux"]) is tuple
        assert isinstance(out["y"], np.ndarray) and out["y"].flags.writeable
