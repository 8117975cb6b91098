"""Call a model of another process, environment and framework as a local function, gradients included.

>>> import gradwire as gw
>>> with gw.connect() as bridge:
...     worker = bridge.worker("torch", python="envs/torch/bin/python")
...     energy = worker.function("physics.py:energy")
...     y, pullback = energy.vjp(x)

Importing this package imports no framework: ``gw.torch``, ``gw.jax``, ``gw.tensorflow`` and ``gw.keras`` are
loaded on first use, by the program that has that framework anyway. Whatever else is here but errors is loaded on
first use too, so that a program pays for it when it connects and not when it starts.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gradwire import exits  # noqa: F401 (registered before what the program registers, see there)
from gradwire.loading import needed
from gradwire_wire.errors import (
    ClosedError,
    ConnectError,
    DeadlineError,
    DtypeError,
    ForkedError,
    GradwireError,
    MemoryExhaustedError,
    ProtocolError,
    RemoteError,
    ResidualLostError,
    TransportError,
    UnknownTargetError,
    UnsupportedTensorError,
    UsageError,
    VersionMismatchError,
    WorkerDiedError,
    WorkerError,
    WorkerStartError,
)

if TYPE_CHECKING:  # the names that `__getattr__` finds, for type checkers and editors
    from gradwire.bridge import Bridge, connect
    from gradwire.conversion import to_jax, to_numpy, to_tf, to_torch
    from gradwire.optimizer import Optimizer
    from gradwire.pullback import Pullback
    from gradwire.remote import Remote
    from gradwire.specs import ShapeDtype
    from gradwire.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "Bridge",
    "ClosedError",
    "ConnectError",
    "DeadlineError",
    "DtypeError",
    "ForkedError",
    "GradwireError",
    "MemoryExhaustedError",
    "Optimizer",
    "ProtocolError",
    "Pullback",
    "Remote",
    "RemoteError",
    "ResidualLostError",
    "ShapeDtype",
    "TransportError",
    "UnknownTargetError",
    "UnsupportedTensorError",
    "UsageError",
    "VersionMismatchError",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStartError",
    "connect",
    "to_jax",
    "to_numpy",
    "to_tf",
    "to_torch",
]

_FACES = ("jax", "keras", "tensorflow", "torch")
_HOMES = {
    "Bridge": "bridge",
    "Optimizer": "optimizer",
    "Pullback": "pullback",
    "Remote": "remote",
    "ShapeDtype": "specs",
    "Worker": "worker",
    "connect": "bridge",
    "to_jax": "conversion",
    "to_numpy": "conversion",
    "to_tf": "conversion",
    "to_torch": "conversion",
}
"""The modules of the public names that are not here yet."""


def __getattr__(name: str) -> Any:
    if name in _FACES:
        return _face(name)
    if name not in _HOMES:
        raise AttributeError(
            f"module 'gradwire' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    found = globals()[name] = getattr(needed(f"gradwire.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    """What is for users. Of the faces those that are loaded: who completes names looks at each, and would load the rest."""
    return sorted({*__all__, *(name for name in globals() if name in _FACES or name.startswith("__"))})


def _face(name: str) -> Any:
    try:
        return needed(f"gradwire.{name}")
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModuleNotFoundError(
            f"gw.{name} is for programs that have {name} themselves, and this one's environment ({sys.prefix}) has none. "
            "What a worker has is in the worker's environment",
            name=name,
        ) from None
