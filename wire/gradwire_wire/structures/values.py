"""Numpy scalars, namedtuples and dataclasses, which msgpack has no type for; and stand-ins for classes that are not loaded here."""

from __future__ import annotations

import dataclasses
import re
import sys
from functools import lru_cache
from operator import itemgetter
from types import MemberDescriptorType
from typing import Any

import msgpack
import numpy as np

from gradwire_wire.errors import ProtocolError, shown

__all__ = [
    "as_dataclass",
    "as_namedtuple",
    "children",
    "field_names",
    "is_record",
    "name_of",
    "pack_scalar",
    "path_to",
    "tuple_fields",
    "unpack_scalar",
]

_SCALAR_NAME = re.compile(r"\|(b1|i1|u1)|<([iu][248]|f[248]|c8|c16)")


def pack_scalar(x: np.generic) -> bytes:
    dtype = x.dtype.newbyteorder("<")
    if not _SCALAR_NAME.fullmatch(dtype.str):  # a long double, say, which is another thing on every machine
        raise TypeError(f"a numpy scalar of dtype {x.dtype} cannot be sent; convert it to a Python value")
    packed: bytes = msgpack.packb([dtype.str, np.asarray(x).astype(dtype).tobytes()])
    return packed


def unpack_scalar(name: str, raw: bytes) -> Any:
    if not isinstance(name, str) or not _SCALAR_NAME.fullmatch(name):
        raise ProtocolError(f"bad scalar dtype {shown(name)}")
    dtype = np.dtype(name)
    if len(raw) != dtype.itemsize:
        raise ProtocolError("a scalar's bytes do not fit its dtype")
    return np.frombuffer(raw, dtype)[0].astype(dtype.newbyteorder("="))


@lru_cache(maxsize=1024)
def tuple_fields(kind: Any) -> list[str] | None:
    """The names of a namedtuple's or struct sequence's items; None for other tuples."""
    if hasattr(kind, "_fields"):
        return list(kind._fields)
    count = getattr(kind, "n_sequence_fields", -1)
    names = [name for name, member in vars(kind).items() if isinstance(member, MemberDescriptorType)][:count]
    return names if len(names) == count and not kind.n_unnamed_fields else None


def name_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def field_names(kind: Any) -> list[str]:
    return (
        [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(kind._fields)
    )


def _loaded_class(module: str, qualname: str) -> Any:
    """The class of that name where its module is loaded already; nothing is imported."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        try:
            found = object.__getattribute__(found, "__dict__").get(part)  # a lazy module imports in getattr
        except AttributeError:
            return None
    return found if isinstance(found, type) else None


def _check_fields(module: Any, qualname: Any, names: Any, values: Any) -> None:
    texts = [module, qualname, *names] if type(names) is list else [None]
    if not all(type(s) is str for s in texts) or type(values) is not list or len(names) != len(values):
        raise ProtocolError("a namedtuple or dataclass must be [module, qualname, names, values]")
    if not all(n.isidentifier() and not n.startswith("__") for n in names):
        raise ProtocolError(f"bad field names {shown(names)}")


def as_namedtuple(module: str, qualname: str, names: list[str], values: list[Any]) -> Any:
    _check_fields(module, qualname, names, values)
    cls = _loaded_class(module, qualname)
    if cls is None or not issubclass(cls, tuple) or tuple_fields(cls) != names:
        cls = _stand_in_tuple(module, qualname, tuple(names))
    return (
        tuple.__new__(cls, values) if hasattr(cls, "_fields") else cls(values)
    )  # a struct sequence's own code


def as_dataclass(module: str, qualname: str, names: list[str], values: list[Any]) -> Any:
    _check_fields(module, qualname, names, values)
    cls = _loaded_class(module, qualname)
    if cls is None or not dataclasses.is_dataclass(cls) or field_names(cls) != names:
        cls = _stand_in_dataclass(module, qualname, tuple(names))
    try:
        made = object.__new__(cls)
    except TypeError:  # it is also a dict, say, whose own __new__ would have to run
        made = object.__new__(_stand_in_dataclass(module, qualname, tuple(names)))
    for name, value in zip(names, values):
        object.__setattr__(made, name, value)
    return made


class _StandInDataclass:
    """A dataclass of the other side whose class is not loaded here: the same fields, nothing else."""

    _fields: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{n}={getattr(self, n)!r}' for n in self._fields)})"


@lru_cache(maxsize=1024)
def _stand_in_tuple(module: str, qualname: str, names: tuple[str, ...]) -> type:
    fields: dict[str, Any] = {name: property(itemgetter(i)) for i, name in enumerate(names)}
    return type(
        qualname.rpartition(".")[2],
        (tuple,),
        {**fields, "_fields": names, "__module__": module, "__qualname__": qualname},
    )


@lru_cache(maxsize=1024)
def _stand_in_dataclass(module: str, qualname: str, names: tuple[str, ...]) -> type:
    return type(
        qualname.rpartition(".")[2],
        (_StandInDataclass,),
        {"_fields": names, "__module__": module, "__qualname__": qualname},
    )


def is_record(x: Any) -> bool:
    """Whether it is a dataclass's instance, or stands for one."""
    return (dataclasses.is_dataclass(x) and not isinstance(x, type)) or isinstance(x, _StandInDataclass)


def path_to(tree: Any, value: Any) -> tuple[Any, ...] | None:
    """The keys by which one comes to that very object; None where it is not in the tree (or a key in it)."""
    found: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    seen: set[int] = set()
    while found:
        path, x = found.pop()
        if x is value:
            return path
        if id(x) in seen:  # in itself, perhaps
            continue
        seen.add(id(x))
        found.extend(((*path, key), child) for key, child in children(x).items())
    return None


def children(x: Any) -> dict[Any, Any]:
    """The items of a container by key; {} for anything else."""
    if isinstance(x, dict):
        return x
    if isinstance(x, (list, tuple)):
        return dict(enumerate(x))
    if is_record(x):
        return {name: getattr(x, name) for name in field_names(type(x))}
    return {}
