"""Which parameters of a remote module a user means: names, beginnings of names and patterns, checked before a byte is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradwire_wire.errors import UsageError

__all__ = ["checked_group", "checked_names"]


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


def checked_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by their names, with options of their own."""
    if not isinstance(group, Mapping) or "names" not in group:
        raise UsageError(
            'a group of parameters is a dict with their names and options, such as {"names": ["encoder"], "lr": 1e-4}, '
            f"not {group!r:.80}"
        )
    return {**group, "names": checked_names(group["names"])}
