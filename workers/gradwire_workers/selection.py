"""Which parameters a user means: names, the beginnings of names, and patterns."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import Collection, Sequence

from gradwire_wire.errors import UsageError

__all__ = ["selected"]


def selected(patterns: str | Sequence[str] | None, names: Collection[str]) -> list[str]:
    """The names that any of the patterns means, in their own order; None means all of them.

    A pattern is a name, the beginning of one up to a dot or slash ("encoder" means "encoder.weight"), or has
    ``*``, ``?`` or ``[...]`` in it. UsageError for one that means nothing.
    """
    if patterns is None:
        return list(names)
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not isinstance(pattern, str):
            raise UsageError(f"a parameter is named by a string, not by {pattern!r:.80}")
        meant = _meant(pattern, names)
        if not meant:
            raise UsageError(f"{pattern!r} names no parameter of this module{_hint(pattern, names)}")
        found.update(meant)
    return [name for name in names if name in found]


def _meant(pattern: str, names: Collection[str]) -> list[str]:
    if pattern in names:  # first, for names may have brackets
        return [pattern]
    under = [name for name in names if name.startswith((f"{pattern}.", f"{pattern}/"))]
    return under or [name for name in names if fnmatchcase(name, pattern)]


def _hint(pattern: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(pattern, list(names), 3)
    shown = near or list(names)[:8]
    if not shown:
        return ": it has none"
    return f"; {'did you mean' if near else 'there are'} {', '.join(map(repr, shown))}{'?' if near else ''}"
