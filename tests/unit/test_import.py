"""`import gradwire` imports no framework (DESIGN §3), and the test of it can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "jax", "jaxlib", "tensorflow", "keras", "ml_dtypes")


def frameworks_loaded_by(statement: str) -> list[str]:
    """Which frameworks a fresh interpreter has loaded after the statement."""
    code = f"import sys\n{statement}\nprint(*[m for m in {FRAMEWORKS!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("package", ["gradwire", "gradwire_broker", "gradwire_workers", "gradwire_wire"])
def test_importing_loads_no_framework(package: str) -> None:
    assert frameworks_loaded_by(f"import {package}") == []


def test_the_test_can_fail() -> None:
    assert frameworks_loaded_by("import ml_dtypes") == ["ml_dtypes"]


def test_importing_gradwire_leaves_what_only_some_programs_need() -> None:
    """It is to cost little more than numpy, zmq and msgpack do (benchmarks/start.py measures that)."""
    heavy = (
        "asyncio",
        "concurrent.futures",
        "logging",
        "multiprocessing",
        "subprocess",
        "tempfile",
        "tomllib",
    )
    code = f"import numpy, zmq, msgpack, sys; had = set(sys.modules); import gradwire; print(*({set(heavy)!r} & (set(sys.modules) - had)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
