"""What to do about a value that cannot be sent: the end of the sentence that refuses it."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

__all__ = ["instead_of"]

_BY_NAME = "send its name, a str, and look it up on the other side"
_OF_A_CACHE = "call the model with use_cache=False, or have the factory make a module that calls generate"
_KNOWN = {
    "keras.KerasTensor": "it stands for a tensor of a Keras model that is being built: call the remote function in a layer, "
    "keras.layers.Lambda(remote) or a keras.Layer whose call() does (a module with weights: gw.keras.Layer(remote))",
    "torch.Proxy": "it stands for a tensor while torch.fx traces a program: make the module that calls the remote function a leaf "
    "(torch.fx.Tracer.is_leaf_module), or give torch.fx.wrap a function that does",
    "transformers.DynamicCache": _OF_A_CACHE,
    "transformers.EncoderDecoderCache": _OF_A_CACHE,
    "torch.SymInt": "it is a size that torch keeps open while it traces a program: send int(x), which fixes it",
    "torch.SymFloat": "it is a number that torch keeps open while it traces a program: send float(x), which fixes it",
    "torch.device": "send str(x)",
    "torch.dtype": _BY_NAME,
    "tensorflow.DType": _BY_NAME,
    "jax._ScalarMeta": _BY_NAME,
}
"""By package and class, what does not tell by itself. (What frameworks trace programs with says that it has everything.)"""

_ITSELF_PLAIN = (
    "unfreeze",  # Flax's, whose dict() has more of them inside
    "to_pure_dict",
    "model_dump",  # pydantic's
    "tolist",  # columns of tables with text in them
    "to_list",
)
"""Methods that give a plain value for an object."""


def instead_of(x: Any) -> str:
    """What can be sent in its place, or how else it gets there."""
    known = _KNOWN.get(f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}")
    return known or _array(x) or _plain(x) or _result(x) or _made_there(x)


def _array(x: Any) -> str | None:
    if hasattr(x, "as_list") and hasattr(x, "rank"):
        return "a shape can be sent as x.as_list()"
    if _shows_an_array(x) and _is_array_like(x):
        return "send numpy.asarray(x)"
    for dense in ("toarray", "todense"):  # scipy's sparse ones, and JAX's
        if hasattr(type(x), dense):
            return f"send x.{dense}(), or its parts"
    return None


def _plain(x: Any) -> str | None:
    for method in _ITSELF_PLAIN:
        if hasattr(type(x), method):
            return f"send x.{method}()"
    if isinstance(x, Enum):
        return "send x.value"
    if isinstance(x, os.PathLike):
        return "send os.fspath(x)"
    if isinstance(x, np.dtype) or (isinstance(x, type) and issubclass(x, np.generic)):
        return _BY_NAME
    if isinstance(x, Mapping) or hasattr(type(x), "keys"):
        return "send dict(x)"
    if hasattr(type(x), "to_dict"):
        return "send x.to_dict()"
    if hasattr(type(x), "__attrs_attrs__"):
        return "send attrs.asdict(x)"
    if type(x).__module__ in ("types", "argparse") and hasattr(x, "__dict__"):  # namespaces
        return "send vars(x)"
    for plain in (int, float, complex, str, bytes, tuple, list):
        if isinstance(x, plain):
            return f"send {plain.__name__}(x)"
    if isinstance(x, Sequence) or (
        isinstance(x, Iterable) and type(x).__module__ in ("builtins", "collections")
    ):
        return "send list(x)"
    return None


def _result(x: Any) -> str | None:
    """Of what will have one."""
    if hasattr(x, "__await__"):
        return "await it, and send what it gives"
    if hasattr(x, "add_done_callback"):
        return "it will have a result: wait for that (.result()), or make the call by .submit(...), which takes futures"
    return None


def _made_there(x: Any) -> str:
    if callable(x):
        return "what is called stays in its process: load it there by worker.function(...), what a factory makes by worker.module(...)"
    return "convert it, or make it inside the worker"


def _shows_an_array(x: Any) -> bool:
    """By numpy's protocols, as Pillow's images do, or as a buffer, as array.array does."""
    return any(hasattr(type(x), name) for name in ("__array__", "__array_interface__")) or type(x) is array


def _is_array_like(x: Any) -> bool:
    """Whether numpy makes a plain array of it. (A symbolic tensor says so, and refuses.)"""
    try:
        return bool(np.asarray(x).dtype.kind in "biufc")
    except Exception:
        return False
