"""Environments whose packages come from the registry, built once for all runs of the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradwire import environments
from gradwire_wire.errors import WorkerStartError
from gradwire_wire.interpreters import NoInterpreter, find_interpreter

CACHE = Path(__file__).resolve().parents[2] / ".envs" / "cache"
"""Beside the other environments of this project; `make clean` removes it with them."""

VERSIONS = tuple(f"3.{minor}" for minor in range(9, 16))


def needs_registry(requirements: list[str], python: str) -> None:
    """Make sure of the environment; skips where there is no network or no such Python, fails where it fails otherwise."""
    try:
        environments.build(requirements, python, {**os.environ, "GRADWIRE_CACHE": str(CACHE)})
    except WorkerStartError as error:
        if "try: again with a network" in str(error) or f"no Python {python} was found" in str(error):
            pytest.skip(str(error))
        raise


def pythons() -> list[str]:
    """Versions of Python that a worker may have and that are here, oldest first."""
    return [version for version in VERSIONS if _is_here(version)]


def _is_here(version: str) -> bool:
    try:
        find_interpreter(version, os.environ)
    except NoInterpreter:
        return False
    return True
