"""How what a worker's environment lacks is put there: the end of errors that name a missing package."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from typing import Optional

__all__ = ["how_to_install"]

BUILT = "gradwire-environment.json"  # lies in an environment that gradwire built from requirements
_NAME = re.compile(r"[A-Za-z0-9._-]*")


def how_to_install(packages: str) -> str:
    """The command; or the argument, where the environment was built of it and would not be the one asked for if it were changed.

    What it was built of and is not there was removed by somebody (a cache is swept): then it is built anew.
    """
    built_of = _built_of()
    if built_of is None:
        return f"{sys.executable} -m pip install {shlex.join(packages.split())}"
    had = {_plain(name.group()) for line in built_of if (name := _NAME.match(line))}
    if any(_plain(package) in had for package in packages.split()):
        return (
            f"`gradwire env remove {os.path.basename(sys.prefix)}`, after which it is built anew: it was built with that, and parts "
            "of it have been removed since"
        )
    return f"requirements=[…, {', '.join(map(repr, packages.split()))}], of which this environment was built"


def _built_of() -> Optional[list[str]]:
    """The requirements by which gradwire built this environment; None of another one."""
    path = os.path.join(sys.prefix, BUILT)
    try:
        with open(path, encoding="utf-8") as file:
            return [str(line) for line in json.load(file)["requirements"]]
    except (OSError, ValueError, KeyError, TypeError):
        return [] if os.path.exists(path) else None


def _plain(name: str) -> str:
    """As packages are compared: without case, and with one kind of hyphen."""
    return re.sub(r"[-_.]+", "-", name).lower()
