"""Requirement lines as pip writes them, in a form in which equal wishes are equal texts. Pure.

What is kept: names with extras, versions, markers, hashes and URLs of archives, and the options that say where
packages come from. What names something on this machine (a folder, a file, an editable install) is refused: an
environment is found again by what its lines say, and these say nothing about what is in the folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

__all__ = ["NEEDS", "BadRequirement", "Requirements", "file_lines", "normalized"]

NEEDS = {"pyzmq": "pyzmq>=25", "msgpack": "msgpack>=1.0", "numpy": "numpy"}
"""What a worker needs beside its framework."""

_OPTIONS = {"-i": "--index-url", "-f": "--find-links"}
_KNOWN_OPTIONS = {
    "--index-url",
    "--extra-index-url",
    "--find-links",
    "--no-index",
    "--no-binary",
    "--only-binary",
}
_NAMED = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:\[([^\]]*)\])?\s*(.*)", re.S)
_VERSION = re.compile(r"(===?|[~!<>]=|[<>])[^<>=!~]+")
_COMMENT = re.compile(r"(^|\s+)#.*$")
_DEEPEST = 8


class BadRequirement(ValueError):
    """A line that cannot be used; the message names it and says what to do."""


class Requirements(NamedTuple):
    """``options``: in the order given, which may matter. ``packages``: sorted, each once, the worker's needs included."""

    options: tuple[str, ...]
    packages: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """For an installer's requirements file."""
        return [*self.options, *self.packages]

    @property
    def names(self) -> list[str]:
        """Of the packages, in the form in which equal names are equal."""
        return [_name_of(package) for package in self.packages]


def normalized(lines: Iterable[str]) -> Requirements:
    """Equal for lines that ask for the same in another order or spelling. Raises BadRequirement."""
    options: dict[str, None] = {}
    packages: set[str] = set()
    for line in map(_stripped, lines):
        if line.startswith("-"):
            options[_option(line)] = None
        elif line:
            packages.add(_package(line))
    named = {_name_of(package) for package in packages}
    packages |= {need for name, need in NEEDS.items() if name not in named}
    return Requirements(tuple(options), tuple(sorted(packages)))


def file_lines(text: str, read: Callable[[str], str], depth: int = 0) -> Iterator[str]:
    """The lines of a requirements file, those of the files that it names with ``-r`` in their place.

    read: the text of the file of that name, as seen from this one. Raises BadRequirement, and what ``read`` does.
    """
    if depth > _DEEPEST:
        raise BadRequirement("the requirements files name each other without end (-r)")
    for line in map(_stripped, re.sub(r"\\\r?\n", " ", text).splitlines()):
        other = re.fullmatch(r"(?:-r\s*|--requirement(?:\s+|=))(.+)", line)
        if other:
            yield from file_lines(read(other[1]), read, depth + 1)
        elif line:
            yield line


def _stripped(line: str) -> str:
    if not isinstance(line, str):
        raise BadRequirement(f"{line!r} is no requirement: write it as text, such as 'torch==2.13.0'")
    line = _COMMENT.sub("", line).strip()
    if not line.isprintable():
        raise BadRequirement(f"{line!r}: one requirement to a text, without line breaks")
    return line


def _option(line: str) -> str:
    name, value = re.fullmatch(r"(--[^\s=]+|-\S)(?:\s*=\s*|\s*)(.*)", line).groups()  # type: ignore[union-attr]
    name = _OPTIONS.get(name, name)
    if name in ("-e", "--editable"):
        raise _names_a_folder(line)
    if name in ("-r", "--requirement"):
        raise BadRequirement(f"{line!r}: a file is read by `gradwire env build -r FILE`, or give its lines")
    if name not in _KNOWN_OPTIONS:
        raise BadRequirement(
            f"{line!r}: of options there may be {', '.join(sorted(_KNOWN_OPTIONS))}; others belong into the "
            "installer's own configuration, and versions (-c) into the requirements"
        )
    if name == "--find-links" and not re.match(r"/|[a-z]+://", value):
        raise BadRequirement(f"{line!r}: give the folder's absolute path")
    return f"{name} {value}".strip()


def _package(line: str) -> str:
    match = _NAMED.fullmatch(line)
    if re.match(r"(?!file:)[a-z+]+://", line):
        raise BadRequirement(f"{line!r} is a URL without the name of what it brings: write 'NAME @ {line}'")
    if match is None or re.match(r"[^@;]*/", line) or re.search(r"@\s*file:", line):
        raise _names_a_folder(line)
    name, extras, rest = match.groups()
    chosen = sorted({_plain(extra) for extra in (extras or "").split(",") if extra.strip()})
    rest, *hashes = re.split(r"\s+--hash[=\s]\s*", rest)
    said = _plain(name) + (f"[{','.join(chosen)}]" if chosen else "") + _wanted(line, rest)
    return " ".join([said, *(f"--hash={value.strip()}" for value in sorted(hashes))])


def _wanted(line: str, rest: str) -> str:
    """Of what follows the name: versions in one order and without blanks, a URL and a marker as they are."""
    if rest.startswith("@"):
        return f" @ {rest[1:].strip()}"
    versions, semicolon, marker = rest.partition(";")
    versions = re.sub(r"\s+", "", versions).strip("()")
    parts = sorted(filter(None, versions.split(",")))
    if not all(map(_VERSION.fullmatch, parts)):
        raise BadRequirement(f"{line!r} is no requirement; write it like 'torch==2.13.0' or 'numpy>=1.24,<2'")
    return ",".join(parts) + (f"; {' '.join(marker.split())}" if semicolon else "")


def _plain(name: str) -> str:
    """As the package index compares names."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _name_of(package: str) -> str:
    return _NAMED.fullmatch(package)[1]  # type: ignore[index]


def _names_a_folder(line: str) -> BadRequirement:
    return BadRequirement(
        f"{line!r} names what lies on this machine, which may change while the line stays: make that environment "
        "yourself and give its python=; or put a wheel into a folder and give '--find-links FOLDER' and its name"
    )
