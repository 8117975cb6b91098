"""Which interpreter the user means (a path, a name on PATH, a version), and what of our environment it may see. Pure,
but for looking at files."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from glob import glob
from pathlib import Path

__all__ = ["NoInterpreter", "cleaned", "find_interpreter"]

# These tell a Python where its packages are, and the one that is started is another one.
_FOREIGN = ("PYTHON", "CONDA_", "_CONDA_", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "_PYI_")
_FOREIGN_EXACT = {"PYENV_VERSION", "PYENV_DIR", "PYENV_VIRTUAL_ENV", "PIPENV_ACTIVE", "POETRY_ACTIVE", "_"}


class NoInterpreter(Exception):
    """There is none, or it cannot be run; the message says what to do."""


def find_interpreter(python: str | None, environment: Mapping[str, str]) -> str:
    """The path to execute. Links are not followed: a virtual environment's interpreter is one.

    ``python``: a path, a name to look up on the environment's PATH, a version such as "3.9", or None for the
    interpreter that runs this. Raises NoInterpreter.
    """
    if python is None:
        return os.path.abspath(sys.executable)
    if re.fullmatch(r"\d+(\.\d+){0,2}", python):
        return _of_version(python, environment)
    if os.sep not in python:
        found = shutil.which(python, path=environment.get("PATH"))
        if found is None:
            raise NoInterpreter(f"there is no {python!r} on PATH; give the path of an interpreter")
        return found
    return _checked(python)


def _checked(path: str) -> str:
    if os.path.isdir(path):
        inside = (os.path.join(path, *parts) for parts in (("bin", "python"), ("python",)))
        hint = next((f"; did you mean {python}?" for python in inside if os.path.isfile(python)), "")
        raise NoInterpreter(f"the interpreter {path} is a folder{hint}")
    if not os.path.exists(path):
        broken = " (a link whose target is gone)" if os.path.islink(path) else ""
        raise NoInterpreter(
            f"there is no interpreter at {path}{broken}; give the path of one, as in .../bin/python"
        )
    if not os.access(path, os.X_OK):
        raise NoInterpreter(f"the interpreter {path} is not executable for this user")
    return path


def _of_version(version: str, environment: Mapping[str, str]) -> str:
    for candidate in _candidates(version, environment):
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    raise NoInterpreter(
        f"no Python {version} was found on PATH, in pyenv or in uv; give the path of an interpreter"
    )


def _candidates(version: str, environment: Mapping[str, str]) -> Iterator[str]:
    minor = ".".join(version.split(".")[:2])
    if version == minor:
        for folder in environment.get("PATH", os.defpath).split(os.pathsep):
            # A shim of pyenv runs whatever the current folder says, or nothing.
            if os.path.isabs(folder) and os.path.basename(folder) != "shims":
                yield os.path.join(folder, f"python{version}")
    home = environment.get("HOME") or os.path.expanduser("~")
    pyenv = environment.get("PYENV_ROOT") or os.path.join(home, ".pyenv")
    uv = os.path.join(home, ".local", "share", "uv", "python")
    for pattern in (
        f"{pyenv}/versions/{version}",
        f"{pyenv}/versions/{version}.*",
        f"{uv}/cpython-{version}[.-]*",
    ):
        yield from (
            str(Path(found, "bin", f"python{minor}")) for found in sorted(glob(pattern), reverse=True)
        )


def cleaned(base: Mapping[str, str], python: str) -> dict[str, str]:
    """The caller's environment as the interpreter ``python`` may see it."""
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_EXACT
    }
    if "PATH" in base:
        kept["PATH"] = _path(base, python)
    return kept


def _path(base: Mapping[str, str], python: str) -> str:
    """PATH without the caller's environment, and with the worker's own where it is one, as when activated."""
    theirs = {os.path.join(base[name], "bin") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if base.get(name)}
    folders = [folder for folder in base["PATH"].split(os.pathsep) if folder not in theirs]
    prefix, name = os.path.split(os.path.dirname(python))
    if name == "bin" and any(
        os.path.exists(os.path.join(prefix, mark)) for mark in ("pyvenv.cfg", "conda-meta")
    ):
        folders = [os.path.join(prefix, "bin"), *folders]
    return os.pathsep.join(folders)
