"""Modules and optimizers of which the worker tells how many are there."""

from __future__ import annotations

import weakref
from typing import Any

import torch

_nets: weakref.WeakSet[Any] = weakref.WeakSet()
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


class Net(torch.nn.Linear):
    def __init__(self, numbers: int = 0) -> None:
        super().__init__(3, 2)
        self.much = torch.ones(numbers)
        self.me = [self]  # a part of a cycle, as modules are
        _nets.add(self)


class SGD(torch.optim.SGD):
    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        _optimizers.add(self)


def there() -> list[int]:
    """How many modules, and how many optimizers."""
    return [len(_nets), len(_optimizers)]
