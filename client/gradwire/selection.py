"""Which parameters of a remote module a user means (names, beginnings of names and patterns), and with which options; checked before a
byte is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradwire_wire.errors import UsageError

__all__ = ["checked_groups", "checked_names", "checked_options"]


def checked_names(names: str | Sequence[str] | None) -> list[str] | None:
    """A list of texts; None means all."""
    if names is None or isinstance(names, str):
        return None if names is None else [names]
    found = list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(name, str) for name in found):
        raise UsageError(
            f"names of parameters are texts, or beginnings of names, in a list, not {names!r:.80}"
        )
    return found


def checked_groups(groups: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Groups of parameters by their names, with options of their own; None means all parameters in one."""
    if groups is None:
        return None
    if isinstance(groups, (str, bytes, Mapping)) or not isinstance(groups, Iterable):
        raise UsageError(
            f"an optimizer in a worker has its module's parameters already: give it none (this is a {type(groups).__name__}), and its "
            'options as keywords, lr=1e-3. Parameters with options of their own go in a list, [{"names": ["encoder"], "lr": 1e-4}]'
        )
    return [_checked_group(group) for group in groups]


def _checked_group(group: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "names" not in group:
        raise UsageError(
            'a group of parameters is a dict with their names and options, such as {"names": ["encoder"], "lr": 1e-4}, '
            f"not {group!r:.80}"
        )
    return {**checked_options(group), "names": checked_names(group["names"])}


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an optimizer or a schedule. UsageError for functions, and for optimizers of this process that consist of some."""
    for name, value in options.items():
        if any(map(callable, value if isinstance(value, tuple) else [value])):
            raise UsageError(
                f"{name}={value!r:.80} is, or has, a function, and functions stay in their process. Write a function beside the "
                "module, in the worker's folders, that makes the whole with it, and name that: 'models:make_optimizer'"
            )
    return dict(options)
