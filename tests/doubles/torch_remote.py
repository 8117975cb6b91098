"""What a test of the torch caller calls: a remote function over `TorchHandle`, and the function itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradwire.background import Background
from gradwire.remote import Remote
from gradwire.site import Site
from tests.doubles.torch_handle import TorchHandle

Function = Callable[..., Any]


class TorchRemote(Remote):
    """A `gradwire.Remote` whose worker is in this process. settings: of its sites, whatever its handle is of."""

    def __init__(self, target: Function, **settings: Any) -> None:
        self.handle: Any
        super().__init__(TorchHandle(target), Background("double"))  # type: ignore[arg-type]
        self._settings = settings

    def _site(self, structure: bytes, **overrides: Any) -> Site:
        return super()._site(structure, **{**overrides, **self._settings})

    @property
    def counts(self) -> dict[str, int]:
        """Messages by kind."""
        return {k: n for k, n in self.handle.counts.items() if k not in ("released", "spec")}

    @property
    def alive(self) -> int:
        """Tokens that nobody gave back."""
        return len(self.handle.kept)


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
