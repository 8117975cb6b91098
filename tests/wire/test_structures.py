"""Argument and result trees: there and back unchanged, and nothing received is trusted."""

from __future__ import annotations

import argparse
import array
import copy
import dataclasses
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import threading
import time
import types
from collections import OrderedDict, UserList, defaultdict, namedtuple
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gradwire_wire import structures
from gradwire_wire.errors import ProtocolError, UnsupportedTensorError, UsageError
from gradwire_wire.structures import (
    LEAF,
    MAX_BYTES,
    MAX_DEPTH,
    TUPLE,
    Leaf,
    fill,
    fill_leaves_only,
    flatten,
    leaf_count,
    leaf_paths,
    leaves_like,
    on_stand_in,
    positional,
    reading,
    weak_leaves,
    with_weak,
)
from gradwire_wire.structures.format import DATACLASS, INTEGER, NAMEDTUPLE, ORDEREDDICT, SCALAR, WEAK

Ext = msgpack.ExtType


class Tensor:
    """Stands for a tensor of some framework."""

    def __init__(self, name: Any) -> None:
        self.name = name


class Point(NamedTuple):
    x: Any
    y: Any = None


@dataclasses.dataclass
class Config:
    scale: Any
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any


@dataclasses.dataclass
class Slotted:
    __slots__ = ("a", "b")
    a: Any
    b: Any


@dataclasses.dataclass
class Output(OrderedDict):  # as the results of a well-known library are
    logits: Any = None
    hidden: Any = None


class Color(IntEnum):
    RED = 1


def is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def same(a: Any, b: Any) -> bool:
    """Equal in type and value all the way down; floats and scalars by their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b) if a == a else b != b
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=False)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a is b if isinstance(a, Tensor) else a == b


def there_and_back(tree: Any) -> Any:
    structure, leaves = flatten(tree, is_tensor)
    assert leaf_count(structure) == len(leaves)
    return fill(structure, leaves)


def test_same_can_say_no() -> None:
    t = Tensor(0)
    pairs: list[tuple[Any, Any]] = [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        ((1,), [1]),
        (t, Tensor(0)),
        (Point(1), (1, None)),
    ]
    pairs += [
        ({1: 2}, {1: 3}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.float32(1), np.float64(1)),
        (Config(1), Config(2)),
    ]
    assert not any(same(a, b) for a, b in pairs)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.binary(max_size=20),
    st.sampled_from(
        [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**20, -0.0, math.nan, math.inf, ""]
    ),
    arrays.from_dtype(np.dtype("float32")),
    arrays.from_dtype(np.dtype("complex128")),
    arrays.from_dtype(np.dtype("uint8")),
    st.sampled_from([np.float16(1.5), np.float64(math.nan), np.bool_(True), np.int64(-1), np.uint16(7)]),
)
KEYS = st.one_of(
    st.text("abc", max_size=2),
    st.integers(-3, 3),
    st.none(),
    st.tuples(st.integers(0, 2), st.text("a")),
    st.binary(max_size=1),
)


def containers(inner: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Config, inner, inner),
        st.builds(Frozen, inner),
        st.builds(Slotted, inner, inner),
    )


TREES = st.recursive(st.one_of(SCALARS, st.builds(Tensor, st.just(0))), containers, max_leaves=25)


@settings(max_examples=100)
@given(TREES)
def test_random_trees_come_back_unchanged(tree: Any) -> None:
    assert same(there_and_back(tree), tree)


def test_R38_the_tree_of_the_field_report() -> None:
    x, t, t2 = Tensor("x"), Tensor("t"), Tensor("t2")
    args = [[x], {"scale": 2.0, "mode": "a", "mask": None}]
    out = {"y": t, "aux": (t2, None, "s", 3), 7: OrderedDict([("b", 1), ("a", t)])}
    assert same(there_and_back(args), args) and same(there_and_back(out), out)


def test_leaves_are_numbered_in_order_of_appearance() -> None:
    a, b, c = Tensor("a"), Tensor("b"), Tensor("c")
    structure, leaves = flatten({"z": a, "a": (b, Point(c, a))}, is_tensor)
    assert leaves == [a, b, c, a]
    assert fill(structure, [1, 2, 3, 4]) == {"z": 1, "a": (2, Point(3, 4))}
    assert structure == flatten({"z": b, "a": (b, Point(b, b))}, is_tensor)[0]


def test_containers_are_new_on_each_fill() -> None:
    structure, _ = flatten([{"a": []}, [1]], is_tensor)
    first, second = fill(structure, []), fill(structure, [])
    assert first == second and first[0] is not second[0] and first[0]["a"] is not second[0]["a"]


def test_R20_python_scalars_stay_python_scalars() -> None:
    for value in (2.0, 3, True, None, "mean", 10**20, -(10**30), 1j):
        assert same(there_and_back([value]), [value])


def test_R20_numbers_that_a_tracer_wraps_are_pythons_again() -> None:
    """JAX hands `jax.vjp(f, x, 3)`'s 3 to f as a subclass of int that knows its abstract value."""
    for value in (2.5, 3, 10**20, 1j):
        wrapped = type("Typed", (type(value),), {"aval": None})(value)
        assert same(there_and_back([wrapped, {"a": (wrapped,)}] * 5), [value, {"a": (value,)}] * 5)


