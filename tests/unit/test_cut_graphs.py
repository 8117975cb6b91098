"""A pullback that reaches no argument is told of once: its zeros would be nobody's mistake to find."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

from gradwire_wire.structures import positional
from gradwire_wire.words import pullback_op
from gradwire_workers.cut_graphs import warn_of_cut
from gradwire_workers.evaluation import Request, evaluate
from gradwire_workers.program import Program, WorkerSite
from gradwire_workers.residuals import Kept, Residuals

TARGETS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch": {
        "by numpy": lambda x, w: torch.from_numpy(np.sin(x.detach().numpy())) * 2,
        "by a number": lambda x, w: torch.tensor(float(x.detach().sum())),
        "whole": lambda x, w: x * 2,
    },
    "tensorflow": {
        "by numpy": lambda x, w: np.sin(x.numpy()) * 2,
        "by a number": lambda x, w: tf.constant(float(tf.reduce_sum(x))),
        "whole": lambda x, w: x * 2,
    },
}
X = np.arange(3, dtype="f4")


def pulled_back(
    program: Program, way: str, wrt: tuple[int, ...], tensor: Callable[..., Any], given: bool = True
) -> None:
    """Call and pull back as a client makes it: of what was kept, or by running it again. given: whether with a cotangent."""
    site, store = WorkerSite(positional(2)), Residuals(1 << 20, 0)
    operands = [tensor(X), tensor(X)]
    result, residual = evaluate(program, site, (), Request(1, 1, 0, 0), operands, store)
    assert residual is not None
    token = store.add(Kept(residual, 1, b"a", 0)) if way == "kept" else 0
    cotangents = [tensor(np.ones(y.shape, "f4")) for y in result.tensors if given]
    word = (pullback_op(wrt, [given]),)
    asked = Request(1, 0, token, 0)
    found, _ = evaluate(program, site, word, asked, [*operands, *cotangents], store)
    warn_of_cut(program, site, word, found.tensors)


@pytest.mark.parametrize("way", ["kept", "again"])
@pytest.mark.parametrize("framework", list(TARGETS))
def test_a_target_that_leaves_its_framework_is_told_of_once(framework: str, way: str) -> None:
    engine = importlib.import_module(f"gradwire_workers.{framework}")
    tensor: Any = {"torch": torch.tensor, "tensorflow": tf.constant}[framework]
    for name in ("by numpy", "by a number"):
        program = engine.program(TARGETS[framework][name], is_module=False)
        program.name = "physics:energy"
        told = r"gradient of physics:energy is zero: those of its results that are used.*\.detach\(\).*numpy"
        with pytest.warns(UserWarning, match=told):
            pulled_back(program, way, (0, 1), tensor)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pulled_back(program, way, (0, 1), tensor)


@pytest.mark.parametrize("way", ["kept", "again"])
@pytest.mark.parametrize("framework", list(TARGETS))
def test_nobody_is_told_of_an_argument_that_is_not_used(framework: str, way: str) -> None:
    engine = importlib.import_module(f"gradwire_workers.{framework}")
    tensor: Any = {"torch": torch.tensor, "tensorflow": tf.constant}[framework]
    program = engine.program(TARGETS[framework]["whole"], is_module=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pulled_back(program, way, (0, 1), tensor)


def test_nobody_is_told_where_no_cotangent_was_given_and_who_gives_one_still_is() -> None:
    engine = importlib.import_module("gradwire_workers.torch")
    program = engine.program(TARGETS["torch"]["by numpy"], is_module=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pulled_back(program, "kept", (0, 1), torch.tensor, given=False)
    with pytest.warns(UserWarning, match="leave the framework"):
        pulled_back(program, "kept", (0, 1), torch.tensor)
