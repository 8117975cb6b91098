"""Trees into structures and leaves."""

from __future__ import annotations

import struct
from collections import OrderedDict
from functools import lru_cache
from typing import Any, Callable

import msgpack
import numpy as np

from gradwire_wire.errors import ProtocolError, UnsupportedTensorError, UsageError
from gradwire_wire.structures.advice import instead_of
from gradwire_wire.structures.format import (
    COMPLEX,
    DATACLASS,
    INTEGER,
    MAX_DEPTH,
    NAMEDTUPLE,
    ORDEREDDICT,
    SCALAR,
    TUPLE,
    Leaf,
    check_length,
    hole,
)
from gradwire_wire.structures.keys import Key, has_leaf_keys, with_plain_keys
from gradwire_wire.structures.reading import leaf_count
from gradwire_wire.structures.values import (
    field_names,
    is_record,
    items_of,
    name_of,
    pack_scalar,
    path_to,
    tuple_fields,
)
from gradwire_wire.wide_trees import pack_wide

__all__ = ["AS_TUPLES", "LONE_LEAF", "POSITIONAL", "flatten", "positional"]


def flatten(tree: Any, is_leaf: Callable[[Any], bool], prefix: str = "") -> tuple[bytes, list[Any]]:
    """Split a tree into its structure and its leaves, in order of appearance.

    is_leaf: tells a tensor, by its type alone; never asked about dict, list, None and Python's scalars.
    Raises UnsupportedTensorError for a value that cannot cross, naming its type and what to do, and
    UsageError for a tree that is too deep or too long. What this makes, `fill` takes.
    """
    if tree is None:
        return _NOTHING, []
    if type(tree) not in _NATIVE and is_leaf(tree):
        return LONE_LEAF, [tree]
    leaves: list[Any] = []
    try:
        structure = pack_wide(tree, is_leaf, leaves) or _packed(tree, is_leaf, leaves)
        if len(structure) > MAX_DEPTH:  # each level takes a byte or more
            check_length(structure)
            leaf_count(structure)
        return structure, leaves
    except UsageError:
        raise
    except ProtocolError as error:
        raise UsageError(f"{prefix or 'the arguments'}: this tree cannot be sent: {error}") from error
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{prefix or 'the arguments'}: a text in it is not Unicode: {error}; send it as bytes, os.fsencode(text)"
        ) from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise UsageError(
            f"{prefix or 'the arguments'}: this tree cannot be sent: {error}; is it nested too deeply or in itself?"
        ) from error
    except _Refused as refused:
        raise UnsupportedTensorError(f"{_named(tree, refused.value, prefix)}: {refused}") from None
    except TypeError as error:
        raise UnsupportedTensorError(f"{prefix or 'the arguments'}: {error}") from error


class _Refused(TypeError):
    """A value that cannot cross, with what to do."""

    def __init__(self, value: Any, why: str) -> None:
        super().__init__(why)
        self.value = value


def _named(tree: Any, value: Any, prefix: str) -> str:
    """Where in the tree it is, in the words of a caller: ``args[0]['mode']``, ``scale``, ``the result[1]``."""
    path = path_to(tree, value) or ()
    if prefix or len(path) < 2:
        return (prefix or "the arguments") + "".join(f"[{key!r}]" for key in path)
    group, name, *deeper = path
    return (f"args[{name}]" if group == 0 else str(name)) + "".join(f"[{key!r}]" for key in deeper)


def _packed(tree: Any, is_leaf: Callable[[Any], bool], leaves: list[Any]) -> bytes:
    flattener = _Flattener(leaves, is_leaf)
    structure = flattener.pack(tree)
    if flattener.has_scalars and has_leaf_keys(structure):
        leaves.clear()
        structure = _Flattener(leaves, is_leaf).pack(with_plain_keys(tree))
    return structure


_NOTHING: bytes = msgpack.packb(None)
_SMALL_BUFFER: dict[str, Any] = {"buf_size": 1024} if msgpack.version >= (1, 1) else {}
"""A packer's own default is a buffer of 256 KiB, which the system would give and take each time."""