def test_a_bytearray_arrives_as_bytes() -> None:  # msgpack leaves us no choice; said in structures
    assert there_and_back([bytearray(b"ab"), memoryview(b"cd")]) == [b"ab", b"cd"]


def test_positional_is_what_flatten_makes() -> None:
    for n in (0, 1, 3, 200):
        assert positional(n) == flatten([[Tensor(i) for i in range(n)], {}], is_tensor)[0]


def test_text_of_an_array_is_text() -> None:
    texts = np.array(["a", "bc", "ü"])
    for tree in (
        list(texts),
        {texts[1]: 1},
        (texts[2], {"a": texts[0]}),
        list(np.array([b"a"])),
        [texts[0]] * 20,
    ):
        found = there_and_back(tree)
        assert found == tree
    assert type(there_and_back([texts[0]])[0]) is str
    assert type(there_and_back([np.bytes_(b"a")])[0]) is bytes


# ---- What cannot be sent is named ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        Color.RED,
        defaultdict(list),
        np.datetime64("2026-01-01"),
        np.longdouble(1),
        np.clongdouble(1),
        types.SimpleNamespace(),
        range(3),
        Config,  # the class, not an instance
        os.stat("/"),  # a struct sequence with fields that have no names
        lambda: None,
        type("MyStr", (str,), {})("a"),
        type("Bare", (tuple,), {})((1,)),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any) -> None:
    for tree in (value, [value], (1, {"a": value})):
        with pytest.raises(UnsupportedTensorError, match="cannot be sent") as caught:
            flatten(tree, is_tensor, "the result")
        assert str(caught.value).startswith("the result")


class Image:
    """As Pillow's are: numpy makes an array of it, by a protocol that is not ``__array__``."""

    __array_interface__ = np.zeros((2, 2), "u1").__array_interface__


class Settings:
    """As those of configuration libraries: with keys, and no Mapping."""

    def keys(self) -> list[str]:
        return ["layers"]

    def __getitem__(self, key: str) -> int:
        return 3


