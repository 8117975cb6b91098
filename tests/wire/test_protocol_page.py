"""docs/protocol.md says what the code does: its tables are read and held against it."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from gradwire_wire import (
    batches,
    control,
    dtypes,
    errors,
    exchange,
    headers,
    lane,
    messages,
    page,
    plans,
    structures,
    tether,
    words,
)
from gradwire_wire.errors import ProtocolError
from gradwire_wire.headers import Header
from gradwire_wire.segments import Ledger
from gradwire_workers import calls

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()


def rows(text: str, first: str) -> list[list[str]]:
    """The rows of the first table whose head begins with that cell."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first} |"):
            next(lines)
            break
    else:
        raise AssertionError(f"there is no table of {first!r}")
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return found


def sections(prefix: str) -> dict[str, tuple[int, list[list[str]]]]:
    """Name → kind and field rows of every message the page describes."""
    parts = re.split(r"^(#{2,4} .*)$", PAGE, flags=re.M)
    found = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        match = re.fullmatch(rf"#### {prefix}(\w+) \((\d+)\)", title)
        if match:
            found[match[1]] = (int(match[2]), rows(body, "field"))
    return found


CALLS, CONTROL = sections(""), sections("control ")


def test_the_page_can_be_read() -> None:
    assert len(CALLS) >= 12 and len(CONTROL) >= 14
    with pytest.raises(AssertionError):
        rows(PAGE, "no such table")


@pytest.mark.parametrize(("described", "module"), [(CALLS, messages), (CONTROL, control)])
def test_every_kind_of_message_and_its_fields(described: dict[str, Any], module: Any) -> None:
    assert {name: kind for name, (kind, _) in described.items()} == {
        cls.__name__: kind for kind, cls in module.KINDS.items()
    }
    for cls in module.KINDS.values():
        names = [name for name, *_ in described[cls.__name__][1]]
        assert names == list(cls._fields), cls.__name__


# ---- Types: the page's word for a type accepts exactly what the code accepts ---------------------------------------------


def is_natural(x: Any) -> bool:
    return type(x) is int and x >= 0


def arrays(item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: type(x) is list and all(map(item, x))


def maps(key: type, value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: type(x) is dict and all(type(k) is key and value(v) for k, v in x.items())


def optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: x is None or check(x)


def of(kind: type) -> Callable[[Any], bool]:
    return lambda x: type(x) is kind


TYPES: dict[str, Callable[[Any], bool]] = {
    "natural": is_natural,
    "naturals": arrays(is_natural),
    "text": of(str),
    "binary": of(bytes),
    "binaries": arrays(of(bytes)),
    "array": of(list),
    "bool": of(bool),
    "bool?": optional(of(bool)),
    "natural?": optional(is_natural),
    "token": lambda x: is_natural(x) or arrays(lambda r: arrays(is_natural)(r) and len(r) == 2)(x),
    "number": lambda x: type(x) in (int, float) and math.isfinite(x) and x >= 0,
    "text?": optional(of(str)),
    "texts": arrays(of(str)),
    "map": maps(str, lambda _: True),
    "text?s by text": maps(str, optional(of(str))),
    "binary by binary?": optional(maps(bytes, of(bytes))),
}
BATTERY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**63, 2**64 - 1, 0.0, 1.5, -1.5, math.nan, math.inf),
    *("", "a", b"", b"a", [], [0], [-1], [True], [None], ["a"], ["a", 1], [b"a"], [b"a", "a"], [1.5], [[]]),
    *([[1, 2]], [[1, 2], [3]], [[1, -2]], [1, [1, 2]], {}, {"a": "b"}, {"a": None}, {"a": 1}, {"a": [1]}),
    *({b"a": b"b"}, {b"a": None}, {b"a": "b"}, {"a": b"b"}),
]


def test_the_types_are_those_of_the_page() -> None:
    assert [name for name, _ in rows(PAGE, "type")] == list(TYPES)


FIELDS = [
    (module, name, at, field, kind)
    for module, described in ((messages, CALLS), (control, CONTROL))
    for name, (_, fields) in described.items()
    for at, (field, kind, _) in enumerate(fields)
]


@pytest.mark.parametrize(("module", "name", "at", "field", "kind"), FIELDS)
def test_every_fields_type(module: Any, name: str, at: int, field: str, kind: str) -> None:
    code, fields = (CALLS if module is messages else CONTROL)[name]
    good = [next(x for x in BATTERY if TYPES[k](x)) for _, k, _ in fields]
    for value in BATTERY:
        raw = msgpack.packb([code, *good[:at], value, *good[at + 1 :]])
        try:
            module.unpack(raw)
            accepted = True
        except ProtocolError:
            accepted = False
        assert accepted == TYPES[kind](value), f"{name}.{field} = {value!r}: the page says {kind}"


# ---- Limits, flags, codes -------------------------------------------------------------------------------------------------


def test_limits() -> None:
    assert {name: int(value) for name, value in rows(PAGE, "limit")} == {
        "bytes of a call message's first frame": messages.MAX_MESSAGE,
        "bytes of any frame (a longer one ends the connection)": messages.MAX_FRAME,
        "bytes of a lane's packet": lane.MAX_PACKET,
        "bytes of a control message": control.MAX_MESSAGE,
        "bytes of a tether packet": tether.MAX_PACKET,
        "descriptors in a tether packet": tether.MAX_DESCRIPTORS,
        "bytes of a structure": structures.MAX_BYTES,
        "levels of a structure": structures.MAX_DEPTH,
        "dimensions of a tensor": headers.MAX_NDIM,
        "bytes of a tensor, and of its elements counted one by one": headers.MAX_NBYTES,
        "operations of a word": words.MAX_WORD,
        "bytes of a ledger": Ledger.ENTRIES,
        "loans of a ledger": Ledger.LOANS - 1,
        "cancelled calls of a ledger": Ledger.CANCELLED,
        "plans of a line, numbered from 0": plans.MAX_PLANS,
        "released tokens in a short call": plans.MAX_RELEASED,
        "DEALERs of one client that have plans": calls.MAX_DEALERS,
    }
    assert f"A tensor of {exchange.INLINE_BYTES} bytes or less" in PAGE
    assert Ledger.LOANS == 65024


