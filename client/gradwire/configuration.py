"""``gradwire.toml``: which workers there are, by name. `parse` is pure; `read` is `parse` of a file.

Everything is checked when it is read, and every complaint names the file, the line and the key. What the keys
mean is in docs/reference/configuration.md. Paths are relative to the file's folder.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from gradwire.restarts import MODES
from gradwire.toml_lines import KeyPath, lines_of
from gradwire_wire.control import FRAMEWORKS, LONGEST_S
from gradwire_wire.errors import UsageError

__all__ = ["Configuration", "Load", "WorkerEntry", "parse", "read"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Load:
    """Something a worker loads when it starts, under a name. ``kind``: "module" or "function"."""

    kind: str
    target: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerEntry:
    """One worker of the file: the arguments of `Bridge.worker`, and what it loads at its start. Paths are absolute."""

    name: str
    framework: str
    python: str | None = None
    requirements: list[str] | None = None
    env: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)
    cwd: str = "."
    threads: int | None = None
    x64: bool | None = None
    device: str | None = None
    start_timeout: float = 120.0
    restart: str = "never"
    loads: dict[str, Load] = field(default_factory=dict)


@dataclass(frozen=True)
class Configuration:
    """A file. It has workers, or the address of a broker elsewhere and the folder of the keys for it.

    allow: patterns that targets must match which clients name; None allows all of them.
    """

    name: str
    workers: dict[str, WorkerEntry]
    allow: list[str] | None = None
    address: str | None = None
    keys: str | None = None


def read(path: str | os.PathLike[str]) -> Configuration:
    """The configuration in a file. UsageError says what is wrong with it, and in which line."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from error
    return parse(text, str(path), path.absolute().parent)


