"""The PyTorch worker: plain autograd on kept graphs. See `gradwire_workers.program.Engine`.

``program`` is the loaded target, ``tape`` its derivatives, ``kept`` its kept calls, ``shapes`` and ``shadows`` its spec,
``state`` a module's state, ``optimizers`` what moves it, ``functional`` the module as a function of its parameters.
"""

from __future__ import annotations

import os
from typing import Any

# Huge pages for large tensors, which torch reads at its first allocation: new memory of 40 MB costs 7 ms instead of 18.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import numpy as np
import torch

from gradwire_wire.errors import UsageError
from gradwire_wire.tensors.torch import NAME, adopt, adopter, aval, export, is_tensor
from gradwire_workers.keras_layers import is_keras_layer
from gradwire_workers.targets import cannot_be_called
from gradwire_workers.torch.program import TorchProgram

__all__ = [
    "NAME",
    "adopt",
    "adopt_operand",
    "adopter",
    "aval",
    "export",
    "export_all",
    "facts",
    "is_tensor",
    "prepare",
    "program",
    "resize",
]

adopt_operand, export_all = adopt, None
_device = torch.device("cpu")


def prepare(threads: int | None, x64: bool | None, device: str | None) -> None:
    """x64 changes nothing: torch always has 64-bit types. device: modules and operands are moved there.

    Raises UsageError for a device that is not there.
    """
    global _device
    if threads is not None:
        torch.set_num_threads(threads)
    if device is not None:
        try:
            _device = torch.empty(1, device=torch.device(device)).device
        except (RuntimeError, AssertionError) as error:
            raise UsageError(
                f"this worker has no device {device!r}: {error}. It has {', '.join(_devices())}"
            ) from error


def resize(threads: int) -> int:
    torch.set_num_threads(threads)
    return torch.get_num_threads()


def _devices() -> list[str]:
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def facts() -> dict[str, Any]:
    return {
        "framework": NAME,
        "version": torch.__version__,
        "devices": _devices(),
        "device": str(_device),
        "threads": torch.get_num_threads(),
        "numpy": np.__version__,
    }


def program(obj: Any, *, is_module: bool) -> TorchProgram:
    """is_module: whether a factory made obj; what counts is whether it is a torch.nn.Module."""
    if not callable(obj):
        raise cannot_be_called(obj, is_module)
    if is_keras_layer(obj):
        from gradwire_workers.torch.keras import KerasModule  # imports Keras, which its owner has

        obj = KerasModule(obj)
    return TorchProgram(obj, _device)
