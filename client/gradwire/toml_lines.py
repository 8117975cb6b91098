"""In which line of a TOML text each key is written: what `tomllib` knows and does not tell. Pure.

For a text that `tomllib` has accepted. Keys inside inline tables and in arrays of tables are not told apart: a
message about one of them names the line of the nearest key around it.
"""

from __future__ import annotations

import re

__all__ = ["KeyPath", "lines_of"]

KeyPath = tuple[str, ...]

_PART = re.compile(r"""[ \t]*(?:([A-Za-z0-9_-]+)|"((?:[^"\\]|\\.)*)"|'([^']*)')[ \t]*""")
_TOKENS = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'  # a closing delimiter may follow up to two quotation marks of the text
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*|[\[\]{}\n]",
    re.DOTALL,
)


def lines_of(text: str) -> dict[KeyPath, int]:
    """The line (from 1) of every key and table header."""
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    place, line = 0, 1
    while place < len(text):
        header = re.compile(r"[ \t]*(\[\[?)").match(text, place)
        key, after = _key(text, header.end() if header else place)
        if header:
            table = key
        if header or text[after : after + 1] == "=":
            for n in range(1, len(key) + 1):
                found.setdefault((*(() if header else table), *key[:n]), line)
        end = _statement_end(text, header.end() if header else place, 1 if header else 0)
        line += text.count("\n", place, end)
        place = end
    return found


def _key(text: str, place: int) -> tuple[KeyPath, int]:
    """A dotted key and where it ends; empty where there is none."""
    parts: list[str] = []
    while (part := _PART.match(text, place)) is not None:
        parts.append(next(group for group in part.groups() if group is not None))
        place = part.end()
        if text[place : place + 1] != ".":
            return tuple(parts), place
        place += 1
    return (), place


def _statement_end(text: str, place: int, depth: int) -> int:
    """Behind the line break that ends a statement: none inside brackets, braces, strings or comments."""
    if depth and text[place - 2 : place] == "[[":
        depth = 2
    for token in _TOKENS.finditer(text, place):
        mark = token.group()
        if mark in ("[", "{"):
            depth += 1
        elif mark in ("]", "}"):
            depth -= 1
        elif mark == "\n" and depth <= 0:
            return token.end()
    return len(text)
