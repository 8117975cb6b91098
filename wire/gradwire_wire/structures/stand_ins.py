"""Stand-ins for namedtuples and dataclasses of the other side whose classes are not loaded here: the same fields.

No class is written as text and run, for its names were received: namedtuples and dataclasses of the standard library are.
A framework that walks trees by class is told of each (`on_stand_in`), and a program may return one from `jax.jit`, say.
So it is told of struct sequences, which are loaded here and which it may not know: torch's results of several tensors.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from operator import itemgetter
from typing import Any, Callable, ClassVar, Iterable, Iterator, Mapping, Sequence, Tuple

__all__ = [
    "StandInDataclass",
    "on_stand_in",
    "on_struct_sequence",
    "sequences",
    "stand_in_dataclass",
    "stand_in_tuple",
]

MOST = 1024
_lock = threading.RLock()  # a framework takes each class once


class _Classes:
    """Classes that came up, and who is told of each, of those of before and of later; of the first `MOST`."""

    def __init__(self) -> None:
        self._known: dict[Any, None] = {}
        self._told: list[Callable[[Any], None]] = []

    def tell(self, told: Callable[[Any], None]) -> None:
        with _lock:
            self._told.append(told)
            for cls in self._known:
                told(cls)

    def note(self, cls: Any) -> None:
        if cls in self._known:
            return
        with _lock:
            if len(self._known) < MOST and cls not in self._known:  # whoever is told keeps it
                self._known[cls] = None
                for told in self._told:
                    told(cls)


_made, sequences = _Classes(), _Classes()


def on_stand_in(tell: Callable[[Any], None]) -> None:
    """``tell(cls)`` for each class that stands for a dataclass."""
    _made.tell(tell)


def on_struct_sequence(tell: Callable[[Any], None]) -> None:
    """``tell(cls)`` for each class of struct sequences that has come: tuples with names that are no namedtuples."""
    sequences.tell(tell)


# ---- Namedtuples -----------------------------------------------------------------------------------------------------


class _StandInTuple(Tuple[Any, ...]):
    """With the methods that namedtuples have."""

    __slots__ = ()
    _fields: tuple[str, ...] = ()
    _field_defaults: ClassVar[dict[str, Any]] = {}

    def __new__(cls, *values: Any, **named: Any) -> Any:
        given = {**dict(zip(cls._fields, values)), **named}
        if len(values) + len(named) != len(cls._fields) or given.keys() != set(cls._fields):
            raise TypeError(f"{cls.__qualname__} takes each of {', '.join(cls._fields)} once")
        return tuple.__new__(cls, [given[name] for name in cls._fields])

    @classmethod
    def _make(cls, values: Iterable[Any]) -> Any:
        return cls(*values)

    def _replace(self, **changes: Any) -> Any:
        return type(self)(**{**self._asdict(), **changes})

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return _shown(self, self._asdict())


@lru_cache(maxsize=MOST)
def stand_in_tuple(module: str, qualname: str, names: tuple[str, ...]) -> type:
    fields: dict[str, Any] = {name: property(itemgetter(i)) for i, name in enumerate(names)}
    return _named(module, qualname, _StandInTuple, {"__slots__": (), **fields, "_fields": names})


# ---- Dataclasses -----------------------------------------------------------------------------------------------------


class StandInDataclass:
    """The fields alone."""

    _fields: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Sequence[Any], keys: Sequence[str] | None) -> Any:
        """One with these values of its fields. keys: the fields that are items as well; None of what is no mapping."""
        made = object.__new__(cls)
        for name, value in zip(cls._fields, values):
            object.__setattr__(made, name, value)
        return made

    def parts(self) -> tuple[tuple[Any, ...], tuple[str, ...] | None]:
        """What `of` takes. (A field may have the name of a method.)"""
        return tuple(getattr(self, name) for name in type(self)._fields), None

    def __repr__(self) -> str:
        return _shown(self, dict(zip(type(self)._fields, type(self).parts(self)[0])))


class _StandInMapping(StandInDataclass, Mapping[str, Any]):
    """One that is a mapping as well (as what models of transformers return): by name, and as those also by number."""

    __keys: Sequence[str] = ()  # (no field is named like this)

    def __init__(self, items: Any = ()) -> None:
        """As of a dict; fields that are not among the items are None."""
        given = dict(items)
        if not given.keys() <= set(type(self)._fields):
            raise TypeError(f"{type(self).__qualname__} has no items but {', '.join(type(self)._fields)}")
        for name in type(self)._fields:
            object.__setattr__(self, name, given.get(name))
        self.__keys = tuple(given)

    @classmethod
    def of(cls, values: Sequence[Any], keys: Sequence[str] | None) -> Any:
        made = super().of(values, None)
        made.__keys = tuple(dict.fromkeys(keys or ()))
        return made

    def parts(self) -> tuple[tuple[Any, ...], tuple[str, ...] | None]:
        return super().parts()[0], tuple(self.__keys)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self.to_tuple()[key]
        if key not in self.__keys:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__keys)

    def __len__(self) -> int:
        return len(self.__keys)

    __eq__, __hash__ = object.__eq__, object.__hash__  # of dataclasses of tensors: by identity

    def to_tuple(self) -> tuple[Any, ...]:
        """The items alone, in their order."""
        return tuple(getattr(self, key) for key in self.__keys)


def stand_in_dataclass(module: str, qualname: str, names: tuple[str, ...], is_mapping: bool) -> Any:
    with _lock:
        return _dataclass(module, qualname, names, is_mapping)


@lru_cache(maxsize=MOST)
def _dataclass(module: str, qualname: str, names: tuple[str, ...], is_mapping: bool) -> Any:
    base = _StandInMapping if is_mapping else StandInDataclass
    made = _named(module, qualname, base, {"_fields": names})
    _made.note(made)
    return made


def _named(module: str, qualname: str, base: type, members: dict[str, Any]) -> type:
    return type(
        qualname.rpartition(".")[2], (base,), {**members, "__module__": module, "__qualname__": qualname}
    )


def _shown(x: Any, fields: Mapping[str, Any]) -> str:
    return f"{type(x).__qualname__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"
