"""Names of what a module has, where its own are not unique."""

from __future__ import annotations

from typing import Any, Iterable

__all__ = ["unique_names"]


def unique_names(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """All of it by name, numbered where a name is there already."""
    found: dict[str, Any] = {}
    for name, value in named:
        number, free = 1, name
        while free in found:
            free, number = f"{name}_{number}", number + 1
        found[free] = value
    return found