class Column:
    """As a table's, with text in it."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(["a", "b"], object)

    def tolist(self) -> list[str]:
        return ["a", "b"]

    def keys(self) -> list[int]:
        return [0, 1]


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (Image(), "send numpy.asarray(x)"),
        (Column(), "send x.tolist()"),
        (Settings(), "send dict(x)"),
        (UserList([1]), "send list(x)"),
        (types.SimpleNamespace(a=1), "send vars(x)"),
        (argparse.Namespace(a=1), "send vars(x)"),
        (np.float32, "send its name, a str, and look it up on the other side"),
        (np.dtype("int8"), "send its name, a str, and look it up on the other side"),
        (array.array("d", [1, 2]), "send numpy.asarray(x)"),
        (array.array("d"), "send numpy.asarray(x)"),
        (pathlib.Path("/a"), "send os.fspath(x)"),
        (Color.RED, "send x.value"),
        ({1, 2}, "send list(x)"),
        (defaultdict(list), "send dict(x)"),
        (object(), "convert it, or make it inside the worker"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_what_cannot_be_sent_is_told_what_can(value: Any, instead: str) -> None:
    with pytest.raises(UnsupportedTensorError) as caught:
        flatten([value], is_tensor)
    assert str(caught.value).endswith(f"; {instead}")


@pytest.mark.parametrize(
    ("module", "name", "place"),
    [
        ("keras.src.backend.common.keras_tensor", "KerasTensor", r"keras\.layers\.Lambda"),
        ("torch.fx.proxy", "Proxy", r"torch\.fx\.wrap"),
        ("transformers.cache_utils", "DynamicCache", "use_cache=False"),
    ],
)
def test_what_does_not_tell_by_itself_is_told_by_its_name(module: str, name: str, place: str) -> None:
    """Such as what stands for a tensor while a model is built or traced: where a call may be."""
    has_everything = {"__module__": module, "__getattr__": lambda x, name: x}
    with pytest.raises(UnsupportedTensorError, match=place):
        flatten([type(name, (), has_everything)()], is_tensor)


def recursive_list() -> list:
    x: list = []
    x.append(x)
    return x


def recursive_tuple() -> tuple:
    x: list = []
    t = (x,)
    x.append(t)
    return t


def nested(levels: int, wrap: Any) -> Any:
    x: Any = 1
    for _ in range(levels):
        x = wrap(x)
    return x


WRAPS = [
    lambda x: [x],
    lambda x: {"a": x},
    lambda x: (x,),
    Config,
    Point,
    lambda x: OrderedDict(a=x),
    lambda x: ([x], 1),
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_too_deep_is_a_usage_error_and_deep_enough_works(wrap: Any) -> None:
    deep = 45
    assert same(there_and_back(nested(deep, wrap)), nested(deep, wrap))
    leaf_paths(flatten(nested(deep, wrap), is_tensor)[0], argument_names=False)
    for levels in (MAX_DEPTH + 1, 600, 3000):
        with pytest.raises(UsageError, match="tree cannot be sent"):
            flatten(nested(levels, wrap), is_tensor)


@pytest.mark.parametrize("tree", [recursive_list(), recursive_tuple()])
def test_a_tree_in_itself_is_a_usage_error(tree: Any) -> None:
    with pytest.raises(UsageError, match="itself"):
        flatten(tree, is_tensor)


def test_too_long_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=str(MAX_BYTES)):
        flatten(["x" * MAX_BYTES], is_tensor)


@pytest.mark.parametrize("text", ["\ud800", "caf\udce9"], ids=["half a character", "a file's name"])
def test_a_text_that_is_no_unicode_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"a text in it is not Unicode: .*os\.fsencode"):
        flatten([{"name": text}], is_tensor)


def test_deep_trees_need_little_stack() -> None:
    code = (
        "import threading; from gradwire_wire.structures import *\n"
        "threading.stack_size(1 << 20); x = 1; done = []\n"
        "for _ in range(90): x = (x,)\n"
        "t = threading.Thread(target=lambda: done.append(fill(flatten(x, callable)[0], []) == x))\n"
        "t.start(); t.join(); assert done == [True]"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# ---- Classes of the other side ---------------------------------------------------------------------------------------


def as_a_stranger(structure: bytes) -> bytes:
    return structure.replace(b"Point", b"Poynt").replace(b"Config", b"Konfig").replace(b"Output", b"Outbut")


def test_a_class_that_is_not_loaded_here_has_a_stand_in() -> None:
    structure, _ = flatten([Point(Tensor(1), 2), Config(3, [4])], is_tensor)
    structure = as_a_stranger(structure)
    point, config = fill(structure, ["leaf"])
    assert isinstance(point, tuple) and tuple(point) == ("leaf", 2)
    assert (point.x, point.y, point._fields) == ("leaf", 2, ("x", "y"))
    assert (config.scale, config.more) == (3, [4]) and "Konfig(scale=3" in repr(config)
    assert type(point).__module__ == __name__ and type(fill(structure, ["leaf"])[0]) is type(point)


def test_a_stand_in_of_a_namedtuple_is_used_as_one() -> None:
    point = fill(as_a_stranger(flatten(Point(1, 2), is_tensor)[0]), [])
    kind = type(point)
    assert kind(3, y=4) == kind._make([3, 4]) == point._replace(x=3, y=4) == (3, 4)
    assert (
        point._asdict() == {"x": 1, "y": 2} and repr(point) == "Poynt(x=1, y=2)" and copy.copy(point) == point
    )
    for values, named in (((1,), {}), ((1, 2, 3), {}), ((1, 2), {"y": 2}), ((1,), {"z": 2})):
        with pytest.raises(TypeError, match="each of x, y once"):
            kind(*values, **named)


def test_a_framework_is_told_of_stand_ins_for_dataclasses_before_and_after() -> None:
    before, told = type(fill(as_a_stranger(flatten(Config(1), is_tensor)[0]), [])), []
    on_stand_in(told.append)
    assert before in told
    payload = msgpack.packb(["nowhere", "Later", ["parts", "of"], [1, 2]])
    later = fill(msgpack.packb(Ext(DATACLASS, payload)), [])
    assert type(later) in told and type(later).parts(later) == ((1, 2), None) and "parts=1" in repr(later)


def test_stand_ins_go_back_as_what_they_were() -> None:
    structure = as_a_stranger(flatten([Point(1, 2), Config(3)], is_tensor)[0])
    assert flatten(fill(structure, []), is_tensor)[0] == structure


def test_a_class_of_the_same_name_and_other_fields_is_not_used() -> None:
    other = namedtuple("Point", ["x", "z"])
    other.__module__, other.__qualname__ = Point.__module__, Point.__qualname__
    made = fill(flatten(other(1, 2), is_tensor)[0], [])
    assert type(made) is not Point and (made.x, made.z) == (1, 2)


def test_struct_sequences_are_namedtuples() -> None:
    now = time.localtime(0)
    assert same(there_and_back([now])[0], now) and there_and_back(now).tm_year == now.tm_year


def test_a_dataclass_that_is_also_a_dict_keeps_its_fields() -> None:
    made = there_and_back(Output(logits=[1]))
    assert made.logits == [1] and not made


def test_a_dataclass_that_is_also_a_mapping_keeps_its_items() -> None:
    leaf = Tensor(1)
    out = Output(hidden=(2, leaf), logits=[1])
    out["hidden"] = out.hidden
    here = there_and_back(out)
    assert type(here) is Output and list(here) == ["hidden"] and here["hidden"] is here.hidden
    structure = as_a_stranger(flatten(out, is_tensor)[0])
    there = fill(structure, ["leaf"])
    assert (there.logits, there["hidden"], there[0], len(there)) == ([1], (2, "leaf"), (2, "leaf"), 1)
    assert (
        dict(there) == {"hidden": (2, "leaf")}
        and there.to_tuple() == ((2, "leaf"),)
        and "logits" not in there
    )
    assert flatten(fill(structure, [leaf]), is_tensor) == (structure, [leaf])
    again = type(there)({"logits": 5}.items())
    assert (list(again), again["logits"], again.logits, again.hidden) == (["logits"], 5, 5, None)
    with pytest.raises(TypeError, match="no items but logits, hidden"):
        type(there)({"beside": 3})
    out["beside"] = 3
    with pytest.raises(UnsupportedTensorError, match=r"items beside its fields.*dict\(x\)"):
        flatten(out, is_tensor)


@pytest.mark.parametrize(
    ("x", "advice"),
    [
        (Color.RED, "x.value"),
        ({1}, "list(x)"),
        (range(3), "list(x)"),
        (defaultdict(list), "dict(x)"),
        (types.MappingProxyType({}), "dict(x)"),
        (type("Table", (), {"__array__": lambda x, *_, **__: np.ones(2)})(), "numpy.asarray(x)"),
        (type("Words", (str,), {})("a"), "str(x)"),
    ],
)
def test_what_cannot_be_sent_says_what_can(x: Any, advice: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=re.escape(f"send {advice}")):
        flatten([x], is_tensor)


def test_nothing_is_imported_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy_module")
    asked: list[str] = []
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    payload = msgpack.packb(["lazy_module", "Thing", ["a"], [1]])
    assert fill(msgpack.packb(Ext(DATACLASS, payload)), []).a == 1
    not_loaded = msgpack.packb(["antigravity", "Thing", ["a"], [1]])
    assert fill(msgpack.packb(Ext(NAMEDTUPLE, not_loaded)), []).a == 1
    assert not asked and "antigravity" not in sys.modules


# ---- What is received is trusted in nothing ----------------------------------------------------------------------------


def ext(code: int, value: Any) -> Any:
    return Ext(code, msgpack.packb(value))


BAD = {
    "no bytes": b"",
    "two values": msgpack.packb(1) * 2,
    "cut short": flatten([[1, 2], {"a": "b"}], is_tensor)[0][:-1],
    "hole -1": msgpack.packb(ext(LEAF, -1)),
    "hole 1 alone": msgpack.packb(ext(LEAF, 1)),
    "one hole twice": msgpack.packb([ext(LEAF, 0), ext(LEAF, 0)]),
    "hole of text": msgpack.packb(ext(LEAF, "0")),
    "hole True": msgpack.packb(ext(LEAF, True)),
    "hole of nothing": msgpack.packb(Ext(LEAF, b"")),
    "tuple of a map": msgpack.packb(ext(TUPLE, {})),
    "tuple of a number": msgpack.packb(ext(TUPLE, 7)),
    "complex of 15 bytes": msgpack.packb(Ext(3, b"x" * 15)),
    "unknown extension": msgpack.packb(ext(99, [])),
    "pairs of three": msgpack.packb(ext(ORDEREDDICT, [[1, 2, 3]])),
    "unhashable key": msgpack.packb(ext(ORDEREDDICT, [[[], 2]])),
    "unhashable map key": b"\x81\x90\x01",
    "items that are no fields": msgpack.packb(ext(DATACLASS, ["m", "C", ["a"], [1], ["b"]])),
    "items without names": msgpack.packb(ext(DATACLASS, ["m", "C", ["a"], [1], [[]]])),
    "scalar of no dtype": msgpack.packb(ext(SCALAR, ["", b""])),
    "scalar that is an object": msgpack.packb(ext(SCALAR, ["|O8", b"x" * 8])),
    "scalar O": msgpack.packb(ext(SCALAR, ["O", b"x" * 8])),
    "scalar that is an array": msgpack.packb(ext(SCALAR, ["3f4", b"x" * 12])),
    "scalar of a date": msgpack.packb(ext(SCALAR, ["<M8", b"x" * 8])),
    "scalar of a long double": msgpack.packb(ext(SCALAR, ["<f16", b"x" * 16])),
    "scalar of half a byte": msgpack.packb(ext(SCALAR, ["<f1", b"x"])),
    "scalar of text": msgpack.packb(ext(SCALAR, ["<U2", b"x" * 8])),
    "scalar of void": msgpack.packb(ext(SCALAR, ["|V8", b"x" * 8])),
    "scalar too short": msgpack.packb(ext(SCALAR, ["<f8", b"x" * 7])),
    "scalar of a number": msgpack.packb(ext(SCALAR, ["<f8", 7])),
    "scalar of three": msgpack.packb(ext(SCALAR, ["<f8", b"x" * 8, 1])),
    "namedtuple of three": msgpack.packb(ext(NAMEDTUPLE, ["m", "q", ["a"]])),
    "more values than names": msgpack.packb(ext(NAMEDTUPLE, ["m", "q", ["a"], [1, 2]])),
    "names that are none": msgpack.packb(ext(NAMEDTUPLE, ["m", "q", ["a b"], [1]])),
    "dunder": msgpack.packb(ext(DATACLASS, ["m", "q", ["__class__"], [1]])),
    "names of numbers": msgpack.packb(ext(DATACLASS, ["m", "q", [1], [1]])),
    "names of text": msgpack.packb(ext(DATACLASS, ["m", "q", "ab", [1, 2]])),
    "a module of bytes": msgpack.packb(ext(DATACLASS, [b"m", "q", ["a"], [1]])),
    "a NUL in the name": msgpack.packb(ext(NAMEDTUPLE, ["m", "q\0", ["a"], [1]])),
    "not UTF-8": b"\xa1\xff",
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "a string of four billion": b"\xdb\xff\xff\xff\xff",
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "lists without end": b"\x91" * 900 + b"\x90",
    "more lists than msgpack takes": b"\x91" * 100_000 + b"\x90",
    "a marked tree without places": msgpack.packb(ext(WEAK, [None, 1])),
    "a marked tree alone": msgpack.packb(ext(WEAK, [[]])),
    "places in disorder": with_weak(flatten([Tensor(0), Tensor(1)], lambda x: type(x) is Tensor)[0], [1, 0]),
    "a place twice": with_weak(flatten([Tensor(0)], lambda x: type(x) is Tensor)[0], [0, 0]),
    "a negative place": with_weak(flatten([Tensor(0)], lambda x: type(x) is Tensor)[0], [-1]),
    "a place of text": with_weak(flatten([Tensor(0)], lambda x: type(x) is Tensor)[0], ["0"]),  # type: ignore[list-item]
    "too long": b"\xc6" + (MAX_BYTES + 1).to_bytes(4, "big") + bytes(MAX_BYTES + 1),
}


@pytest.mark.parametrize("name", BAD)
def test_R57_malformed_structures_are_refused(name: str) -> None:
    for reader in (leaf_count, lambda s: fill(s, []), lambda s: fill(s, [1])):
        with pytest.raises(ProtocolError):
            reader(BAD[name])


def nested_extensions(code: int, levels: int) -> bytes:
    payload = msgpack.packb([])
    for _ in range(levels):
        payload = msgpack.packb([Ext(code, payload)])
    return payload


@pytest.mark.parametrize("code", [TUPLE, ORDEREDDICT, NAMEDTUPLE])
def test_R57_extensions_nested_without_end_are_refused(code: int) -> None:
    with pytest.raises(ProtocolError):
        leaf_count(nested_extensions(code, 3000))


@pytest.mark.parametrize(
    "tree", [Tensor(0), [[Tensor(0), 2], {"a": (Tensor(1), Tensor(2))}], [Tensor(i) for i in range(300)]]
)
def test_leaves_that_stand_for_numbers_are_told_beside_the_same_tree(tree: Any) -> None:
    plain, leaves = flatten(tree, is_tensor)
    places = tuple(range(0, len(leaves), 2))
    marked = with_weak(plain, places)
    assert (weak_leaves(marked), weak_leaves(plain)) == (places, ())
    assert fill(marked, leaves) == fill(plain, leaves) == tree
    assert leaf_paths(marked) == leaf_paths(plain) and leaf_count(marked) == len(leaves)
    with pytest.raises(ProtocolError, match="is said to be a number"):
        weak_leaves(with_weak(plain, [len(leaves)]))


def test_the_number_of_leaves_must_be_right() -> None:
    structure, leaves = flatten([Tensor(0), Tensor(1)], is_tensor)
    for wrong in ([], leaves[:1], [*leaves, 1]):
        with pytest.raises(ProtocolError, match="2 holes"):
            fill(structure, wrong)


@settings(max_examples=120)
@given(st.binary(max_size=60))
def test_random_bytes_give_a_tree_or_a_protocol_error(raw: bytes) -> None:
    try:
        count = leaf_count(raw)
    except ProtocolError:
        return
    leaves = [Tensor(i) for i in range(count)]
    fill(raw, leaves)
    fill_leaves_only(raw, leaves)
    assert len(leaf_paths(raw)) == len(leaves_like(raw, None, "x")) == count


@settings(max_examples=120)
@given(TREES, st.randoms(use_true_random=False))
def test_damaged_structures_give_a_tree_or_a_protocol_error(tree: Any, chance: random.Random) -> None:
    raw = bytearray(flatten(tree, is_tensor)[0])
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(raw))
        raw[at : at + chance.randint(0, 2)] = bytes(chance.choices(range(256), k=chance.randint(0, 2)))
        if not raw:
            break
    try:
        leaf_paths(bytes(raw)) if leaf_count(bytes(raw)) else fill(bytes(raw), [])
    except ProtocolError:
        pass


def test_a_big_integer_of_a_megabyte_is_no_denial() -> None:
    start = time.process_time()
    fill(msgpack.packb(Ext(INTEGER, b"\x7f" * (1 << 20))), [])
    assert time.process_time() - start < 60


# ---- Walking trees -----------------------------------------------------------------------------------------------------


def test_paths_name_each_leaf() -> None:
    t = Tensor(0)
    call, _ = flatten([[t, {"x": [t, Point(t, 1)]}], {"scale": t, "cfg": Config(t)}], is_tensor)
    assert leaf_paths(call) == ["args[0]", "args[1]['x'][0]", "args[1]['x'][1].x", "scale", "cfg.scale"]
    result, _ = flatten({"y": t, "aux": (t, 2)}, is_tensor)
    assert leaf_paths(result, argument_names=False) == ["result['y']", "result['aux'][0]"]
    assert leaf_paths(flatten(t, is_tensor)[0], argument_names=False) == ["result"]


def test_what_stands_where_each_leaf_is() -> None:
    t = Tensor(0)
    structure, _ = flatten({"y": t, "aux": (t, None, "s", Config(t))}, is_tensor)
    given_tree = {"y": 1, "aux": (2, "ignored", 5, Config(3))}
    assert leaves_like(structure, given_tree, "the cotangent") == [1, 2, 3]
    assert leaves_like(structure, None, "c") == [None] * 3
    assert leaves_like(structure, {"y": 1, "aux": None}, "c") == [1, None, None]
    assert leaves_like(structure, {"y": None, "aux": (2, 0, 0, None)}, "c") == [None, 2, None]
    for wrong in ({"y": 1}, {"y": 1, "aux": (2,)}, {"y": 1, "aux": 7}, 7):
        with pytest.raises(UsageError, match="the cotangent"):
            leaves_like(structure, wrong, "the cotangent")


def test_leaves_only_keeps_containers_and_drops_the_rest() -> None:
    t = Tensor(0)
    tree = {"y": t, "aux": (t, 3, "s"), "c": Config(t, 5), "p": Point(1, t), "l": [], "o": OrderedDict(a=1)}
    structure, _ = flatten(tree, is_tensor)
    made = fill_leaves_only(structure, "abcd")
    expected = {"y": "a", "aux": ("b", None, None), "c": Config("c", None), "p": Point(None, "d"), "l": []}
    assert same(made, {**expected, "o": OrderedDict(a=None)})


# ---- Memory -------------------------------------------------------------------------------------------------------------


def test_long_structures_are_not_remembered() -> None:
    reading._cached_count.cache_clear()
    for i in range(50):
        leaf_count(flatten([i, "x" * (structures.MAX_CACHED + 1)], is_tensor)[0])
    assert reading._cached_count.cache_info().currsize == 0


def test_threads_fill_at_once() -> None:
    tree = [Tensor(0), (1, {"a": Point(Tensor(1), OrderedDict(b=2))})] * 20
    failures: list[bool] = []

    def work() -> None:
        failures.extend(not same(there_and_back(tree), tree) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 200 and not any(failures)


def test_r38_numpy_scalars_are_keys_where_they_are_leaves_elsewhere() -> None:
    """As `dict(zip(*numpy.unique(x, return_counts=True)))` has them."""
    pair = namedtuple("pair", "a b")
    tree = {np.int64(3): np.float32(2.0), (np.int8(1), "x"): [pair({np.float64(0.5): np.arange(2)}, 1)]}
    structure, leaves = flatten(tree, lambda x: isinstance(x, (np.ndarray, np.generic)))
    assert len(leaves) == 2
    back = fill(structure, leaves)
    assert list(back) == [3, (1, "x")] and type(next(iter(back))) is np.int64
    assert list(back[1, "x"][0].a) == [0.5] and back[3] is leaves[0]


def test_r38_a_tensor_as_a_key_is_said() -> None:
    structure, leaves = flatten({Leaf(0): 1}, lambda x: type(x) is Leaf)
    with pytest.raises(ProtocolError, match="tensor as a key"):
        fill(structure, [np.arange(2)])
    assert leaves


def test_what_cannot_cross_is_refused_with_its_place() -> None:
    class Mode:
        pass

    within: list[Any] = [Mode()]
    within.append(within)
    pair = namedtuple("pair", "a b")
    for tree, prefix, place in [
        ([[1, {"mode": (2, Mode())}], {}], "", r"args\[1\]\['mode'\]\[1\]: a test_structures"),
        ([[1], {"how": [Mode()]}], "", r"how\[0\]: a test_structures"),
        ({"a": pair(1, np.longdouble(1))}, "the result", r"the result\['a'\]\[1\]: a numpy scalar"),
        ([within, {}], "", r"args\[0\]: a test_structures"),
        ({Mode: 1}, "the result", "the result: a builtins.type"),
    ]:
        with pytest.raises(UnsupportedTensorError, match=f"^{place.replace('test_structures', __name__)}"):
            flatten(tree, lambda x: False, prefix)
