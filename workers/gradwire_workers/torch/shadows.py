"""Fake stand-ins for modules and whatever holds their tensors, so that user code can run without touching them."""

from __future__ import annotations

import collections
import functools
import operator
import types
import weakref
from typing import Any, Callable

import torch

__all__ = ["Shadows"]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, types.FunctionType, types.ModuleType)


class Shadows:
    """Fake tensors for real ones, through modules, objects and containers; everything else is shared.

    What is shared, and what was copied, is put back by `restore` as it was when it was seen.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> original (so that its id stays taken), shadow
        self._seen: list[tuple[Any, Any]] = []  # mutable original, shallow copy
        self._makers: dict[type, Callable[[Any], Any]] = {
            list: self._list,
            dict: self._dict,
            collections.OrderedDict: self._dict,
            collections.defaultdict: self._dict,
            collections.deque: self._shared,
            set: self._shared,
            tuple: self._tuple,
            types.MethodType: self._method,
            functools.partial: self._partial,
            weakref.ref: self._weakref,
        }

    def of(self, x: Any) -> Any:
        if isinstance(x, _ATOMS):
            return x
        if id(x) not in self._made:
            self._made[id(x)] = (x, x)  # what is met on the way back to itself is shared
            self._note(x, self._maker(x)(x))
        return self._made[id(x)][1]

    def _note(self, x: Any, shadow: Any) -> None:
        self._made[id(x)] = (x, shadow)

    def _maker(self, x: Any) -> Callable[[Any], Any]:
        if isinstance(x, torch.Tensor):
            return self._tensor
        if isinstance(x, torch.jit.ScriptModule):
            return lambda x: x
        if isinstance(x, torch.nn.Module):
            return self._module
        return self._makers.get(type(x), self._object if _is_ordinary(x) else lambda x: x)

    def _tensor(self, x: Any) -> Any:
        if torch.nn.parameter.is_lazy(x):
            return type(x)(device=x.device, dtype=x.dtype)
        fake = self._mode.from_tensor(x.detach())
        if isinstance(x, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=x.requires_grad)
        return fake.requires_grad_(x.requires_grad)

    def _module(self, x: Any) -> Any:
        shadow = object.__new__(type(x))
        self._note(x, shadow)
        shadow.__dict__.update(self._members(x.__dict__))
        self._seen.append((x.__dict__, dict(x.__dict__)))
        return shadow

    def _object(self, x: Any) -> Any:
        self._seen.append((x.__dict__, dict(x.__dict__)))
        members = self._members(x.__dict__)
        if all(members[name] is value for name, value in x.__dict__.items()):
            return x
        shadow = object.__new__(type(x))
        shadow.__dict__.update(members)
        return shadow

    def _members(self, members: dict[Any, Any]) -> dict[Any, Any]:
        return {name: self.of(value) for name, value in members.items()}

    def _dict(self, x: Any) -> Any:
        self._seen.append((x, dict(x)))
        members = self._members(x)
        if all(members[name] is value for name, value in x.items()):
            return x
        shadow = x.copy()
        shadow.update(members)
        return shadow

    def _list(self, x: list[Any]) -> list[Any]:
        self._seen.append((x, list(x)))
        items = [self.of(value) for value in x]
        return x if all(a is b for a, b in zip(items, x)) else items

    def _tuple(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
        items = tuple(self.of(value) for value in x)
        return x if all(a is b for a, b in zip(items, x)) else items

    def _shared(self, x: Any) -> Any:
        self._seen.append((x, x.copy()))
        return x

    def _method(self, x: Any) -> Any:
        owner = self.of(x.__self__)
        return x if owner is x.__self__ else types.MethodType(x.__func__, owner)

    def _partial(self, x: Any) -> Any:
        keywords = tuple(x.keywords.items())
        parts = self.of((x.func, x.args, keywords))
        return (
            x
            if all(map(operator.is_, parts, (x.func, x.args, keywords)))
            else functools.partial(parts[0], *parts[1], **dict(parts[2]))
        )

    def _weakref(self, x: Any) -> Any:
        target = x()
        return x if target is None else weakref.ref(self.of(target))

    def restore(self) -> None:
        """Put the originals back as they were."""
        for original, before in self._seen:
            if not _same(original, before):
                original.clear()
                (original.extend if isinstance(original, (list, collections.deque)) else original.update)(
                    before
                )


def _same(a: Any, b: Any) -> bool:
    """Whether two containers hold the same objects: their ``==`` would compare tensors by value."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(a[k] is v for k, v in b.items())
    return len(a) == len(b) and (
        {*map(id, a)} == {*map(id, b)} if isinstance(a, set) else all(map(operator.is_, a, b))
    )


def _is_ordinary(x: Any) -> bool:
    """Whether an object is no more than its ``__dict__``."""
    kind = type(x)
    plain: Any = object.__new__
    return kind.__new__ is plain and hasattr(x, "__dict__") and not hasattr(kind, "__slots__")
