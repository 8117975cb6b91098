"""The rules about imports hold, and what holds them can fail.

import-linter holds the layers, and keeps each framework, zmq and shared memory to their places (contracts in
pyproject.toml, run by `make check`). What it cannot see is read off the syntax tree here: serializers that run
code, and imports by a name in a string.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("client/gradwire", "broker/gradwire_broker", "workers/gradwire_workers", "wire/gradwire_wire")

# Reading any of these formats runs what the sender wrote into it.
RUNS_WHAT_IT_READS = {"pickle", "_pickle", "marshal", "shelve", "cloudpickle", "dill", "joblib"}

# Package → the stems of the files that may import it by a name in a string.
KEPT_TO = {
    "torch": {"torch"},
    "jax": {"jax"},
    "jaxlib": {"jax"},
    "tensorflow": {"tensorflow", "keras"},
    "keras": {"tensorflow", "keras"},
    "zmq": {"sockets"},
}


# ---- The syntax tree -----------------------------------------------------------------------------------------------


def imports(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """(line, top-level package, whether it is named by a string) of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0], False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, str(node.module).partition(".")[0], False
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value).partition(".")[0], True


def broken_rules(path: Path, source: str) -> list[str]:
    """What a file does that no file, or no file of its name, may do."""
    tree = ast.parse(source, str(path))
    names = {path.stem, *path.parts[:-1]}  # jax.py, and whatever lies in jax/
    broken = []
    for line, package, by_string in imports(tree):
        if package in RUNS_WHAT_IT_READS:
            broken.append(f"{path}:{line}: imports {package}, which runs what it reads")
        if by_string and package in KEPT_TO and not names & KEPT_TO[package]:
            broken.append(f"{path}:{line}: imports {package} by a string")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "eval":
            broken.append(f"{path}:{node.lineno}: calls eval")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            broken.append(f"{path}:{node.value.lineno}: asks numpy for pickle")
    return broken


def test_no_file_imports_what_it_may_not() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) >= len(PACKAGES)
    broken = [rule for path in files for rule in broken_rules(path.relative_to(ROOT), path.read_text())]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal as m",
        "from dill import loads",
        "def f():\n    from cloudpickle.cloudpickle import dumps",
        "import importlib\nimportlib.import_module('torch.nn')",
        "__import__('zmq')",
        "eval('1')",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_the_reading_can_fail(source: str) -> None:
    assert broken_rules(Path("client/gradwire/remote.py"), source)


@pytest.mark.parametrize(
    "source", ["import json", "net.eval()", "from .pickle import x", "import_module(name)"]
)
def test_the_reading_lets_pass(source: str) -> None:
    assert not broken_rules(Path("client/gradwire/remote.py"), source)


def test_a_framework_may_be_imported_by_a_string_in_its_own_file() -> None:
    assert not broken_rules(Path("workers/gradwire_workers/torch.py"), "import_module('torch')")


def imported_beyond_all(files: dict[str, str]) -> list[str]:
    """What modules import from each other by name that `__all__` there does not offer. files: source by dotted name."""
    trees = {name: ast.parse(source) for name, source in files.items()}
    offered = {
        name: set(ast.literal_eval(node.value))
        for name, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    }
    return [
        f"{name}: {node.module}.{alias.name}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in offered
        for alias in node.names
        if alias.name not in offered[node.module] and f"{node.module}.{alias.name}" not in trees
    ]


def test_modules_offer_what_others_import_from_them() -> None:
    files = {}
    for package in PACKAGES:
        source_root = (ROOT / package).parent
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(source_root).with_suffix("").parts).removesuffix(".__init__")
            files[name] = path.read_text()
    assert imported_beyond_all(files) == ["gradwire.commands: gradwire.__version__"]
    assert imported_beyond_all({"a": "__all__ = ['x']", "b": "from a import x, y"}) == ["b: a.y"]


# ---- The contracts -------------------------------------------------------------------------------------------------

# (file, its source, whether the contracts of pyproject.toml allow it)
CONTRACT_CASES = [
    ("client/gradwire/remote.py", "import gradwire_wire", True),
    ("client/gradwire/remote.py", "import gradwire_broker", False),
    ("broker/gradwire_broker/spawn.py", "def f():\n    import gradwire_workers", False),
    ("wire/gradwire_wire/headers.py", "from gradwire import x", False),
    ("client/gradwire/torch.py", "import torch", True),
    ("client/gradwire/remote.py", "def f():\n    import torch", False),
    ("workers/gradwire_workers/loop.py", "from jax import numpy", False),
    ("workers/gradwire_workers/torch.py", "import jax", False),
    ("wire/gradwire_wire/tensors/tensorflow.py", "import tensorflow", True),
    ("client/gradwire/keras.py", "import keras", True),
    ("broker/gradwire_broker/spawn.py", "import keras", False),
    ("wire/gradwire_wire/dtypes.py", "import ml_dtypes", False),
    ("wire/gradwire_wire/sockets.py", "import zmq", True),
    ("workers/gradwire_workers/loop.py", "import zmq.asyncio", False),
    ("wire/gradwire_wire/segments/own.py", "import mmap", True),
    ("wire/gradwire_wire/page.py", "import mmap", False),
]


@pytest.mark.parametrize(("file", "source", "allowed"), CONTRACT_CASES)
def test_the_contracts_tell_right_from_wrong(tmp_path: Path, file: str, source: str, allowed: bool) -> None:
    """On a tree of empty packages and one file with one import."""
    for package in (*PACKAGES, "wire/gradwire_wire/tensors", "wire/gradwire_wire/segments"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / file).write_text(source + "\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", ROOT / "pyproject.toml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(tmp_path / p.split("/")[0]) for p in PACKAGES)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == (0 if allowed else 1), done.stdout + done.stderr
    assert ("BROKEN" in done.stdout) is not allowed, done.stdout + done.stderr
