"""What ``gradwire bench`` asks of each caller: plain data, which goes to the caller's process as JSON. Pure."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire_wire.dtypes import dtype_named
from gradwire_wire.errors import UsageError

__all__ = [
    "CALLERS",
    "FAR_END",
    "MEASURE",
    "SIZES",
    "Plan",
    "Work",
    "default_works",
    "identity_of",
    "parsed_shape",
    "there",
]

FAR_END = Path(__file__).parent / "far_end"
MEASURE = FAR_END.with_name("measure.py")
"""What runs in the worker's environment."""
CALLERS = {
    "numpy": "numpy",
    "torch": "torch",
    "jax": "jax",
    "jax.jit": "jax",
    "tensorflow": "tensorflow",
}
"""Caller → the framework it needs here."""
SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
"""Bytes, for the picture: the identity of one float32 array."""


@dataclass(frozen=True)
class Work:
    """One thing to call. inputs: (shape, dtype) of each argument. kind: function or module."""

    name: str
    target: str
    kind: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True)
class Plan:
    """Everything a caller's process needs to know. seconds: about how long each figure is measured."""

    framework: str
    python: str | None
    threads: int | None
    path: tuple[str, ...]
    works: tuple[Work, ...]
    seconds: float
    sizes: tuple[int, ...] = field(default=SIZES)

    @staticmethod
    def of(plain: dict[str, Any]) -> Plan:
        """From what JSON made of ``dataclasses.asdict``."""
        works = tuple(
            Work(w["name"], w["target"], w["kind"], tuple((tuple(s), d) for s, d in w["inputs"]))
            for w in plain["works"]
        )
        return Plan(**{**plain, "works": works, "path": tuple(plain["path"]), "sizes": tuple(plain["sizes"])})


def default_works(framework: str) -> tuple[Work, ...]:
    """What is measured where the user names nothing: an identity, and a small model."""
    own = FAR_END / f"{framework}.py"
    return (
        Work("identity, one float32", f"{own}:identity", "function", (((1,), "float32"),)),
        Work("MLP 64→128→32, batch 256", f"{own}:make_mlp", "module", (((256, 64), "float32"),)),
    )


def identity_of(framework: str, nbytes: int) -> Work:
    """The identity of one array of so many bytes."""
    return Work(
        f"{nbytes} bytes", f"{FAR_END / framework}.py:identity", "function", (((nbytes // 4,), "float32"),)
    )


def parsed_shape(text: str) -> tuple[tuple[int, ...], str]:
    """``256x64:float32``, ``256x64``, or ``:float32`` for a scalar. UsageError says how it is written."""
    sizes, _, dtype = text.partition(":")
    dtype = dtype or "float32"
    known = dtype_named(dtype)
    if known is None or known.carrier != known.name:
        raise UsageError(f"--shape {text}: {dtype!r} is not a dtype of numpy's, such as float32 or int64")
    try:
        shape = tuple(int(n) for n in sizes.split("x")) if sizes else ()
    except ValueError:
        shape = (-1,)
    if any(n < 0 for n in shape):
        raise UsageError(f"--shape {text}: write it as 256x64 or 256x64:float32")
    return shape, dtype


def there() -> list[str]:
    """The callers whose framework is installed in this program's environment; none is imported for that."""
    return [
        caller
        for caller, needed in CALLERS.items()
        if needed == "numpy" or importlib.util.find_spec(needed) is not None
    ]
