"""What client and worker say to each other about calls, and the tether's six sentences.

A message is the msgpack array ``[kind, *fields]``; `pack` and `unpack` are each other's inverse.
Every field of a received message has been through its checker before anybody sees it. Pure.
docs/protocol.md holds the same tables in prose; tests/wire hold the two together.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Callable, NamedTuple, Sequence, Union

import msgpack

from gradwire_wire import PROTOCOL
from gradwire_wire.errors import ProtocolError, UsageError, shown
from gradwire_wire.interruption import came_from_parsing

__all__ = [
    "KEEP",
    "KEEP_NOTHING",
    "KEEP_ROWS",
    "MAX_FRAME",
    "PROTOCOL",
    "WHOLE_VERBS",
    "Call",
    "Collect",
    "Done",
    "Failed",
    "Forget",
    "Hello",
    "Load",
    "Long",
    "NewLane",
    "Ping",
    "Plan",
    "Refused",
    "Release",
    "Segment",
    "Spec",
    "State",
    "Trace",
    "Welcome",
    "pack",
    "unpack",
]

KEPT_BUFFER = 1 << 20
MAX_MESSAGE = 64 << 20
MAX_FRAME = 1 << 30
"""Bytes of one frame of any kind: a tensor that cannot be shared is a frame."""
KEEP_NOTHING, KEEP, KEEP_ROWS = 0, 1, 2
ACCUMULATE, ANCHORED, EAGER, TRACED, SEEDED, ALONE = 1, 2, 4, 8, 16, 32
"""Flags of a call: pullbacks add to the module's own gradients; operand 0 is the anchor; compile=False; compile=True;
the operand before the target's own is the seed; nothing but the anchor has a gradient."""


class Load(NamedTuple):
    """Client: import a target and keep it. A module's factory is called with the arguments."""

    call_id: int
    kind: str  # "function" or "module"
    target: str
    structure: bytes
    headers: list[Any]


class Call(NamedTuple):
    """Client: evaluate the derived function ``word`` of a loaded remote at the operands.

    token: 0, a token, or token rows [[token, row], ...]; ``token_ops``: how many operations of the
    word the token's forward had. ``training``: the mode the caller believes in, checked. ``released``: tokens dropped.
    ``chain``: incarnations of the workers this call comes through.
    """

    call_id: int
    remote: int
    structure: bytes
    word: Any
    keep: int
    token: Any
    token_ops: int
    training: Union[bool, None]
    flags: int
    seed: Union[int, None]
    headers: list[Any]
    released: list[int]
    chain: list[bytes]


class Plan(NamedTuple):
    """Client: a Call that will come again on this line: after its Done, as short frames (see plans.py).

    plan: the number that the short frames name. inlined, room: which tensors travel in them (`plans.layout_of`).
    """

    call_id: int
    remote: int
    structure: bytes
    word: Any
    keep: int
    token: Any
    token_ops: int
    training: Union[bool, None]
    flags: int
    seed: Union[int, None]
    headers: list[Any]
    released: list[int]
    chain: list[bytes]
    plan: int
    inlined: int
    room: int


class Spec(NamedTuple):
    """Client: shapes and dtypes of the results, without running user code for real."""

    call_id: int
    remote: int
    structure: bytes
    training: Union[bool, None]
    flags: int
    avals: list[Any]  # [[shape, [code, bits, lanes]], ...]


WHOLE_VERBS = frozenset(
    {
        "train",
        "requires_grad",
        "load_state_dict",
        "load",
        "step",
        "zero_grad",
        "set",
        "schedule",
        "load_optimizer_state",
    }
)
"""Verbs of State that change the module. They are not interrupted: half of one done would leave a module that nobody has asked for."""


class State(NamedTuple):
    """Client: a verb about a module's state (train, parameters, optimizer, step, ...)."""

    call_id: int
    remote: int
    verb: str
    structure: bytes
    headers: list[Any]


class Trace(NamedTuple):
    """Client: record the times of my calls, of so many at most, the latest; 0: stop, and give what was recorded."""

    call_id: int
    capacity: int


class Ping(NamedTuple):
    """Client: are you there? (How it finds that a call was lost on its way.)"""

    call_id: int


class Forget(NamedTuple):
    """Client: these remotes, and these optimizers, will not be named again. No reply."""

    remotes: list[int]
    optimizers: list[int]


class Release(NamedTuple):
    """Client: these tokens will not be named again. No reply."""

    released: list[int]


class Done(NamedTuple):
    """Worker: the results. A header may be None: nothing is differentiable there.

    token: of the kept forward, or 0. ``compute_ns``: time inside the user's code and its framework.
    """

    call_id: int
    structure: bytes
    headers: list[Any]
    token: int
    compute_ns: int


class Failed(NamedTuple):
    """Worker: no results. ``kind``: a class of gradwire_wire.errors; the rest is about RemoteError."""

    call_id: int
    kind: str
    type_name: str
    message: str
    traceback: str


class Long(NamedTuple):
    """Worker, by lane only: the answer's frames, each as a tensor of bytes, since they are too long for a packet."""

    call_id: int
    headers: list[Any]


class Hello(NamedTuple):
    """Tether, client first: who I am; carries the descriptor of the ledger I write."""

    protocol: int
    token: bytes
    client_id: bytes
    pid: int


class Welcome(NamedTuple):
    """Tether, worker's answer; carries the descriptor of the ledger the worker writes. ``lanes``, ``pages``: whether it takes any."""

    protocol: int
    incarnation: bytes
    pid: int
    lanes: bool
    pages: bool


class Refused(NamedTuple):
    """Tether, worker's other answer: the error class and its message."""

    kind: str
    message: str


class Segment(NamedTuple):
    """Tether, either side: segment ``number`` of mine, whose descriptor comes along."""

    number: int
    nbytes: int


