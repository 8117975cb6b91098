"""Environments built from requirements, once, and kept in a cache: ``bridge.worker(…, requirements=[…])``.

Pure: `requirements` (what is asked for), `manifest` (the key, the name, what is written down), `pip_settings`,
`progress`. With the world: `identity` (the interpreter), `installers` (uv, or venv and pip), `children`
(running them), `locks`, `cache`, `building`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from gradwire.environments.building import build
from gradwire.environments.cache import Cache, Environment
from gradwire.environments.requirements import BadRequirement, file_lines
from gradwire_wire.errors import UsageError

__all__ = ["Environment", "build", "listed", "named", "read_requirements", "remove", "unused_since"]


def listed() -> list[Environment]:
    """All environments of the cache, by name; those without a manifest are what interrupted builds have left."""
    return Cache.of(os.environ).listed()


def remove(environments: Iterable[Environment]) -> None:
    """Remove them from the cache. Raises UsageError at the first that is being built or in use."""
    cache = Cache.of(os.environ)
    for environment in environments:
        cache.remove(environment.name)


def unused_since(moment: float) -> list[Environment]:
    """Those that nobody used since then (seconds since 1970)."""
    return [environment for environment in listed() if environment.last_use < moment]


def named(text: str) -> Environment:
    """The one whose name, or the beginning of whose name or key, that is. Raises UsageError unless it is one."""
    there = listed()
    found = [one for one in there if one.name == text] or [
        one for one in there if text and (one.name.startswith(text) or _key(one).startswith(text))
    ]
    if len(found) != 1:
        names = ", ".join(one.name for one in (found or there)) or "none"
        raise UsageError(
            f"{'more than one environment is' if found else 'no environment is'} {text!r}; there are {names}"
        )
    return found[0]


def read_requirements(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a requirements file, and of those it names with ``-r``. Raises UsageError, OSError."""
    here = os.path.dirname(os.path.abspath(path))

    def read(other: str) -> str:
        with open(os.path.join(here, other), encoding="utf-8") as file:
            return file.read()

    try:
        return list(file_lines(read(os.path.basename(path)), read))
    except BadRequirement as error:
        raise UsageError(f"{os.fspath(path)}: {error}") from error


def _key(environment: Environment) -> str:
    return environment.manifest.key if environment.manifest else ""