def parse(text: str, source: str, folder: Path) -> Configuration:
    """The configuration in a text. ``source``: its name in messages. ``folder``: what paths are relative to."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(_not_toml(source, str(error))) from None
    reader = _Reader(source, lines_of(text), folder)
    return reader.configuration(table, _default_name(source))


def _not_toml(source: str, message: str) -> str:
    found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message)
    if found is None:
        return f"{source} is not TOML: {message}"
    what, line, column = found.groups()
    return f"{source}, line {line}, column {column}: not TOML: {what}"


def _default_name(source: str) -> str:
    stem = Path(source).stem
    return stem if NAME.fullmatch(stem) else "gradwire"


# ---- Kinds of values: each returns the value as the entry has it, or says what it must be --------------------------


class _Wrong(Exception):
    """What a value must be, and perhaps what was meant."""


def _text(value: Any) -> str:
    if type(value) is not str or not value:
        raise _Wrong("a text")
    return value


def _texts(value: Any) -> list[str]:
    if type(value) is not list or not all(type(item) is str and item for item in value):
        raise _Wrong('a list of texts, such as ["a", "b"]')
    return value


def _one_of(*choices: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in choices:
            raise _Wrong(" or ".join(map(repr, choices)), _near(value, choices))
        return str(value)

    return check


def _environment(value: Any) -> dict[str, str]:
    if type(value) is not dict or not all(type(v) in (str, int, float) for v in value.values()):
        raise _Wrong('a table of texts and numbers, such as { OMP_NUM_THREADS = "1" }')
    return {name: str(v) for name, v in value.items()}


def _threads(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _Wrong("a number of threads from 1 up")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise _Wrong("a number of seconds above 0")
    return float(min(value, LONGEST_S))


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise _Wrong("true or false")
    return value


def _target(value: Any) -> str:
    place, colon, attribute = value.rpartition(":") if type(value) is str else ("", "", "")
    if not (place and colon and attribute):
        raise _Wrong("'pkg.mod:attr' or 'path/file.py:attr'")
    return str(value)


def _plain(value: Any) -> Any:
    """Values of a TOML file that a worker can be given: no dates."""
    if type(value) is list:
        return [_plain(item) for item in value]
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    if type(value) not in (str, int, float, bool):
        raise _Wrong("made of texts, numbers, booleans, lists and tables (write a date as a text)")
    return value


def _any(value: Any) -> Any:
    """Checked later, part by part."""
    return value


def _near(word: Any, words: Any) -> str:
    near = difflib.get_close_matches(str(word), [str(w) for w in words], 1)
    return f"; did you mean {near[0]!r}?" if near else ""


Fields = Mapping[str, Callable[[Any], Any]]

_TOP: Fields = {
    **{"name": _text, "allow": _texts, "address": _text, "keys": _text},
    "workers": _any,
}
_WORKER: Fields = {
    **{"framework": _one_of(*FRAMEWORKS), "python": _text, "requirements": _texts, "env": _environment},
    **{"path": _texts, "cwd": _text, "threads": _threads, "x64": _truth, "device": _text},
    **{"start_timeout": _seconds, "restart": _one_of(*MODES)},
    **{"modules": _any, "functions": _any},
}
_LOADS: dict[str, Fields] = {
    "modules": {
        "target": _target,
        "args": lambda value: _plain(value if type(value) is list else _list_please()),
        "kwargs": lambda value: _plain(value if type(value) is dict else _table_please()),
    },
    "functions": {"target": _target},
}


def _list_please() -> NoReturn:
    raise _Wrong("a list")


def _table_please() -> NoReturn:
    raise _Wrong("a table")


class _Reader:
    """Turns tables into entries; knows where each key is written."""

    def __init__(self, source: str, lines: Mapping[KeyPath, int], folder: Path) -> None:
        self._source, self._lines, self._folder = source, lines, folder

    def configuration(self, table: dict[str, Any], default_name: str) -> Configuration:
        found = self._fields(table, _TOP, ())
        name = found.get("name", default_name)
        self._check_name(name, ("name",))
        if ("address" in found) == ("workers" in found):
            both = "workers" in found
            self._refuse(
                ("address",) if both else (),
                "a file has either workers or the address of a broker elsewhere, not both"
                if both
                else "there are no workers: write a table [workers.NAME] for each, with its framework",
            )
        if "keys" in found and "address" not in found:
            self._refuse(("keys",), "keys belong to an address; for a broker here use gradwire up --keys")
        return Configuration(
            name=name,
            workers=self._workers(found["workers"]) if "workers" in found else {},
            allow=found.get("allow"),
            address=found.get("address"),
            keys=self._path(found["keys"]) if "keys" in found else None,
        )

    def _workers(self, tables: Any) -> dict[str, WorkerEntry]:
        self._check_tables(tables, ("workers",), "a table [workers.NAME] for each worker")
        return {name: self._worker(name, table) for name, table in tables.items()}

    def _worker(self, name: str, table: dict[str, Any]) -> WorkerEntry:
        key: KeyPath = ("workers", name)
        self._check_name(name, key)
        found = self._fields(table, _WORKER, key)
        if "framework" not in found:
            self._refuse(key, f"framework is missing; it is one of {', '.join(FRAMEWORKS)}")
        if "requirements" in found and os.sep in found.get("python", ""):
            self._refuse(
                (*key, "python"),
                "with requirements, python is a version such as '3.11': the environment is built for it",
            )
        loads: dict[str, Load] = {}
        for kind in _LOADS:
            self._loads(found.pop(kind, {}), kind, key, loads)
        if "python" in found:
            found["python"] = self._interpreter(found["python"])
        found["cwd"] = self._path(found.get("cwd", "."))
        found["path"] = [self._path(folder) for folder in found.get("path", ["."])]
        return WorkerEntry(name=name, loads=loads, **found)

    def _loads(self, tables: Any, kind: str, worker: KeyPath, loads: dict[str, Load]) -> None:
        key: KeyPath = (*worker, kind)
        if type(tables) is not dict:
            self._refuse(key, f"must be a table: NAME = 'pkg.mod:attr', or a table [{'.'.join(key)}.NAME]")
        for name, value in tables.items():
            self._check_name(name, (*key, name))
            if name in loads:
                self._refuse((*key, name), "a module and a function of one worker have the same name")
            table = value if type(value) is dict else {"target": value}
            found = self._fields(table, _LOADS[kind], (*key, name))
            if "target" not in found:
                self._refuse((*key, name), "target is missing: 'pkg.mod:attr' or 'path/file.py:attr'")
            loads[name] = Load(kind.removesuffix("s"), **found)

    def _fields(self, table: dict[str, Any], fields: Fields, key: KeyPath) -> dict[str, Any]:
        found = {}
        for name, value in table.items():
            if name not in fields:
                hint = _near(name, fields) or f"; there are {', '.join(fields)}"
                self._refuse((*key, name), f"there is no such key{hint}")
            try:
                found[name] = fields[name](value)
            except _Wrong as wrong:
                wanted, *meant = wrong.args
                self._refuse((*key, name), f"must be {wanted}, not {value!r:.80}{''.join(meant)}")
        return found

    def _check_tables(self, tables: Any, key: KeyPath, wanted: str) -> None:
        if type(tables) is not dict or not tables:
            self._refuse(key, f"must be {wanted}")
        for name, table in tables.items():
            if type(table) is not dict:
                self._refuse((*key, name), f"must be {wanted}")

    def _check_name(self, name: str, key: KeyPath) -> None:
        if not NAME.fullmatch(name):
            self._refuse(key, f"a name is made of letters, digits, '_', '-' and '.', and {name!r} is not")

    def _path(self, path: str) -> str:
        return os.path.normpath(self._folder / os.path.expanduser(path))

    def _interpreter(self, python: str) -> str:
        """A path is relative to the file; a version or a name on PATH stays what it is."""
        return os.path.abspath(self._folder / os.path.expanduser(python)) if os.sep in python else python

    def _refuse(self, key: KeyPath, why: str) -> NoReturn:
        line = next((self._lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self._lines), None)
        place = self._source if line is None else f"{self._source}, line {line}"
        raise UsageError(f"{place}: {'.'.join(key)}: {why}" if key else f"{place}: {why}")
