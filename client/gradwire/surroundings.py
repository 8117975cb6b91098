"""Which interpreters there are on this machine, and what workers would find in each. Imports nothing of theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import NamedTuple

__all__ = ["NEEDED", "Interpreter", "interpreters", "look_into"]

NEEDED = {"pyzmq": "zmq", "msgpack": "msgpack", "numpy": "numpy"}
"""What a worker needs beside its framework: distribution → module."""
FRAMEWORKS = ("torch", "tensorflow", "jax")
LOOK_S = 20.0
AT_ONCE = 4

# Runs in the interpreter that is looked into: any Python 3, nothing imported but the standard library.
_LOOK = """
import json, sys
found = {}
try:
    from importlib.metadata import version
except ImportError:
    version = None
for name in sys.argv[1:]:
    for spelled in (name, name + "-cpu") if name == "tensorflow" else (name,):
        try:
            found[name] = version(spelled)
            break
        except Exception:
            pass
print(json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "packages": found}))
"""


class Interpreter(NamedTuple):
    """A Python, and the versions of what workers use of it. ``problem``: why it could not be looked into."""

    path: str
    python: str
    packages: dict[str, str]
    problem: str = ""

    @property
    def frameworks(self) -> dict[str, str]:
        """Versions of the frameworks it has."""
        return {name: self.packages[name] for name in FRAMEWORKS if name in self.packages}

    @property
    def missing(self) -> list[str]:
        """What a worker would lack in it."""
        return [name for name in NEEDED if name not in self.packages]


def interpreters(folder: Path, environment: Mapping[str, str]) -> list[Interpreter]:
    """Those that gradwire's users are likely to mean, each looked into; blocks at most about 20 s."""
    paths = list(dict.fromkeys(_paths(folder, environment)))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(look_into, paths))


def look_into(path: str) -> Interpreter:
    """Ask one interpreter about itself, isolated from this process's environment."""
    names = [*FRAMEWORKS, *NEEDED]
    try:
        done = subprocess.run(
            [path, "-I", "-c", _LOOK, *names], capture_output=True, text=True, timeout=LOOK_S, check=False
        )
        told = json.loads(done.stdout)
        return Interpreter(path, told["python"], told["packages"])
    except subprocess.TimeoutExpired:
        return Interpreter(path, "?", {}, f"it did not answer within {LOOK_S:g} s")
    except (OSError, ValueError, KeyError) as error:
        return Interpreter(path, "?", {}, f"it cannot be asked: {error}")


def _paths(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Without repetitions of one environment: a virtual environment is its own, whatever it links to."""
    seen = set()
    for candidate in _candidates(folder, environment):
        path = Path(candidate)
        if not path.is_file() or not os.access(path, os.X_OK):
            continue
        prefix = path.parent.parent
        key = str(prefix) if (prefix / "pyvenv.cfg").exists() else os.path.realpath(path)
        if key not in seen:
            seen.add(key)
            yield os.path.abspath(candidate)


def _candidates(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    yield sys.executable
    for pattern in (".venv", "venv", "env", "envs/*", ".envs/*"):
        yield from sorted(glob(str(folder / pattern / "bin" / "python")))
    for place in environment.get("PATH", os.defpath).split(os.pathsep):
        if (
            os.path.isabs(place) and os.path.basename(place) != "shims"
        ):  # pyenv's shims say whatever a folder says
            yield os.path.join(place, "python3")
    home = environment.get("HOME") or os.path.expanduser("~")
    pyenv = environment.get("PYENV_ROOT") or os.path.join(home, ".pyenv")
    for pattern in (f"{pyenv}/versions/*", f"{home}/.local/share/uv/python/cpython-*"):
        yield from sorted(glob(f"{pattern}/bin/python3"))
    for prefix in _lines(os.path.join(home, ".conda", "environments.txt")):
        yield os.path.join(prefix, "bin", "python")


def _lines(path: str) -> list[str]:
    """The lines of a file; none where it is not there."""
    try:
        return [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
    except OSError:
        return []
