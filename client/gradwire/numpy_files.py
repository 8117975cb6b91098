"""Arguments and results of calls from the shell: numpy's own files, and JSON. Never a pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from gradwire_wire.errors import UsageError

__all__ = ["read_argument", "write_result"]


def read_argument(text: str) -> Any:
    """An array from a ``.npy`` file, or else what the JSON says. UsageError."""
    if text.endswith(".npy"):
        try:
            return np.load(text)
        except OSError as error:
            raise UsageError(f"{text} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise UsageError(f"{text} is not an array file that can be read: {error}") from error
    try:
        return json.loads(text)
    except ValueError:
        raise UsageError(
            f"{text!r} is neither a .npy file nor JSON; write a text in quotation marks of its own, '\"{text}\"'"
        ) from None


def write_result(path: Path, result: Any) -> None:
    """One array to a ``.npy`` file; several, with the names of a dict or as arr_0, arr_1, …, to ``.npz``. UsageError."""
    named = _named(result)
    if path.suffix == ".npy" and len(named) == 1:
        np.save(path, next(iter(named.values())))
    elif path.suffix == ".npz":
        np.savez(path, **named)  # type: ignore[arg-type]
    else:
        what = "one array" if len(named) == 1 else f"{len(named)} arrays"
        raise UsageError(
            f"the result is {what}: --out needs {'.npy or .npz' if len(named) == 1 else '.npz'}, not {path.name!r}"
        )


def _named(result: Any) -> dict[str, np.ndarray]:
    items = (
        list(result.items())
        if isinstance(result, dict)
        else [(f"arr_{i}", item) for i, item in enumerate(result)]
        if isinstance(result, (list, tuple))
        else [("arr_0", result)]
    )
    arrays = {str(name): np.asarray(value) for name, value in items}
    odd = [name for name, array in arrays.items() if array.dtype.hasobject or array.dtype.kind in "SU"]
    if odd:
        raise UsageError(
            f"{odd[0]} of the result is no array of numbers; print it with --json instead of --out"
        )
    return arrays
