"""Argument and result trees: a *structure* (bytes) with numbered holes, and the leaves that fill them.

The structure is msgpack: what does not change from call to call (containers, keywords, Python
scalars, strings) as bytes that compare, hash and cache, while tensors are numbered in order of
appearance. Types msgpack lacks are extension types (the table below). Nothing received is
imported or evaluated: a namedtuple or dataclass is rebuilt with the receiver's own class where one
of that name and those fields is loaded already, and with a stand-in of the same shape where not.

=====  ===========  ================================================================
code   meaning      payload (msgpack unless said otherwise)
=====  ===========  ================================================================
1      leaf         its number, from 0
2      tuple        array of the items
3      complex      16 bytes: real, imaginary as big-endian doubles
4      integer      signed big-endian bytes; only what does not fit 64 bits
5      scalar       [numpy dtype, bytes in little-endian order]
6      namedtuple   [module, qualname, field names, values]; Python's struct sequences too
7      dataclass    [module, qualname, field names, values]
8      OrderedDict  array of [key, value]
=====  ===========  ================================================================

msgpack has no types for bytearray and memoryview: they arrive as bytes.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import sys
from collections import OrderedDict
from functools import lru_cache, partial
from operator import itemgetter
from types import MemberDescriptorType
from typing import Any, Callable, Sequence

import msgpack
import numpy as np

from gradwire_wire.errors import ProtocolError, UnsupportedTensorError, UsageError, shown
from gradwire_wire.wide_trees import Filling, filling_of, pack_wide

__all__ = [
    "LONE_LEAF",
    "fill",
    "fill_call",
    "fill_leaves_only",
    "flatten",
    "leaf_count",
    "leaf_paths",
    "leaves_like",
    "positional",
    "positional_count",
]

LEAF, TUPLE, COMPLEX, INTEGER, SCALAR, NAMEDTUPLE, DATACLASS, ORDEREDDICT = range(1, 9)
MAX_DEPTH = 100
MAX_BYTES = 16 << 20
MAX_CACHED = 64 << 10
"""Longer structures are not remembered: they hold text or bytes that may differ from call to call."""
_SCALAR_NAME = re.compile(r"\|(b1|i1|u1)|<([iu][248]|f[248]|c8|c16)")


class Leaf:
    """Stands for a tensor where a tree is looked at without its leaves."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def flatten(tree: Any, is_leaf: Callable[[Any], bool], prefix: str = "") -> tuple[bytes, list[Any]]:
    """Split a tree into its structure and its leaves, in order of appearance.

    is_leaf: tells a tensor, by its type alone; never asked about dict, list, None and Python's scalars.
    Raises UnsupportedTensorError for a value that cannot cross, naming its type and what to do, and
    UsageError for a tree that is too deep or too long. What this makes, `fill` takes.
    """
    if type(tree) not in _NATIVE and is_leaf(tree):
        return LONE_LEAF, [tree]
    leaves: list[Any] = []
    try:
        structure = pack_wide(tree, is_leaf, leaves) or _Flattener(leaves, is_leaf).pack(tree)
        if len(structure) > MAX_DEPTH:  # each level takes a byte or more
            _check_length(structure)
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
    except TypeError as error:
        raise UnsupportedTensorError(f"{prefix or 'the arguments'}: {error}") from error


_SMALL_BUFFER: dict[str, Any] = {"buf_size": 1024} if msgpack.version >= (1, 1) else {}
"""A packer's own default is a buffer of 256 KiB, which the system would give and take each time."""


