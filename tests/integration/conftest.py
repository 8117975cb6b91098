"""One bridge and at most one worker of each kind for the tests that do not kill any."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gradwire as gw

TARGETS = pathlib.Path(__file__).parent / "targets"


@pytest.fixture(scope="session")
def shared_bridge() -> Iterator[gw.Bridge]:
    with gw.connect() as bridge:
        yield bridge


@pytest.fixture(scope="session")
def worker_of(shared_bridge: gw.Bridge, request: pytest.FixtureRequest) -> Callable[[str], gw.Worker]:
    """The shared worker of a framework, started when it is first asked for."""
    made: dict[str, gw.Worker] = {}

    def worker(framework: str) -> gw.Worker:
        if framework not in made:
            python: Any = None if framework == "numpy" else request.getfixturevalue(f"{framework}_python")
            x64 = True if framework == "jax" else None
            made[framework] = shared_bridge.worker(
                framework, python=python, path=[TARGETS], threads=1, x64=x64
            )
        return made[framework]

    return worker
