"""A module's state in a file: safetensors, by name, with every dtype as it is. For all frameworks, over numpy memory."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from typing import Any, Iterator, Mapping

import numpy as np

from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import dtype_named
from gradwire_wire.errors import DtypeError, UsageError
from gradwire_workers.installation import how_to_install

__all__ = ["read", "write"]

# safetensors' own names of types in a file
_NAMES = {
    "BOOL": "bool",
    **{
        f"{letter}{bits}": f"{kind}{bits}"
        for letter, kind in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}
# What a file says of itself. transformers before 5 reads the weights of a torch model from no other than "pt".
_FORMATS = {"torch": "pt"}


def write(path: str, state: Mapping[str, Carrier], framework: str = "") -> None:
    """Written beside ``path`` and renamed: whoever reads it sees the former file or the whole new one.

    UsageError where the folder is missing or safetensors is; DtypeError for a type that the format does not have.
    """
    library = _library()
    refused = [f"{name} ({c.dtype.name})" for name, c in state.items() if c.dtype.name not in _NAMES.values()]
    if refused:
        raise DtypeError(
            f"safetensors has no such type: {', '.join(refused[:5])}. Nothing was written; take state_dict() and save it "
            "in a format of your own"
        )
    arrays = {name: np.ascontiguousarray(c.array) for name, c in state.items()}
    tensors = {
        name: _entry(library, state[name].dtype.name, state[name].array.shape, x)
        for name, x in arrays.items()
    }
    with _renamed(path) as beside:
        library.serialize_file(tensors, beside, metadata={"format": _FORMATS.get(framework, "gradwire")})


def read(path: str) -> dict[str, Carrier]:
    """What `write`, or any other program, has put there. UsageError where it is no such file."""
    library = _library()
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        found = library.deserialize(content)
    except library.SafetensorError as error:
        raise UsageError(f"{path} is not a whole safetensors file: {error}") from error
    return {name: _carrier(name, entry) for name, entry in found}


def _carrier(name: str, entry: Mapping[str, Any]) -> Carrier:
    dtype = dtype_named(_NAMES.get(entry["dtype"], ""))
    if dtype is None:
        raise DtypeError(f"{name} has the type {entry['dtype']}, which cannot be loaded here")
    array = np.frombuffer(entry["data"], dtype.carrier).reshape(entry["shape"])
    return Carrier(array.copy(), dtype)


def _entry(library: Any, dtype: str, shape: tuple[int, ...], array: np.ndarray) -> Any:
    """As this version of the library takes it: by address from 0.7 on, by bytes before."""
    if hasattr(library, "TensorSpec"):
        return library.TensorSpec(dtype=dtype, shape=shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
    return {"dtype": dtype, "shape": shape, "data": array.tobytes()}


@contextlib.contextmanager
def _renamed(path: str) -> Iterator[str]:
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UsageError(f"nothing was written: there is no folder {folder}; make it first")
    if os.path.isdir(path):
        raise UsageError(f"nothing was written: {path} is a folder; name a file in it")
    try:
        descriptor, beside = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=folder)
    except OSError as error:
        raise UsageError(f"nothing was written to {folder}: {error.strerror}") from error
    os.close(descriptor)
    try:
        yield beside
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _library() -> Any:
    try:
        import safetensors
    except ImportError:
        raise UsageError(
            f"save() and load() need safetensors, which {sys.executable} has not. Install with: {how_to_install('safetensors')}"
        ) from None
    return safetensors
