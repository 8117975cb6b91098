"""Which targets a client may name, where the broker restricts them (``allow = [...]`` in gradwire.toml).

A pattern is a place, or ``place:attribute``; without an attribute it allows all that are public.

===================  =====================================================================================
``models.net``       that module
``models.*``         the package and every module below it
``physics.py``       that file, named exactly so; ``nets/*.py``: the files of a folder, not of folders below it
``...:make_*``       ``*`` stands for any characters of one name
===================  =====================================================================================

What a name leads to is looked at as well, since a module has more names than its author thinks of: its imports
(``models:os``), what its functions know (``models:f.__globals__``), what its classes inherit. So a chain of
attributes never passes through a module or a name that begins with an underscore, and each thing on it
must have been *defined* in an allowed module (``__module__``), or be listed in ``__all__`` of the one named, or be the
very name that a pattern ends in (``keras.optimizers:Adam``).

This restricts which code of the worker's environment is *called*. It does not confine that code. The checks are pure.
"""

from __future__ import annotations

import fnmatch
import re
from types import ModuleType
from typing import Any, Sequence

from gradwire_wire.errors import UnknownTargetError

__all__ = ["Permissions"]

_ATTRIBUTES = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z][A-Za-z0-9_]*)*")
_IMPORT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


class Permissions:
    """The patterns of one broker. Every refusal is an UnknownTargetError that says what is allowed."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [_split(pattern) for pattern in patterns]
        self._shown = ", ".join(patterns) or "nothing but what its file loads"

    def check_name(self, place: str, attribute: str) -> None:
        """Before anything is imported: whether the target's own words are allowed."""
        if not _ATTRIBUTES.fullmatch(attribute):
            self._refuse(place, attribute, "names that begin with an underscore are not for callers")
        first = attribute.split(".", maxsplit=1)[0]
        if not any(_covers(p, place) and fnmatch.fnmatchcase(first, a) for p, a in self._patterns):
            self._refuse(place, attribute, "it matches no pattern")

    def check_step(self, module: ModuleType, place: str, attribute: str, name: str, found: Any) -> None:
        """What ``name`` of the chain ``attribute`` led to, on the way from ``module``."""
        if isinstance(found, ModuleType):
            self._refuse(place, attribute, f"{name!r} is another module; name that one itself")
        offered = getattr(module, "__all__", ())
        if name == attribute and isinstance(offered, (list, tuple)) and name in offered:
            return
        if any(_covers(p, place) and name == attribute == a for p, a in self._patterns):
            return
        home = getattr(found, "__module__", None)
        if not isinstance(home, str) or not (home == module.__name__ or self._has_module(home)):
            where = f"was defined in {home}" if isinstance(home, str) else "was defined elsewhere"
            self._refuse(
                place,
                attribute,
                f"{name!r} {where}; {place} offers what it lists in __all__, its own definitions, and what a pattern names: "
                f"{place}:{attribute}",
            )

    def _has_module(self, home: str) -> bool:
        return any(attribute == "*" and _covers(place, home) for place, attribute in self._patterns)

    def _refuse(self, place: str, attribute: str, why: str) -> None:
        raise UnknownTargetError(
            f"{place}:{attribute} may not be called here: {why}. This broker allows {self._shown} (allow = [...] in its file)"
        )


def _split(pattern: str) -> tuple[str, str]:
    place, colon, attribute = pattern.partition(":")
    return (place, attribute) if colon else (pattern, "*")


def _covers(pattern: str, place: str) -> bool:
    """Whether a pattern's place allows a target's."""
    if pattern.endswith(".py") or place.endswith(".py"):
        parts, allowed = place.split("/"), pattern.split("/")
        return (
            pattern.endswith(".py")
            and place.endswith(".py")
            and len(parts) == len(allowed)
            and not {"..", "."} & set(parts)
            and all(fnmatch.fnmatchcase(part, p) for part, p in zip(parts, allowed))
        )
    if not _IMPORT.fullmatch(place):
        return False
    package = pattern[:-2] if pattern.endswith(".*") else ""
    if package and (place == package or place.startswith(package + ".")):
        return True
    parts, allowed = place.split("."), pattern.split(".")
    return len(parts) == len(allowed) and all(fnmatch.fnmatchcase(part, p) for part, p in zip(parts, allowed))
