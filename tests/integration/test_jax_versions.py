"""The JAX caller and the JAX worker under the oldest and the newest JAX, each in an environment of its own.

What runs there is what a version can change: primitives and their rules, callbacks and XLA's own calls, the order of
effects, jaxprs that the worker takes apart, dtypes. That is the unit tests of the callbacks and of the worker, those of
the caller under jit where torch (the double of their worker) can be borrowed, and `test_jax_essentials.py` with real
workers. Left out is what crosses these with each other or holds them to mathematics (`CROSSED`, and the cells marked
slow): it runs under today's JAX, which is .venv's.

The essentials and "the same bits as jit" run at XLA's own settings, with today's JAX too; the other tests do so at
`conftest.QUICK_XLA`, here as well, for the time of the units is mostly XLA's. Each version meets both settings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUICK_XLA, ROOT, users_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BITS = "tests/unit/test_jax_worker.py"
UNIT = ["tests/unit/test_jax_callback.py", BITS, "tests/unit/test_jax_express.py"]
WITH_TORCH = ["tests/unit/test_jax_caller.py", "tests/unit/test_jax_state.py"]
ESSENTIALS = "tests/integration/test_jax_essentials.py"
# leaks of ten thousand calls, a function with much to compile, words of derivatives against differences, longer words
# (`express` is a way of every call, though marked slow), and what is kept by functions that run eagerly
CROSSED = (
    "leave_nothing or conjugates or tangents_are_differences or (slow and not express)"
    " or ((what_is_kept or rows_are_pulled) and False)"
)

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


def run(python: Path, *arguments: str, packages: str = "", xla: str = "") -> str:
    """pytest's last lines. Everything must pass. ``xla``: XLA's settings, its own by default."""
    command = [python, "-c", PYTEST, packages, "-q", "-p", "no:cacheprovider", *arguments]
    environment = {k: v for k, v in users_environment().items() if k not in ("PYTEST_ADDOPTS", "PYTHONPATH")}
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_XDIST")}
    environment["XLA_FLAGS"] += xla
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
    assert version(python, "from importlib.metadata import version; print(version('jax'))") == wanted
    return python


@pytest.fixture(scope="module")
def quick(python: Path) -> str:
    """`QUICK_XLA` without what that JAX does not know: XLA ends a process that names such a flag."""
    unknown = {
        "oldest": ("xla_cpu_use_fusion_emitters", "xla_cpu_parallel_codegen_split_count"),
        "newest": ("xla_cpu_use_fusion_emitters",),
    }[python.parents[1].name.removeprefix("jax-")]
    return " ".join(flag for flag in QUICK_XLA.split() if flag[2:].partition("=")[0] not in unknown)


def test_with_real_workers_and_the_same_bits(python: Path) -> None:
    assert passed(run(python, ESSENTIALS, BITS, "-k", "test_jax_essentials or bit_for_bit")) > 50


def test_the_units(python: Path, quick: str) -> None:
    assert passed(run(python, *UNIT, "-k", f"not ({CROSSED})", xla=quick)) > 80


def test_the_transformations_of_the_caller(python: Path, quick: str) -> None:
    packages = borrowed(python)
    if not packages:
        pytest.skip("no torch for this Python to play the worker: .envs/torch is of another")
    arguments = [*WITH_TORCH, "-k", "jit", "-m", "not slow"]
    assert passed(run(python, *arguments, packages=packages, xla=quick)) > 50


def test_todays_jax_at_xlas_own_settings() -> None:
    wanted = "(test_jax_essentials and not eager) or bit_for_bit"
    assert passed(run(Path(sys.executable), ESSENTIALS, BITS, "-k", wanted)) > 30


def passed(said: str) -> int:
    found = re.search(r"(\d+) passed", said)
    return int(found[1]) if found else 0


def test_a_failure_there_is_a_failure_here() -> None:
    with pytest.raises(AssertionError, match=r"no tests ran|deselected"):
        run(Path(sys.executable), "tests/wire/test_words.py", "-k", "nothing_is_called_so")
