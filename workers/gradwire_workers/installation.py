"""How what a worker's environment lacks is put there: the end of errors that name a missing package."""

from __future__ import annotations

import os
import shlex
import sys

__all__ = ["how_to_install"]

BUILT = "gradwire-environment.json"  # lies in an environment that gradwire built from requirements


def how_to_install(packages: str) -> str:
    """The command; or the argument, where the environment was built of it and would not be the one asked for if it were changed."""
    if os.path.exists(os.path.join(sys.prefix, BUILT)):
        return (
            f"requirements=[…, {', '.join(map(repr, packages.split()))}], of which this environment was built"
        )
    return f"{sys.executable} -m pip install {shlex.join(packages.split())}"
