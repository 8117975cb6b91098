"""What a test of the torch caller calls: a remote function over `TorchHandle`, and the function itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import gradwire.torch
from gradwire.site import Site
from gradwire_wire.structures import flatten
from tests.doubles.torch_handle import TorchHandle

Function = Callable[..., Any]


class TorchRemote:
    """What `gradwire.Remote` does with torch tensors."""

    training: bool | None = None

    def __init__(self, target: Function, **site: Any) -> None:
        self.handle = TorchHandle(target)
        self.options = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return gradwire.torch.traced(self, args, kwargs)
        structure, leaves = flatten([list(args), kwargs], _is_leaf)
        return gradwire.torch.call(self.handle, Site(structure, **self.options), leaves)

    def described(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Site]:
        """Handle and site of a call."""
        structure, _ = flatten([args, kwargs], _is_leaf)
        return self.handle, Site(structure, training=self.training, **self.options)

    @property
    def counts(self) -> dict[str, int]:
        """Messages by kind."""
        return {k: n for k, n in self.handle.counts.items() if k not in ("released", "spec")}

    @property
    def alive(self) -> int:
        """Tokens that nobody gave back."""
        return len(self.handle.kept)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, torch.Tensor | np.ndarray)


@contextmanager
def remotes() -> Iterator[Callable[..., TorchRemote]]:
    """Makes remotes; afterwards every token must have been given back."""
    made: list[TorchRemote] = []

    def make(target: Function, **site: Any) -> TorchRemote:
        made.append(TorchRemote(target, **site))
        return made[-1]

    yield make
    gc.collect()
    for r in made:
        r.handle.close()
        assert not r.handle.kept, "tokens that nobody gave back"


def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two arguments, two results, nothing zero."""
    return torch.tanh(x @ w) * x.sum(), (x**3).sum()


def loss_of(function: Function) -> Function:
    """A scalar of both results."""

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, z = function(x, w)
        return (y**2).sum() + z

    return loss


def double(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def equal(got: Any, expected: Any, rtol: float = 1e-10, atol: float = 1e-10) -> None:
    """Same tree, dtypes, shapes and (nearly) the same values."""
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
