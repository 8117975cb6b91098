"""What holds a remote and is copied: pipelines that are cloned, models that are averaged."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

import gradwire as gw

Workers = Callable[[str], gw.Worker]


class WithEnergy(torch.nn.Module):
    """A model of this process whose last step is remote."""

    def __init__(self, energy: gw.Remote) -> None:
        super().__init__()
        self.linear, self.energy = torch.nn.Linear(3, 3).double(), energy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.energy(self.linear(x))
        return y


def test_a_function_is_its_own_copy_as_python_functions_are(worker_of: Workers) -> None:
    square = worker_of("numpy").function("in_numpy:square")
    holder = {"steps": [("square", square)]}
    assert copy.copy(square) is square
    assert copy.deepcopy(holder) == holder
    chosen = square.options(timeout=30.0)
    assert copy.deepcopy(chosen) is chosen
    with pytest.raises(gw.UsageError, match="another process makes its own"):
        pickle.dumps(square)


def test_a_model_that_holds_a_function_can_be_averaged(worker_of: Workers) -> None:
    net = WithEnergy(worker_of("torch").function("in_torch:cube"))
    averaged = torch.optim.swa_utils.AveragedModel(net)
    x = torch.ones(2, 3, dtype=torch.float64)
    averaged.update_parameters(net)
    np.testing.assert_allclose(averaged(x).detach(), net(x).detach())
    with torch.no_grad():
        net.linear.weight += 1.0
    assert not torch.allclose(averaged(x), net(x))


def test_a_module_is_shared_by_a_function_that_calls_it(worker_of: Workers) -> None:
    """Its copy would be another module, which only its worker could make."""
    net = worker_of("torch").module("in_torch:make_block", [3, 4])
    for attempt in (copy.copy, copy.deepcopy):
        with pytest.raises(gw.UsageError, match=r"copies share the module: lambda x: net\(x\)"):
            attempt(net)
    copied = copy.deepcopy({"net": lambda x: net(x)})["net"]
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(copied(x), net(x))


def test_a_pipeline_is_cloned_and_searched(worker_of: Workers) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    square, rng = worker_of("numpy").function("in_numpy:square"), np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    y = (x**2).sum(1) > 3
    remote, local = (
        make_pipeline(FunctionTransformer(f), LogisticRegression()) for f in (square, lambda x: x * x)
    )
    np.testing.assert_array_equal(cross_val_score(remote, x, y, cv=3), cross_val_score(local, x, y, cv=3))
    grid = {"logisticregression__C": [0.1, 1.0]}
    import joblib

    with joblib.parallel_backend("threading"):
        found = GridSearchCV(remote, grid, cv=3, n_jobs=2, error_score="raise").fit(x, y)
    assert found.best_score_ == GridSearchCV(local, grid, cv=3).fit(x, y).best_score_
