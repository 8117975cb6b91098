"""From a few named tuples to the messages of a conversation: numbered, and checked when read. Pure.

A message is the array ``[kind, *fields]``. What a field may hold follows from its annotation, so that no
second table has to be kept in step; integers are never negative, numbers are finite and never negative. How
the array becomes bytes is the caller's business (msgpack between client and broker, JSON on a lifeline).
"""

from __future__ import annotations

import math
from typing import Any, Callable, Mapping, Optional, Union, get_type_hints

from gradwire_wire.errors import ProtocolError

__all__ = ["Vocabulary"]

Check = Callable[[Any], bool]


def _is(kind: type) -> Check:
    return lambda x: type(x) is kind


def _natural(x: Any) -> bool:
    return type(x) is int and x >= 0


def _number(x: Any) -> bool:
    return type(x) in (int, float) and math.isfinite(x) and x >= 0


def _list_of(check: Check) -> Check:
    return lambda x: type(x) is list and all(map(check, x))


def _map_of(key: Check, value: Check) -> Check:
    return lambda x: type(x) is dict and all(key(k) and value(v) for k, v in x.items())


def _optional(check: Check) -> Check:
    return lambda x: x is None or check(x)


_PLAIN: dict[Any, Check] = {
    int: _natural,
    float: _number,
    bool: _is(bool),
    str: _is(str),
    bytes: _is(bytes),
    list[str]: _list_of(_is(str)),
    dict[str, str]: _map_of(_is(str), _is(str)),
    dict[str, Optional[str]]: _map_of(_is(str), _optional(_is(str))),
    dict[bytes, bytes]: _map_of(_is(bytes), _is(bytes)),
    dict[str, Any]: _map_of(_is(str), lambda _: True),
}
_CHECKS: dict[Any, Check] = {
    **_PLAIN,
    **{Optional[kind]: _optional(check) for kind, check in _PLAIN.items()},
}


class Vocabulary:
    """The kinds of message of one conversation. `to_array` and `from_array` are each other's inverse."""

    def __init__(self, kinds: Mapping[Union[int, str], type]) -> None:
        self.kinds = dict(kinds)
        self._codes = {cls: code for code, cls in kinds.items()}
        self._checkers = {
            cls: [(name, _CHECKS[hint]) for name, hint in get_type_hints(cls).items()]
            for cls in self.kinds.values()
        }

    def to_array(self, message: Any) -> tuple[Any, ...]:
        """The array that stands for a message of this vocabulary."""
        return (self._codes[type(message)], *message)

    def from_array(self, raw: Any) -> Any:
        """The message an array stands for; ProtocolError for everything else. Runs nothing of what it reads."""
        if type(raw) is not list or not raw or type(raw[0]) not in (int, str) or raw[0] not in self.kinds:
            raise ProtocolError("not a message: it must be an array that starts with a known kind")
        cls = self.kinds[raw[0]]
        checkers = self._checkers[cls]
        if len(raw) != len(checkers) + 1:
            raise ProtocolError(f"{cls.__name__} has {len(checkers)} fields, not {len(raw) - 1}")
        for value, (name, check) in zip(raw[1:], checkers):
            if not check(value):
                raise ProtocolError(f"{cls.__name__}.{name} cannot be {value!r:.80}")
        return cls(*raw[1:])