class _Flattener:
    """One flattening: msgpack's packer calls `other` for everything it has no type for."""

    __slots__ = ("depth", "has_scalars", "is_leaf", "leaves")

    def __init__(self, leaves: list[Any], is_leaf: Callable[[Any], bool]) -> None:
        self.leaves, self.is_leaf, self.depth = leaves, is_leaf, 0
        self.has_scalars = False  # of numpy, among the leaves

    def pack(self, tree: Any) -> bytes:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels")
        packer = msgpack.Packer(default=self.other, strict_types=True, **_SMALL_BUFFER)
        packed: bytes = packer.pack(tree)
        self.depth -= 1
        return packed

    def other(self, x: Any) -> Any:
        if self.is_leaf(x):
            self.leaves.append(x)
            self.has_scalars = self.has_scalars or isinstance(x, np.generic)
            return hole(len(self.leaves) - 1)
        kind = type(x)
        if kind is tuple or kind in AS_TUPLES:
            return msgpack.ExtType(TUPLE, self.pack(list(x)))
        if kind is complex:
            return msgpack.ExtType(COMPLEX, struct.pack(">dd", x.real, x.imag))
        if kind is int:
            return msgpack.ExtType(INTEGER, x.to_bytes(x.bit_length() // 8 + 1, "big", signed=True))
        if kind is Key:
            x = x.scalar
        if isinstance(x, np.character):  # what an array of text, or a column of a table, has as its items
            return x.item()
        if isinstance(x, np.generic):
            try:
                return msgpack.ExtType(SCALAR, pack_scalar(x))
            except TypeError as error:
                raise _Refused(x, str(error)) from None
        if isinstance(x, _NUMBERS) and hasattr(x, "aval"):
            return self.other(complex(x)) if isinstance(x, complex) else self.number(x)
        if kind is OrderedDict:
            return msgpack.ExtType(ORDEREDDICT, self.pack([[k, v] for k, v in x.items()]))
        names = tuple_fields(kind) if isinstance(x, tuple) else None  # type: ignore[arg-type]
        if names is not None:
            return msgpack.ExtType(NAMEDTUPLE, self.pack([*name_of(kind), names, list(x)]))
        if is_record(x):
            return msgpack.ExtType(DATACLASS, self.pack(self.record(x)))
        raise _Refused(
            x,
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent. Trees may hold dict, list, tuple, namedtuple, "
            "dataclass, OrderedDict, None, bool, int, float, complex, str, bytes, numpy scalars and tensors; "
            f"{instead_of(x)}",
        )

    def record(self, x: Any) -> list[Any]:
        names = field_names(type(x))
        try:
            keys = items_of(x, names)
        except TypeError as error:
            raise _Refused(x, str(error)) from None
        parts = [*name_of(type(x)), names, [getattr(x, name) for name in names]]
        return parts if keys is None else [*parts, keys]

    def number(self, x: Any) -> Any:
        """Python's own out of what a tracer has made of it: of its class, with an abstract value beside (`jax.vjp(f, x, 3)`)."""
        if isinstance(x, float):
            return float(x)
        return int(x) if x.bit_length() < 64 else self.other(int(x))


_NUMBERS = (int, float, complex)


AS_TUPLES: set[type] = set()
"""Subclasses of tuple that travel as tuples: each framework's file adds its own."""


@lru_cache(maxsize=64)
def positional(count: int) -> bytes:
    """The structure of a call with ``count`` tensors as positional arguments and nothing else."""
    return flatten([[Leaf(i) for i in range(count)], {}], lambda x: type(x) is Leaf)[0]


_NATIVE = frozenset({dict, list, tuple, type(None), bool, int, float, complex, str, bytes})
LONE_LEAF = flatten([Leaf(0)], lambda x: type(x) is Leaf)[0][1:]  # without the array around it
POSITIONAL = {positional(count): count for count in range(17)}
"""The commonest trees, which need no unpacking: one tensor, and calls with tensors as arguments."""