class _Flattener:
    """One flattening: msgpack's packer calls `other` for everything it has no type for."""

    __slots__ = ("depth", "is_leaf", "leaves")

    def __init__(self, leaves: list[Any], is_leaf: Callable[[Any], bool]) -> None:
        self.leaves, self.is_leaf, self.depth = leaves, is_leaf, 0

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
            return _hole(len(self.leaves) - 1)
        kind = type(x)
        if kind is tuple:
            return msgpack.ExtType(TUPLE, self.pack(list(x)))
        if kind is complex:
            return msgpack.ExtType(COMPLEX, struct.pack(">dd", x.real, x.imag))
        if kind is int:
            return msgpack.ExtType(INTEGER, x.to_bytes(x.bit_length() // 8 + 1, "big", signed=True))
        if isinstance(x, np.generic):
            return msgpack.ExtType(SCALAR, _pack_scalar(x))
        if isinstance(x, _NUMBERS) and hasattr(x, "aval"):
            return self.other(complex(x)) if isinstance(x, complex) else self.number(x)
        if kind is OrderedDict:
            return msgpack.ExtType(ORDEREDDICT, self.pack([[k, v] for k, v in x.items()]))
        names = _tuple_fields(kind) if isinstance(x, tuple) else None  # type: ignore[arg-type]
        if names is not None:
            return msgpack.ExtType(NAMEDTUPLE, self.pack([*_name_of(kind), names, list(x)]))
        if (dataclasses.is_dataclass(x) and not isinstance(x, type)) or isinstance(x, _StandInDataclass):
            names = _field_names(kind)
            return msgpack.ExtType(
                DATACLASS, self.pack([*_name_of(kind), names, [getattr(x, n) for n in names]])
            )
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent. Trees may hold dict, list, tuple, namedtuple, "
            "dataclass, OrderedDict, None, bool, int, float, complex, str, bytes, numpy scalars and tensors; "
            f"{_instead_of(x)}"
        )

    def number(self, x: Any) -> Any:
        """Python's own out of what a tracer has made of it: of its class, with an abstract value beside (`jax.vjp(f, x, 3)`)."""
        if isinstance(x, float):
            return float(x)
        return int(x) if x.bit_length() < 64 else self.other(int(x))


_NUMBERS = (int, float, complex)


def _instead_of(x: Any) -> str:
    """What to do about a value that cannot be sent."""
    if hasattr(x, "__await__"):
        return "await it, and send what it gives"
    if hasattr(x, "add_done_callback"):
        return "it will have a result: wait for that (.result()), or make the call by .submit(...), which takes futures"
    return "convert it, or make it inside the worker"


@lru_cache(maxsize=1024)
def _hole(index: int) -> msgpack.ExtType:
    return msgpack.ExtType(LEAF, msgpack.packb(index))


@lru_cache(maxsize=64)
def positional(count: int) -> bytes:
    """The structure of a call with ``count`` tensors as positional arguments and nothing else."""
    return flatten([[Leaf(i) for i in range(count)], {}], lambda x: type(x) is Leaf)[0]


_NATIVE = frozenset({dict, list, tuple, type(None), bool, int, float, complex, str, bytes})
LONE_LEAF = flatten([Leaf(0)], lambda x: type(x) is Leaf)[0][1:]  # without the array around it
_POSITIONAL = {positional(count): count for count in range(17)}
"""The commonest trees, which need no unpacking: one tensor, and calls with tensors as arguments."""


def _pack_scalar(x: np.generic) -> bytes:
    dtype = x.dtype.newbyteorder("<")
    if not _SCALAR_NAME.fullmatch(dtype.str):  # a long double, say, which is another thing on every machine
        raise TypeError(f"a numpy scalar of dtype {x.dtype} cannot be sent; convert it to a Python value")
    packed: bytes = msgpack.packb([dtype.str, np.asarray(x).astype(dtype).tobytes()])
    return packed


@lru_cache(maxsize=1024)
def _tuple_fields(kind: Any) -> list[str] | None:
    """The names of a namedtuple's or struct sequence's items; None for other tuples."""
    if hasattr(kind, "_fields"):
        return list(kind._fields)
    count = getattr(kind, "n_sequence_fields", -1)
    names = [name for name, member in vars(kind).items() if isinstance(member, MemberDescriptorType)][:count]
    return names if len(names) == count and not kind.n_unnamed_fields else None


def _name_of(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def _field_names(kind: Any) -> list[str]:
    return (
        [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(kind._fields)
    )


def positional_count(structure: bytes) -> int | None:
    """How many tensors a call has as positional arguments and nothing else; None for other calls."""
    return _POSITIONAL.get(structure)


def fill(structure: bytes, leaves: Sequence[Any]) -> Any:
    """The tree again, with ``leaves`` in its holes. Containers are new on each call."""
    if structure == LONE_LEAF and len(leaves) == 1:
        return leaves[0]
    if _POSITIONAL.get(structure) == len(leaves):
        return [list(leaves), {}]
    count = leaf_count(structure)
    if count != len(leaves):
        raise ProtocolError(f"{len(leaves)} leaves for a structure with {count} holes")
    filling = _filling(structure) if len(structure) <= MAX_CACHED else None
    return _unpack(structure, _filler(leaves.__getitem__), 0) if filling is None else filling(leaves)


@lru_cache(maxsize=256)
def _filling(structure: bytes) -> Filling | None:
    """Of a structure that has been checked whole."""
    return filling_of(_unpack(structure, _filler(Leaf), 0), Leaf)


def fill_call(structure: bytes, leaves: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """`fill` for the structure of a call: its positional arguments and its keywords."""
    call = fill(structure, leaves)
    if type(call) is list and len(call) == 2 and type(call[0]) is list and type(call[1]) is dict:
        args, kwargs = call
        if all(type(name) is str for name in kwargs):
            return args, kwargs
    raise ProtocolError("a call must be [positional arguments, keywords]")


def leaf_count(structure: bytes) -> int:
    """How many holes a structure has. Checks it whole: ProtocolError where it is not well formed."""
    return (_cached_count if len(structure) <= MAX_CACHED else _count)(structure)


def _count(structure: bytes) -> int:
    seen: list[int] = []

    def note(index: int) -> Leaf:
        seen.append(index)
        return Leaf(index)

    _check_depth(_unpack(structure, _filler(note), 0))
    if sorted(seen) != list(range(len(seen))):
        raise ProtocolError(f"the holes of a structure are not numbered 0..n-1: {shown(seen)}")
    return len(seen)


_cached_count = lru_cache(maxsize=512)(_count)


def _check_length(structure: bytes) -> None:
    if len(structure) > MAX_BYTES:
        raise ProtocolError(f"it has {len(structure)} bytes beside its tensors, more than {MAX_BYTES}")


def _check_depth(tree: Any) -> None:
    """Whoever walks a tree may recurse."""
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for x in level for child in _children(x).values()]
        if not level:
            return
    raise ProtocolError(f"it has more than {MAX_DEPTH} levels")


def _unpack(packed: bytes, hook: Callable[[int, int, bytes], Any], depth: int) -> Any:
    _check_length(packed)
    if depth > MAX_DEPTH:
        raise ProtocolError(f"it has more than {MAX_DEPTH} levels")
    read = msgpack.unpackb if depth < 4 else _unpack_on_heap
    try:
        return read(packed, ext_hook=partial(hook, depth), strict_map_key=False, raw=False)
    except ProtocolError:
        raise
    except Exception as error:  # msgpack raises many kinds, all of them about these bytes
        raise ProtocolError(f"a structure is not well formed: {type(error).__name__}: {error}") from error


def _unpack_on_heap(packed: bytes, **settings: Any) -> Any:
    """What unpackb does, with 40 KiB of working memory in an object instead of on the stack of this thread."""
    unpacker = msgpack.Unpacker(None, read_size=len(packed) or 1, max_buffer_size=MAX_BYTES, **settings)
    unpacker.feed(packed)
    value = unpacker.unpack()
    if unpacker.tell() != len(packed):
        raise ValueError("trailing bytes")
    return value


def _filler(leaf: Callable[[int], Any]) -> Callable[[int, int, bytes], Any]:
    return partial(_fill_extension, leaf)


def _fill_extension(leaf: Callable[[int], Any], depth: int, code: int, payload: bytes) -> Any:
    """What an extension stands for. A plain function: a closure that calls itself would be a reference
    cycle, and would hold the leaves (and their leases) until the garbage collector comes by."""
    if code == LEAF:
        index = msgpack.unpackb(payload)
        if type(index) is not int or index < 0:
            raise ProtocolError("a hole's number must be a natural number")
        return leaf(index)
    if code == COMPLEX:
        return complex(*struct.unpack(">dd", payload))
    if code == INTEGER:
        return int.from_bytes(payload, "big", signed=True)
    value = _unpack(payload, _filler(leaf), depth + 1)
    if not isinstance(value, list):
        raise ProtocolError(f"extension {code} must hold an array")
    if code == TUPLE:
        return tuple(value)
    if code == ORDEREDDICT:
        return OrderedDict(value)
    if code == SCALAR:
        return _unpack_scalar(*value)
    if code in (NAMEDTUPLE, DATACLASS):
        return (_as_namedtuple if code == NAMEDTUPLE else _as_dataclass)(*value)
    raise ProtocolError(f"unknown extension type {code}")


def _unpack_scalar(name: str, raw: bytes) -> Any:
    if not isinstance(name, str) or not _SCALAR_NAME.fullmatch(name):
        raise ProtocolError(f"bad scalar dtype {shown(name)}")
    dtype = np.dtype(name)
    if len(raw) != dtype.itemsize:
        raise ProtocolError("a scalar's bytes do not fit its dtype")
    return np.frombuffer(raw, dtype)[0].astype(dtype.newbyteorder("="))


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


def _as_namedtuple(module: str, qualname: str, names: list[str], values: list[Any]) -> Any:
    _check_fields(module, qualname, names, values)
    cls = _loaded_class(module, qualname)
    if cls is None or not issubclass(cls, tuple) or _tuple_fields(cls) != names:
        cls = _stand_in_tuple(module, qualname, tuple(names))
    return (
        tuple.__new__(cls, values) if hasattr(cls, "_fields") else cls(values)
    )  # a struct sequence's own code


def _as_dataclass(module: str, qualname: str, names: list[str], values: list[Any]) -> Any:
    _check_fields(module, qualname, names, values)
    cls = _loaded_class(module, qualname)
    if cls is None or not dataclasses.is_dataclass(cls) or _field_names(cls) != names:
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


def leaves_like(structure: bytes, tree: Any, what: str) -> list[Any]:
    """Match a tree against a structure: what stands where each leaf is, None where ``tree`` stops early.

    Containers must agree; what stands where the structure has no leaf is ignored. UsageError names the place.
    """
    found: dict[int, Any] = {}
    _match(_unpack(structure, _filler(Leaf), 0), tree, what, found)
    return [found.get(i) for i in range(leaf_count(structure))]


def _match(shape: Any, tree: Any, path: str, found: dict[int, Any]) -> None:
    if isinstance(shape, Leaf):
        found[shape.index] = tree
        return
    if tree is None or not _children(shape):
        return
    mine, theirs = _children(shape), _children(tree)
    if set(mine) != set(theirs):
        raise UsageError(
            f"{path} must have the structure of what it belongs to: {list(mine)}, not {tree!r:.80}"
        )
    for key, child in mine.items():
        _match(child, theirs[key], f"{path}[{key!r}]", found)


def _children(x: Any) -> dict[Any, Any]:
    """The items of a container by key; {} for anything else."""
    if isinstance(x, dict):
        return x
    if isinstance(x, (list, tuple)):
        return dict(enumerate(x))
    if (dataclasses.is_dataclass(x) and not isinstance(x, type)) or isinstance(x, _StandInDataclass):
        return {name: getattr(x, name) for name in _field_names(type(x))}
    return {}


def fill_leaves_only(structure: bytes, leaves: Sequence[Any]) -> Any:
    """The tree with ``leaves`` in its holes and None in place of every scalar and string."""
    return _leaves_only(_unpack(structure, _filler(Leaf), 0), leaves)


def _leaves_only(x: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(x, Leaf):
        return leaves[x.index]
    children = {key: _leaves_only(child, leaves) for key, child in _children(x).items()}
    if isinstance(x, dict):
        return type(x)(children)
    if isinstance(x, tuple):
        return tuple.__new__(type(x), children.values())
    if isinstance(x, list):
        return list(children.values())
    for name, value in children.items():
        object.__setattr__(x, name, value)
    return x if children else None


def leaf_paths(structure: bytes, argument_names: bool = True) -> list[str]:
    """Where each leaf sits, for error messages: ``args[0]['x']``, ``scale`` (a keyword)."""
    tree = _unpack(structure, _filler(Leaf), 0)
    found: dict[int, str] = {}
    if argument_names and isinstance(tree, list) and len(tree) == 2 and isinstance(tree[1], dict):
        for i, x in enumerate(tree[0]):
            _walk(x, f"args[{i}]", found)
        for name, x in tree[1].items():
            _walk(x, str(name), found)
    else:
        _walk(tree, "result", found)
    return [found[i] for i in sorted(found)]


def _walk(x: Any, path: str, found: dict[int, str]) -> None:
    if isinstance(x, Leaf):
        found[x.index] = path
    elif isinstance(x, dict):
        for k, v in x.items():
            _walk(v, f"{path}[{k!r}]", found)
    elif isinstance(x, (list, tuple)):
        names = getattr(x, "_fields", None)
        for i, v in enumerate(x):
            _walk(v, f"{path}.{names[i]}" if names else f"{path}[{i}]", found)
    elif dataclasses.is_dataclass(x) or isinstance(x, _StandInDataclass):
        for name in _field_names(type(x)):
            _walk(getattr(x, name), f"{path}.{name}", found)
