"""Messages: there and back, mutated bytes, and the golden bytes of protocol 1."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire_wire import control, messages
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import ProtocolError, UsageError
from gradwire_wire.headers import Header, packed
from gradwire_wire.messages import (
    KINDS,
    MAX_MESSAGE,
    Call,
    Collect,
    Done,
    Failed,
    Forget,
    Hello,
    Load,
    Long,
    NewLane,
    Ping,
    Plan,
    Refused,
    Release,
    Segment,
    Spec,
    State,
    Trace,
    Welcome,
    pack,
    unpack,
)
from gradwire_wire.structures import flatten, reading

F32 = BY_NAME["float32"]
HEADERS = [
    [7, 4096, 3, [2, 3], None, [2, 32, 1], [1, 0], 2],
    [b"\0\0\x80?", 0, 0, [], None, [2, 32, 1], [1, 0], 2],
    None,
]
TREE = flatten([[(1, "a")], {"scale": 2.0}], callable)[0]
ID = bytes(range(16))

EXAMPLES: dict[str, Any] = {
    "load": Load(1, "module", "torch/models:make_net", TREE, [HEADERS[0]]),
    "call": Call(2, 1, TREE, [["T", [0], 1]], 1, 4711, 0, True, 5, 42, HEADERS, [3, 4], [ID]),
    "call of rows": Call(
        3, 1, TREE, [["V", [True]]], 2, [[4711, 0], [4711, 1]], 1, None, 0, None, [], [], []
    ),
    "spec": Spec(4, 1, TREE, None, 0, [[[2, 3], [2, 32, 1]]]),
    "state": State(5, 1, "load_state_dict", TREE, [HEADERS[1]]),
    "release": Release([1, 2**32 - 1]),
    "forget": Forget([1, 2], [2**40]),
    "trace": Trace(6, 65536),
    "ping": Ping(7),
    "done": Done(2, TREE, HEADERS, 4711, 123456789),
    "failed": Failed(2, "RemoteError", "ValueError", "bad 42 é", "Traceback …"),
    "hello": Hello(1, b"token", ID, 1234),
    "welcome": Welcome(1, ID, 1235, True, False),
    "refused": Refused("VersionMismatchError", "use the same gradwire"),
    "segment": Segment(7, 1 << 20),
    "collect": Collect(),
    "new lane": NewLane(),
    "long": Long(2, HEADERS[:1]),
    "plan": Plan(2, 1, TREE, [["T", [0], 1]], 1, 4711, 0, True, 5, 42, HEADERS, [3], [ID], 255, 4096, 65536),
}


def test_every_kind_has_an_example() -> None:
    assert {type(m) for m in EXAMPLES.values()} == set(KINDS.values())


@pytest.mark.parametrize("name", EXAMPLES)
def test_there_and_back(name: str) -> None:
    made = unpack(pack(EXAMPLES[name]))
    assert type(made) is type(EXAMPLES[name]) and made == EXAMPLES[name]


def test_a_header_and_a_word_go_as_tuples_and_come_as_lists() -> None:
    header = Header(7, 4096, 3, (2, 3), None, F32)
    call = Call(2, 1, b"", (("T", (0,), 1),), 0, 0, 0, None, 0, None, [packed(header)], [], [])
    assert unpack(pack(call)).word == [["T", [0], 1]] and unpack(pack(call)).headers == [HEADERS[0]]


# ---- Golden bytes: protocol 1 stays what it is ---------------------------------------------------------------------------

GOLDEN = Path(__file__).with_name("golden") / "protocol-1.txt"


def golden() -> dict[str, bytes]:
    lines = [line.partition(": ") for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    return {name: bytes.fromhex(raw) for name, _, raw in lines}


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_bytes_of_protocol_1(name: str) -> None:
    assert messages.PROTOCOL == 1, "a new version needs golden bytes of its own beside the old"
    assert pack(EXAMPLES[name]).hex() == golden()[name].hex()
    assert unpack(golden()[name]) == EXAMPLES[name]


# ---- Everything else is refused -------------------------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {
    "natural": [-1, None, True, 1.0, "1", b"1", [1], {}],
    "text": [None, b"a", 1, ["a"]],
    "binary": [None, "a", 1, [b"a"]],
    "array": [None, {}, "a", b"a", 1],
    "naturals": [None, [-1], [True], ["a"], [[1]], b"\1"],
    "bool": [None, 0, 1, "True", []],
    "optional bool": [0, 1, "True", []],
    "optional natural": [-1, True, 1.0, "1"],
    "token": [-1, None, True, [1], [[1]], [[1, 2, 3]], [[1, -1]], [[True, 0]], [{}], "1"],
    "binaries": [None, ["a"], [1], b"a", [[b"a"]]],
}
FIELDS: dict[str, str] = {
    **dict.fromkeys(
        ("call_id", "remote", "keep", "token_ops", "flags", "compute_ns", "protocol", "pid"), "natural"
    ),
    **dict.fromkeys(("number", "nbytes", "plan", "inlined", "room", "capacity"), "natural"),
    **dict.fromkeys(("kind", "target", "verb", "type_name", "message", "traceback"), "text"),
    **dict.fromkeys(("structure", "client_id", "incarnation"), "binary"),
    **dict.fromkeys(("headers", "avals", "word"), "array"),
    **dict.fromkeys(("lanes", "pages"), "bool"),
    **dict.fromkeys(("released", "remotes", "optimizers"), "naturals"),
    "training": "optional bool",
    "seed": "optional natural",
    "token": "token",
    "chain": "binaries",
}
OTHERWISE = {(Hello, "token"): "binary", (Done, "token"): "natural"}
CASES = [
    (name, i, OTHERWISE.get((type(message), field), FIELDS[field]))
    for name, message in EXAMPLES.items()
    for i, field in enumerate(message._fields, 1)
]


@pytest.mark.parametrize(("name", "at", "kind"), CASES)
def test_every_field_is_checked(name: str, at: int, kind: str) -> None:
    for value in WRONG[kind]:
        raw = msgpack.unpackb(pack(EXAMPLES[name]))
        raw[at] = value
        with pytest.raises(ProtocolError, match=type(EXAMPLES[name]).__name__):
            unpack(msgpack.packb(raw))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_number_of_fields_is_checked(name: str) -> None:
    raw = msgpack.unpackb(pack(EXAMPLES[name]))
    for wrong in ([*raw, 0], raw[:-1])[: len(raw)]:
        with pytest.raises(ProtocolError, match="fields"):
            unpack(msgpack.packb(wrong))


BAD = {
    "nothing": b"",
    "no kind": msgpack.packb([]),
    "unknown kind": msgpack.packb([99, 1]),
    "kind True": msgpack.packb([True, [1]]),
    "kind 5.0": msgpack.packb([5.0, [1]]),
    "kind of text": msgpack.packb(["Release", [1]]),
    "kind of lists": msgpack.packb([[], [1]]),
    "a map": msgpack.packb({5: [1]}),
    "a number": msgpack.packb(5),
    "two messages": pack(Release([1])) * 2,
    "cut short": pack(Release([1, 2, 3]))[:-1],
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "deep": msgpack.packb([5, 0])[:-1] + b"\x91" * 900 + b"\x90",
    "too deep for msgpack": msgpack.packb([5, 0])[:-1] + b"\x91" * 10_000 + b"\x90",
    "a deep field": msgpack.packb([17, 0])[:-1] + b"\x91" * 900 + b"\x90",
    "text that is not UTF-8": b"\x95\x11\x01\xa1\xff\xa0\xa0",
    "a reserved byte": b"\xc1",
    "a pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94.",
    "an unhashable key": msgpack.packb([5, 0])[:-1] + b"\x81\x90\x01",
    "too long": bytes(MAX_MESSAGE + 1),
}


@pytest.mark.parametrize("name", BAD)
def test_R57_what_is_no_message_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        unpack(BAD[name])


@settings(max_examples=150)
@given(st.binary(max_size=80))
def test_random_bytes_give_a_message_or_a_protocol_error(raw: bytes) -> None:
    try:
        unpack(raw)
    except ProtocolError:
        pass


@settings(max_examples=150)
@given(st.sampled_from(sorted(EXAMPLES)), st.randoms(use_true_random=False))
def test_mutated_bytes_give_a_checked_message_or_a_protocol_error(name: str, chance: random.Random) -> None:
    raw = bytearray(pack(EXAMPLES[name]))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(raw))
        raw[at : at + chance.randint(0, 2)] = bytes(chance.choices(range(256), k=chance.randint(0, 2)))
        if not raw:
            return
    try:
        message = unpack(bytes(raw))
    except ProtocolError:
        return
    assert unpack(pack(message)) == message or message != message  # a NaN among its headers


NATURALS = st.integers(0, 2**64 - 1)
BY_KIND: dict[str, st.SearchStrategy] = {
    "natural": NATURALS,
    "text": st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
    "binary": st.binary(max_size=10),
    "array": st.lists(
        st.one_of(NATURALS, st.none(), st.binary(max_size=3), st.lists(st.booleans())), max_size=4
    ),
    "naturals": st.lists(NATURALS, max_size=4),
    "bool": st.booleans(),
    "optional bool": st.one_of(st.none(), st.booleans()),
    "optional natural": st.one_of(st.none(), NATURALS),
    "token": st.one_of(NATURALS, st.lists(st.lists(NATURALS, min_size=2, max_size=2), max_size=3)),
    "binaries": st.lists(st.binary(max_size=4), max_size=3),
}


@settings(max_examples=150)
@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_any_well_formed_message_comes_back(name: str, data: st.DataObject) -> None:
    kinds = [kind for other, _, kind in CASES if other == name]
    message = type(EXAMPLES[name])(*(data.draw(BY_KIND[kind]) for kind in kinds))
    assert unpack(pack(message)) == message


def test_a_message_longer_than_its_reader_allows_is_not_sent() -> None:
    with pytest.raises(UsageError, match="larger tensors"):
        pack(Load(1, "function", "a:b", bytes(MAX_MESSAGE), []))
    assert len(pack(Load(1, "function", "a:b", bytes(MAX_MESSAGE - 100), []))) <= MAX_MESSAGE


@pytest.mark.parametrize("module", [messages, control, reading])
def test_r62_what_a_handler_raises_while_bytes_are_read_is_no_fault_of_theirs(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the TimeoutError of an alarm: whoever set it catches that."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise TimeoutError("of an alarm")

    for name in ("_unpack", "msgpack"):
        if hasattr(module, name):
            monkeypatch.setattr(
                module, name, interrupted if name == "_unpack" else Namespace(unpackb=interrupted)
            )
    with pytest.raises(TimeoutError, match="of an alarm"):
        module.unpack(*([b"x", int] if module is reading else [b"x"]))
    monkeypatch.undo()
    with pytest.raises(ProtocolError):
        module.unpack(*([b"\xc1", int] if module is reading else [b"\xc1"]))
