"""The numpy worker: the reference for the others, and a home for code of any kind that speaks numpy.

numpy has no derivatives, so a function brings its own, as attributes; all are optional:

``f.vjp(*args, **kwargs) -> (out, pullback)``
    ``pullback(out_bar)`` gives a tuple like ``args``; where a keyword holds an array it is called as
    ``pullback(out_bar, kwargs=True)`` and gives ``(args_bar, kwargs_bar)``. ``out_bar`` is like ``out`` with a
    cotangent for each inexact array and None for the others. None anywhere in the result means: not used.
    Cotangents are adjoints in Re<a, b>. The pullback may be called any number of times.
``f.jvp(primals, tangents, **kwargs) -> (out, out_dot)``
    ``tangents`` is like ``primals``, with zeros where nothing moves and None for what cannot. It runs
    after the call, with ``numpy.random`` in the state that the call found; a generator of the function's own it must not draw from.
``f.spec(*args, **kwargs) -> out``
    Like the call, but arrays are stand-ins with ``shape`` and ``dtype`` only, in the arguments and in the result.

A gradwire ``Remote`` has the first two itself, so a remote can be served on. Second derivatives are refused.
Batches run row by row. numpy scalars in a result (``x.sum()``) are taken for arrays without axes.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from gradwire_wire.errors import UsageError
from gradwire_wire.tensors.numpy import NAME, adopt, adopter, aval, export, export_all, is_tensor
from gradwire_workers.numpy import blas
from gradwire_workers.numpy.calls import ShapeDtype
from gradwire_workers.numpy.program import NumpyProgram
from gradwire_workers.targets import cannot_be_called

__all__ = [
    "NAME",
    "ShapeDtype",
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

adopt_operand = adopt


def prepare(threads: int | None, x64: bool | None, device: str | None) -> None:
    """threads: numpy's libraries read the environment when they are loaded, so it is set before."""
    if device not in (None, "cpu"):
        raise UsageError(f"a numpy worker has the device 'cpu' only, not {device!r}")


def resize(threads: int) -> int:
    blas.resize(threads)
    return _threads()


def _threads() -> int:
    said = os.environ.get("OMP_NUM_THREADS", "")
    return blas.size() or (int(said) if said.isdigit() else len(os.sched_getaffinity(0)))


def facts() -> dict[str, Any]:
    return {
        "framework": NAME,
        "version": np.__version__,
        "devices": ["cpu"],
        "threads": _threads(),
        "numpy": np.__version__,
    }


def program(obj: Any, *, is_module: bool) -> NumpyProgram:
    if not callable(obj):
        raise cannot_be_called(obj, is_module)
    return NumpyProgram(obj, is_module)
