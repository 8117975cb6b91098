"""Numpy scalars, namedtuples and dataclasses, which msgpack has no type for."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import OrderedDict
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any, Mapping, Sequence

import msgpack
import numpy as np

from gradwire_wire.errors import ProtocolError, shown
from gradwire_wire.structures.stand_ins import StandInDataclass, sequences, stand_in_dataclass, stand_in_tuple

__all__ = [
    "as_dataclass",
    "as_namedtuple",
    "children",
    "field_names",
    "is_record",
    "items_of",
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
        cls = stand_in_tuple(module, qualname, tuple(names))
    if hasattr(cls, "_fields"):
        return tuple.__new__(cls, values)
    sequences.note(cls)
    return cls(values)  # a struct sequence's own code


def as_dataclass(
    module: str, qualname: str, names: list[str], values: list[Any], keys: list[str] | None = None
) -> Any:
    """keys: of a dataclass that is a mapping as well, the fields that it has as items, in their order."""
    _check_fields(module, qualname, names, values)
    if keys is not None and (type(keys) is not list or any(key not in names for key in keys)):
        raise ProtocolError(f"the items {shown(keys)} of a dataclass are not among its fields")
    made = _made(_record_class(module, qualname, names), keys)
    if made is None:
        return stand_in_dataclass(module, qualname, tuple(names), keys is not None).of(values, keys)
    for name, value in zip(names, values):
        object.__setattr__(made, name, value)
    if isinstance(made, dict):
        put = OrderedDict.__setitem__ if isinstance(made, OrderedDict) else dict.__setitem__  # not its own
        for key in keys or ():
            put(made, key, getattr(made, key))
    return made


def _record_class(module: str, qualname: str, names: list[str]) -> Any:
    """The dataclass of that name if it is loaded and has these fields, or None."""
    cls = _loaded_class(module, qualname)
    return cls if dataclasses.is_dataclass(cls) and field_names(cls) == names else None


def _made(cls: Any, keys: list[str] | None) -> Any:
    """A new object of a dataclass, whose own code does not run. None where that cannot be had."""
    if cls is None:
        return None
    if keys is not None and issubclass(cls, dict):
        return (OrderedDict if issubclass(cls, OrderedDict) else dict).__new__(cls)
    try:
        return object.__new__(cls)
    except TypeError:  # it is also a list, say, whose own __new__ would have to run
        return None


def items_of(x: Any, names: Sequence[str]) -> list[str] | None:
    """The keys of a dataclass that is a mapping as well; None where it is none. TypeError where its items are not its fields."""
    if not isinstance(x, Mapping):
        return None
    keys = list(x)
    if any(type(key) is not str or key not in names or x[key] is not getattr(x, key) for key in keys):
        raise TypeError(
            f"a {type(x).__module__}.{type(x).__qualname__} is a dataclass and a mapping with items beside its fields, which "
            "cannot be sent as one. Send dict(x)"
        )
    return keys


def is_record(x: Any) -> bool:
    """Whether it is a dataclass's instance, or stands for one."""
    return (dataclasses.is_dataclass(x) and not isinstance(x, type)) or isinstance(x, StandInDataclass)


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
    if type(x) is dict:
        return x
    if is_record(x):  # which may be a mapping as well
        return {name: getattr(x, name) for name in field_names(type(x))}
    if isinstance(x, dict):
        return x
    if isinstance(x, (list, tuple)):
        return dict(enumerate(x))
    return {}
