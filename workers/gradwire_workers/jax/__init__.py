"""JAX functions in a worker: see `gradwire_workers.program` for what each function here promises.

A target is traced once for each signature, and everything asked of it is compiled from that trace, as
under `jax.jit`: what its Python does otherwise (counters, `np.random`) happens once. A target that cannot
be traced, because it looks at values or keeps them from call to call, runs eagerly at every call:
``options(compile=False)`` asks for that from the beginning, ``compile=True`` forbids it.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import jax
import numpy as np

from gradwire_wire.errors import UsageError
from gradwire_wire.tensors.jax import NAME, adopt, aval, export, is_tensor
from gradwire_wire.tensors.jax import (
    numpy_view as adopt_operand,  # jitted programs take it as it is, 40 µs sooner
)
from gradwire_workers.jax.models import model_of
from gradwire_workers.jax.modules import ModuleProgram
from gradwire_workers.jax.programs import Program

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

adopter = export_all = None
_for_ever = contextlib.ExitStack()  # what it holds would end with the last reference to it


def prepare(threads: int | None, x64: bool | None, device: str | None) -> None:
    """Must come before JAX makes its backend: the size of XLA's thread pool is read then, from NPROC."""
    if threads is not None:
        os.environ.setdefault("NPROC", str(threads))
    if x64 is not None:
        jax.config.update("jax_enable_x64", x64)
    if device is not None:
        _use_device(device)
    _let_transfers_pass()


def _let_transfers_pass() -> None:
    """On this thread, whatever transfer guard the environment or the user's code sets for the process.

    A call is a transfer that its caller has asked for, and compiled programs take numpy arrays as they are, which JAX calls
    an implicit one. ``with jax.transfer_guard(...)`` in the user's code holds.
    """
    _for_ever.enter_context(jax.transfer_guard("allow"))


def _use_device(device: str) -> None:
    platform, _, number = device.partition(":")
    try:
        jax.config.update("jax_platforms", platform if platform == "cpu" else f"{platform},cpu")
        jax.config.update("jax_default_device", jax.devices(platform)[int(number or 0)])
    except (RuntimeError, IndexError, ValueError) as error:
        raise UsageError(f"JAX has no device {device!r} here, such as 'cpu' or 'cuda:0': {error}") from error


def resize(threads: int) -> int:
    """Let XLA begin anew with a pool of that size; the threads of the old one stay, and do nothing.

    Only on the CPU: a GPU's memory is not given back so easily.
    """
    try:
        if (
            all(device.platform == "cpu" for device in jax.devices())
            and jax.config.jax_default_device is None
        ):
            from jax.extend.backend import clear_backends

            clear_backends()
            os.environ.update(dict.fromkeys(("NPROC", "PJRT_NPROC"), str(threads)))
            jax.devices()
    except (ImportError, RuntimeError):
        pass
    return _threads()


def _threads() -> int:
    return int(os.environ.get("NPROC") or len(os.sched_getaffinity(0)))


def facts() -> dict[str, Any]:
    """``threads`` is what XLA's pool has, as far as can be told from outside."""
    return {
        "framework": NAME,
        "version": jax.__version__,
        "devices": [str(d) for d in jax.devices()],
        "threads": _threads(),
        "x64": bool(jax.config.jax_enable_x64),
        "numpy": np.__version__,
    }


def program(obj: Any, *, is_module: bool) -> Any:
    model = model_of(obj) if is_module else None
    if model is not None:
        return ModuleProgram.of(model)
    if not callable(obj):
        raise UsageError(
            f"a {type(obj).__name__} cannot be called; the factory must return a function or an object with __call__"
        )
    return Program(obj, is_module)