def test_short_frames() -> None:
    """Sizes of the parts, as the page has them in parentheses, against the code's structs."""
    page = {
        name: [int(n) for n in re.findall(r"\((\d+)", cells)] for name, cells in rows(PAGE, "short frame")
    }
    one_by_one = lambda s: [struct.calcsize("<" + c) for c in re.sub(r"8I$", "", s.format.lstrip("<"))]  # noqa: E731
    assert page["call: head"] == [*one_by_one(plans.CALL), 8] and plans.CALL.format.endswith("8I")
    assert page["answer: head"] == one_by_one(plans.ANSWER) and page["entry"] == one_by_one(plans.ENTRY)
    assert f"The head has {plans.HEAD} bytes" in PAGE and plans.CALL.size <= plans.HEAD
    assert f"{plans.ENTRY.size} bytes for the entry" in PAGE
    assert f"multiple\nof {plans.ALIGNMENT}" in PAGE and f"at most {plans.MAX_AXES} dimensions" in PAGE


def test_batches() -> None:
    page = {name: [int(n) for n in re.findall(r"\((\d+)", cells)] for name, cells in rows(PAGE, "batch")}
    assert page["head"] == [struct.calcsize("<" + c) for c in batches.BATCH.format.lstrip("<")]
    assert page["each frame"] == [batches.LENGTH.size]
    assert f"kind (1 byte, {batches.SHORT_BATCH})" in PAGE and f"at most {batches.MAX_BATCH})" in PAGE
    assert f"at most {lane.MAX_BACKLOG} for\neach lane" in PAGE


def test_the_page() -> None:
    places = {name: int(at) for name, at, _ in rows(PAGE, "page")}
    assert places == {
        "request": page.REQUEST * 8,
        "answer": page.ANSWER * 8,
        "worker awake": page.WORKER_AWAKE * 8,
        "client awake": page.CLIENT_AWAKE * 8,
        "call": page.WORDS,
        "reply": page.WORDS + page.HALF,
    }
    assert f"of {page.PAGE_NBYTES} bytes, made" in PAGE and f"up to {page.HALF}." in PAGE
    assert 1 << page.COUNT_BITS == 2**24 and page.BELL == b"\0"


def test_flags() -> None:
    calls, tensors = (rows(part, "flag") for part in (PAGE, PAGE[PAGE.index("## 8.") :]))
    assert {name: int(value) for name, value, _ in calls} == {
        name: getattr(messages, name)
        for name in ("ACCUMULATE", "ANCHORED", "EAGER", "TRACED", "SEEDED", "ALONE")
    }
    assert {name: int(value) for name, value, _ in tensors} == {
        name: getattr(headers, name) for name in ("READ_ONLY", "IS_COPIED")
    }


def test_dtypes() -> None:
    described = {
        name: (int(code), int(bits))
        for names, code, several in rows(PAGE, "dtype | code")
        for name, bits in zip(names.split(", "), several.split(", "), strict=True)
    }
    assert described == {name: (dtype.code, dtype.bits) for name, dtype in dtypes.BY_NAME.items()}


def test_extension_codes() -> None:
    assert {name: int(code) for code, name, _ in rows(PAGE, "code")} == {
        name: getattr(structures.format, constant)
        for name, constant in [
            *(
                (n, n.upper())
                for n in ("leaf", "tuple", "complex", "integer", "scalar", "namedtuple", "dataclass", "weak")
            ),
            ("OrderedDict", "ORDEREDDICT"),
        ]
    }


def test_header_fields() -> None:
    described = [name for name, _ in rows(PAGE[PAGE.index("## 8.") :], "field")]
    assert described == list(Header._fields)
    assert f"`[{', '.join(described)}]`" in PAGE


def test_words() -> None:
    forms = [form for form, *_ in rows(PAGE, "operation")]
    assert forms == [
        '["J", wrt]',
        '["T", wrt, m]',
        '["T", wrt, m, of]',
        '["P", wrt]',
        '["V", axes]',
        '["M", optimizer, clip_norm]',
    ]
    assert words.checked_word([["J", [0]], ["T", [0], 1], ["V", [True] * 3]], 3)


def test_errors() -> None:
    described = {name for names, _ in rows(PAGE, "class") for name in names.split(", ")}
    assert described | {"GradwireError"} == {name for name in errors.__all__ if name.endswith("Error")}


def test_verbs() -> None:
    from gradwire_workers.state import State

    (line,) = re.findall(r"^Verbs: (.*)\.$", PAGE, flags=re.M)
    assert re.findall(r"`(\w+)`", line) == list(State(None, lambda program: 0)._verbs)
    (line,) = re.findall(r"^  verbs of which half would be worse than none: (.*)\.$", PAGE, flags=re.M)
    assert set(re.findall(r"`(\w+)`", line)) == messages.WHOLE_VERBS


def test_the_version_is_in_the_title_and_has_golden_bytes() -> None:
    assert PAGE.startswith(f"# The gradwire protocol, version {messages.PROTOCOL}\n")
    assert control.PROTOCOL == messages.PROTOCOL
    for path in re.findall(r"`(tests/wire/[\w/.-]+)`", PAGE):
        assert (Path(__file__).resolve().parents[2] / path).exists(), path
