"""Arguments and results of calls from the shell: numpy's own files, and JSON. Never a pickle."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from gradwire_wire.errors import UsageError
from gradwire_wire.structures.values import field_names, is_record

__all__ = ["fields_of", "read_argument", "write_result"]


def read_argument(text: str) -> Any:
    """An array from a ``.npy`` file, or else what the JSON says. UsageError."""
    if text.endswith(".npy"):
        return _read_array(text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(
            f"{text!r} is neither a .npy file nor JSON; write a text in quotation marks of its own, '\"{text}\"'"
        ) from None


def _read_array(path: str) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            return np.lib.format.read_array(file)  # no pickle: it is not allowed to
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (
        Exception
    ) as error:  # numpy's own parsing of what may be any bytes: nearly all that Python can raise
        raise UsageError(
            f"{path} is not an array file that can be read: {type(error).__name__}: {error}"
        ) from error


def write_result(path: Path, result: Any) -> None:
    """One array to a ``.npy`` file; several, with the names of a dict or dataclass, or as arr_0, arr_1, …, to ``.npz``. UsageError."""
    named = _named(result)
    if path.suffix == ".npy" and len(named) == 1:
        np.save(path, next(iter(named.values())))
    elif path.suffix == ".npz":
        _save_all(path, named)
    else:
        what = "one array" if len(named) == 1 else f"{len(named)} arrays"
        raise UsageError(
            f"the result is {what}: --out needs {'.npy or .npz' if len(named) == 1 else '.npz'}, not {path.name!r}"
        )


def _save_all(path: Path, named: dict[str, np.ndarray]) -> None:
    """As by `numpy.savez`, which takes some names ("file") for its own arguments."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in named.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array)  # of numbers: `_array` has seen to that


def _named(result: Any) -> dict[str, np.ndarray]:
    result = fields_of(result)
    items = (
        list(result.items())
        if isinstance(result, dict)
        else [(f"arr_{i}", item) for i, item in enumerate(result)]
        if isinstance(result, (list, tuple))
        else [("arr_0", result)]
    )
    return {str(name): _array(value, str(name)) for name, value in items}


def _array(value: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:  # a list whose items have different shapes
        array = np.empty(0, object)
    if array.dtype.hasobject or array.dtype.kind in "SU":
        raise UsageError(
            f"{name} of the result is no array of numbers; print it with --json instead of --out"
        )
    return array


def fields_of(x: Any) -> Any:
    """A dataclass as a dict by the names of its fields; anything else as it is."""
    return {name: getattr(x, name) for name in field_names(type(x))} if is_record(x) else x