class NewLane(NamedTuple):
    """Tether, client only: one end of a pair of sockets for calls comes along; and a page, if it has one."""


class Collect(NamedTuple):
    """Tether, either side: I am short of memory, collect your garbage, for it may hold loans of mine."""


KINDS: dict[int, type] = {
    1: Load,
    2: Call,
    3: Spec,
    4: State,
    5: Release,
    6: Plan,
    7: Trace,
    8: Ping,
    9: Forget,
    16: Done,
    17: Failed,
    18: Long,
    32: Hello,
    33: Welcome,
    34: Refused,
    35: Segment,
    36: Collect,
    37: NewLane,
}
_CODES = {cls: code for code, cls in KINDS.items()}


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda x: type(x) is kind


def _natural(x: Any) -> bool:
    return type(x) is int and x >= 0


def _naturals(x: Any) -> bool:
    return type(x) is list and all(map(_natural, x))


def _token(x: Any) -> bool:
    return _natural(x) or (
        type(x) is list and all(type(r) is list and len(r) == 2 and _naturals(r) for r in x)
    )


def _optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: x is None or check(x)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (
            "call_id",
            "remote",
            "keep",
            "token_ops",
            "flags",
            "compute_ns",
            "protocol",
            "pid",
            "number",
            "nbytes",
            "plan",
            "inlined",
            "room",
            "capacity",
        ),
        _natural,
    ),
    **dict.fromkeys(("kind", "target", "verb", "type_name", "message", "traceback"), _is(str)),
    **dict.fromkeys(("structure", "client_id", "incarnation"), _is(bytes)),
    **dict.fromkeys(("headers", "avals", "word"), _is(list)),
    **dict.fromkeys(("lanes", "pages"), _is(bool)),
    "training": _optional(_is(bool)),
    "seed": _optional(_natural),
    **dict.fromkeys(("released", "remotes", "optimizers"), _naturals),
    "chain": lambda x: type(x) is list and all(type(c) is bytes for c in x),
    "token": _token,
}
_OTHERWISE = {(Hello, "token"): _is(bytes), (Done, "token"): _natural}
_CHECKERS = {
    cls: tuple(_OTHERWISE.get((cls, name), _CHECKS[name]) for name in cls._fields)  # type: ignore[attr-defined]
    for cls in KINDS.values()
}

_unpack = msgpack.unpackb
_packer = msgpack.Packer()  # its buffer is kept; packing these values runs no Python, so the GIL guards it
_is_guarded = (
    msgpack.Packer.__module__ != "msgpack.fallback" and getattr(sys, "_is_gil_enabled", lambda: True)()
)
"""Not so for msgpack's own Python implementation and without a GIL: there threads would share one buffer."""


def pack(message: Any) -> bytes:
    """One frame. UsageError where it would be longer than its reader allows."""
    global _packer
    values = (_CODES[type(message)], *message)
    packed: bytes = _packer.pack(values) if _is_guarded else msgpack.packb(values)
    if len(packed) > KEPT_BUFFER:
        _packer = msgpack.Packer()
    if len(packed) > MAX_MESSAGE:
        raise UsageError(
            f"a message of {len(packed)} bytes is longer than {MAX_MESSAGE}: that much text and that many "
            "small tensors cannot travel at once. Put them into fewer and larger tensors"
        )
    return packed


def unpack(frame: bytes) -> Any:
    """The message in a frame; ProtocolError for anything else. Never runs or imports what it reads."""
    if len(frame) > MAX_MESSAGE:
        raise ProtocolError(f"a message of {len(frame)} bytes is longer than {MAX_MESSAGE}")
    try:
        raw = _unpack(frame, strict_map_key=False)
    except Exception as error:
        if not came_from_parsing(error):
            raise
        raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from error
    if type(raw) is list:
        shape = _known_shapes.get(tuple(map(type, raw)))
        if shape is not None and raw[0] == shape.code and shape.fits(raw):
            return shape.make(raw[1:])
    return _checked(raw)


def _checked(raw: Any) -> Any:
    if type(raw) is not list or not raw or type(raw[0]) is not int or raw[0] not in KINDS:
        raise ProtocolError("not a message: it must be an array that starts with a known kind")
    cls = KINDS[raw[0]]
    checkers = _CHECKERS[cls]
    if len(raw) != len(checkers) + 1:
        raise ProtocolError(f"{cls.__name__} has {len(checkers)} fields, not {len(raw) - 1}")
    for i, check in enumerate(checkers, 1):
        if not check(raw[i]):
            raise ProtocolError(f"{cls.__name__}.{cls._fields[i - 1]} cannot be {shown(raw[i])}")  # type: ignore[attr-defined]
    _known_shapes[tuple(map(type, raw))] = _Shape(raw, cls, checkers)
    return cls(*raw[1:])


class _Shape:
    """The types of a message that passed every check: one with the same types needs only those of its values.

    An exact type answers for itself; what is left is that numbers are not negative, and what arrays hold.
    """

    __slots__ = ("code", "inner", "make", "numbers")

    def __init__(self, raw: list[Any], cls: type, checkers: Sequence[Callable[[Any], bool]]) -> None:
        self.make, self.code = partial(tuple.__new__, cls), raw[0]
        self.numbers = [i for i, x in enumerate(raw) if type(x) is int]
        self.inner = [(i, check) for i, check in enumerate(checkers, 1) if type(raw[i]) is list]

    def fits(self, raw: list[Any]) -> bool:
        for i in self.numbers:
            if raw[i] < 0:
                return False
        for i, check in self.inner:  # noqa: SIM110 - a generator costs more
            if raw[i] and not check(raw[i]):
                return False
        return True


_known_shapes: dict[tuple[type, ...], _Shape] = {}
