"""Whether a Flax linen module may draw random numbers, which only a call tells for certain: by the names in its code.

A module that does is not pure, also where no keyword of its call says so. What is found here and never drawn costs an order of calls;
what is drawn and not found would make one call of two in a compiled program, with the same numbers.
"""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Iterator

__all__ = ["may_draw"]

_DRAWS = frozenset(("make_rng", "rngs"))  # of linen's modules and scopes
_FOREIGN = (
    "jax",
    "jaxlib",
    "numpy",
    "flax.core",
    "flax.linen.module",
    "flax.linen.transforms",
    "flax.linen.linear",
)
"""Libraries that know no random streams of a module, and the machinery of linen, which names them for everybody."""


def may_draw(module: Any) -> bool:
    """Whether code that this object's class, its fields, or what these name by global names, have in them draws."""
    seen: set[int] = set()
    todo = [module]
    while todo:
        x = todo.pop()
        if id(x) in seen or _is_foreign(x):
            continue
        seen.add(id(x))
        if isinstance(x, FunctionType):
            names = set(_names(x.__code__))
            if names & _DRAWS:
                return True
            todo += _named(x, names)
        elif isinstance(x, MethodType):
            todo += [x.__func__, x.__self__]
        elif isinstance(x, (list, tuple, set, frozenset)):
            todo += x
        elif isinstance(x, dict):
            todo += x.values()
        elif isinstance(x, type):
            todo += [own for c in x.__mro__ if not _is_foreign(c) for own in _functions_of(c)]
        elif hasattr(x, "__dict__"):  # a module, a functools.partial, a wrapper
            todo += [
                type(x),
                *vars(x).values(),
                *(getattr(x, name, None) for name in ("func", "args", "keywords")),
            ]
    return False


def _is_foreign(x: Any) -> bool:
    home = x.__module__ if isinstance(x, (type, FunctionType)) else type(x).__module__
    return (
        x is object
        or isinstance(x, ModuleType)
        or (str(home) + ".").startswith(tuple(f"{name}." for name in _FOREIGN))
    )


def _functions_of(kind: type) -> Iterator[Any]:
    for own in vars(kind).values():
        function = own.fget if isinstance(own, property) else getattr(own, "__func__", own)
        if callable(function):
            yield inspect.unwrap(function)
            yield function


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _named(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """What a function has in its closure, and what global names in it, and names in these (``nn.Dropout``), stand for."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    seen: set[int] = set()
    while found:
        x = found.pop()
        if not isinstance(x, ModuleType):
            yield x
        elif id(x) not in seen:
            seen.add(id(x))
            found += [vars(x)[name] for name in names if name in vars(x)]
