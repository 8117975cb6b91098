"""The JAX caller and the JAX worker under the oldest and the newest JAX, each in an environment of its own.

What runs there: the unit tests of the callbacks and of the worker, those of the caller under jit where torch (the
double of their worker) can be borrowed, and `test_jax_essentials.py` with real workers. Today's JAX is .venv's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

UNIT = ["tests/unit/test_jax_callback.py", "tests/unit/test_jax_worker.py", "tests/unit/test_jax_express.py"]
WITH_TORCH = ["tests/unit/test_jax_caller.py", "tests/unit/test_jax_state.py"]
ESSENTIALS = "tests/integration/test_jax_essentials.py"

# pytest in a process that finds what lies in further folders after all that is its own
PYTEST = """
import site, sys, pytest
for folder in sys.argv.pop(1).split(";"):
    folder and site.addsitedir(folder)
sys.exit(pytest.main(sys.argv[1:]))
"""


def version(python: Path, code: str) -> str:
    return subprocess.check_output([python, "-c", code], text=True).strip()


def borrowed(python: Path) -> str:
    """The packages of .envs/torch, if they are for the Python of ``python``."""
    lib = f"python{version(python, 'import sys; print(*sys.version_info[:2], sep=chr(46))')}"
    folder = ROOT / ".envs" / "torch" / "lib" / lib / "site-packages"
    return str(folder) if (folder / "torch").is_dir() else ""


def run(python: Path, *arguments: str, packages: str = "") -> str:
    """pytest's last lines. Everything must pass."""
    command = [python, "-c", PYTEST, packages, "-q", "-p", "no:cacheprovider", *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "PYTHONPATH")}
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout[-300:]


@pytest.fixture(params=[("oldest", "0.4.31"), ("newest", "0.12.0.1")], ids=lambda p: p[0], scope="module")
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter with that JAX."""
    name, wanted = request.param
    python = ROOT / ".envs" / f"jax-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f".envs/jax-{name} is not built: run `make setup`, which says which Python it needs")
    assert version(python, "import jax; print(jax.__version__)") == wanted
    return python


def test_the_units(python: Path) -> None:
    """All but the slowest: the leaks of ten thousand calls, and a function with many conjugates to compile."""
    assert passed(run(python, *UNIT, "-k", "not leave_nothing and not conjugates")) > 100


def test_the_transformations_of_the_caller(python: Path) -> None:
    packages = borrowed(python)
    if not packages:
        pytest.skip("no torch for this Python to play the worker: .envs/torch is of another")
    assert passed(run(python, *WITH_TORCH, "-k", "jit and not express", packages=packages)) > 80


def test_with_real_workers(python: Path) -> None:
    assert passed(run(python, ESSENTIALS)) > 40


def passed(said: str) -> int:
    found = re.search(r"(\d+) passed", said)
    return int(found[1]) if found else 0


def test_a_failure_there_is_a_failure_here() -> None:
    with pytest.raises(AssertionError, match=r"no tests ran|deselected"):
        run(Path(sys.executable), ESSENTIALS, "-k", "nothing_is_called_so")
