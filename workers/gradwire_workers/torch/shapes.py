"""What a torch target would return, by fake tensors on a shadow of it; nothing real is computed or changed.

Fake tensors alone do not protect a module: it would keep what it stores (``self.n += 1``,
``self.cache = x``), and operations among its own real tensors would be done. So the target is called
as its *shadow*: the same classes, whose tensors are fake and whose containers are copies. A dispatch mode
refuses writes to real tensors that are reached in another way (closures, globals, TorchScript), and
attributes of the modules are put back should anything have changed them.

User code does run once, on tensors without values; what it does outside torch and its own module happens.
"""

from __future__ import annotations

import collections
import functools
import logging
import operator
import types
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire_wire.carriers import Aval
from gradwire_wire.errors import UsageError
from gradwire_wire.tensors.torch import aval, torch_dtype
from gradwire_workers.torch.tape import entered, leaves_of

__all__ = ["spec"]

_FAKE_FAILURES = tuple(
    getattr(fake_tensor, name)
    for name in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedOperatorException",
        "UnsupportedFakeTensorException",
    )
    if hasattr(fake_tensor, name)
)
_ABOUT_FAKE = (
    "FakeTensor",
    "fake tensor",
    "tensor subclasses",
    "meta tensor",
    "Meta tensor",
    "doesn't have storage",
)


class WriteRefused(Exception):
    """User code tried to write to a real tensor while only shapes were asked for."""


def spec(
    target: Any, flat_of: Callable[[Any], Any], avals: Sequence[Aval], device: Any
) -> tuple[list[Aval], bytes]:
    """Shapes and dtypes of the target's results, and their structure.

    flat_of: makes the function of flat operands of a (shadow) target.
    Raises UsageError that names out_spec where a shape depends on values, or where the shadow does not hold.
    """
    mode, writes = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), _NoWrites()
    shadows = _Shadows(mode)
    flat = flat_of(shadows.of(getattr(target, "_orig_mod", target)))
    try:
        with torch.enable_grad(), _quiet(), mode, writes:
            fakes = [torch.empty(a.shape, dtype=torch_dtype(a.dtype), device=device) for a in avals]
            results = flat(*[entered(x) for x in leaves_of(fakes)])
        found = [aval(y) for y in results]
    except Exception as error:
        if writes.refused or isinstance(error, _FAKE_FAILURES) or any(t in str(error) for t in _ABOUT_FAKE):
            raise _advice(writes.refused or error) from error
        raise
    finally:
        shadows.restore()
    if writes.refused:  # and the user's code went on
        raise _advice(writes.refused)
    return found, flat.structure


@contextmanager
def _quiet() -> Iterator[None]:
    """Fake tensors log what user code raises, which is raised anyway."""
    logger = logging.getLogger(fake_tensor.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _advice(error: Exception) -> UsageError:
    what = {
        "DataDependentOutputException": "what the target does depends on values, not only on shapes",
        "DynamicOutputShapeException": "the shape of a result depends on values",
    }.get(type(error).__name__, "the target cannot be traced with tensors that have no values")
    return UsageError(
        f"the shapes of the results cannot be told without running the target: {what} ({type(error).__name__}: "
        f"{str(error) or 'no more is known'}). Say what it returns: remote.options(out_spec=...)"
    )


class _NoWrites(TorchDispatchMode):
    """refused: the first write, should user code or an interpreter wrap or swallow the error."""

    refused: WriteRefused | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for x in _written(func._schema, args, kwargs):
                if isinstance(x, torch.Tensor) and not isinstance(x, fake_tensor.FakeTensor):
                    error = WriteRefused(f"{func} would write to a real tensor of shape {tuple(x.shape)}")
                    self.refused = self.refused or error
                    raise error
        return func(*args, **kwargs)


def _written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)


_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, types.FunctionType, types.ModuleType)


class _Shadows:
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
