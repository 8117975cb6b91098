"""What makes an environment: uv where it is installed, the interpreter's own venv and pip otherwise.

Each says by which commands, with which variables. Both leave the choice of the interpreter to us (uv may not fetch
one), and both follow their own configuration; uv is told pip's as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from gradwire.environments.pip_settings import config_files, flags_for_uv, pip_settings, variables_for_uv
from gradwire_wire.errors import UsageError

__all__ = ["Installer", "Pip", "Step", "Uv", "find_installer"]

PROBE_S = 10.0

# They would send what is installed somewhere else, or nothing anywhere.
_MISLEADING = {
    *(
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_ROOT",
        "PIP_PYTHON",
        "PIP_DRY_RUN",
        "PIP_REQUIRE_VIRTUALENV",
        "PIP_REQUIREMENT",
    ),
    *(
        "UV_PYTHON",
        "UV_SYSTEM_PYTHON",
        "UV_PROJECT",
        "UV_WORKING_DIR",
        "UV_VENV_CLEAR",
        "UV_PROJECT_ENVIRONMENT",
    ),
}


class Step(NamedTuple):
    """A command, and what it is about, for people."""

    doing: str
    command: list[str]


class Installer(Protocol):
    """Makes environments by commands that somebody else runs. ``environment``: the variables for these commands."""

    name: str
    environment: dict[str, str]

    def steps(self, python: str, folder: Path, requirements: Path) -> list[Step]:
        """To make an environment from an interpreter in a folder that is not there, with what the file asks for.

        The file is there once the first step is done.
        """


class Uv:
    """https://docs.astral.sh/uv"""

    def __init__(self, path: str, version: str, base: Mapping[str, str]) -> None:
        """``base``: variables, clean of the caller's interpreter."""
        self._path, self.name = path, f"uv {version}"
        settings = {} if _has_uv_settings(base) else _pip_settings(base)
        self._flags = flags_for_uv(settings)
        self.environment = {
            **_not_misled(base),
            **variables_for_uv(settings, base),
            **{"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1"},
        }

    def steps(self, python: str, folder: Path, requirements: Path) -> list[Step]:
        """See `Installer`."""
        install = self.install(
            str(folder / "bin" / "python"), "--compile-bytecode", "--requirements", str(requirements)
        )
        return [
            Step("making it", [self._path, "venv", "--no-project", "--python", python, str(folder)]),
            Step("installing", install),
        ]

    def install(self, python: str, *arguments: str) -> list[str]:
        """The command that installs into an environment that is there, by its interpreter."""
        return [self._path, "pip", "install", "--python", python, *self._flags, *arguments]


class Pip:
    """The interpreter's own modules venv and ensurepip, and the pip that they bring."""

    name = "venv and pip"

    def __init__(self, base: Mapping[str, str]) -> None:
        """``base``: variables, clean of the caller's interpreter."""
        self.environment = {**_not_misled(base), "PIP_USER": "0", "PIP_NO_COLOR": "1"}

    def steps(self, python: str, folder: Path, requirements: Path) -> list[Step]:
        """See `Installer`."""
        pip = [
            str(folder / "bin" / "python"),
            "-I",
            "-m",
            "pip",
            "install",
            "--no-input",
            "--progress-bar",
            "off",
        ]
        return [
            Step("making it", [python, "-I", "-m", "venv", str(folder)]),
            Step("installing", [*pip, "--disable-pip-version-check", "--requirement", str(requirements)]),
        ]


def find_installer(base: Mapping[str, str]) -> Installer:
    """uv where there is one that runs; ``GRADWIRE_INSTALLER`` insists on "uv" or "pip". Raises UsageError."""
    insisted = base.get("GRADWIRE_INSTALLER", "")
    if insisted not in ("", "uv", "pip"):
        raise UsageError(f"GRADWIRE_INSTALLER is {insisted!r}: set it to uv or pip, or leave it to gradwire")
    if insisted == "pip":
        return Pip(base)
    for path in _candidates(base):
        version = _version_of_uv(path, base)
        if version:
            return Uv(path, version, base)
    if insisted == "uv":
        raise UsageError("GRADWIRE_INSTALLER is uv, and there is none on PATH that runs")
    return Pip(base)


def _candidates(base: Mapping[str, str]) -> Iterator[str]:
    """On PATH, beside this program's interpreter, and where its installer puts it."""
    folders = [*base.get("PATH", "").split(os.pathsep), os.path.dirname(sys.executable)]
    folders += [os.path.join(_home(base), ".local", "bin"), os.path.join(_home(base), ".cargo", "bin")]
    for folder in folders:
        found = os.path.isabs(folder) and shutil.which("uv", path=folder)
        if found:
            yield found


def _version_of_uv(path: str, base: Mapping[str, str]) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        done = subprocess.run(
            [path, "--version"], env=dict(base), capture_output=True, text=True, timeout=PROBE_S, check=False
        )
        match = re.match(r"uv (\d\S*)", done.stdout)
        if done.returncode == 0 and match:
            return match[1]
    return ""


def _not_misled(base: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in base.items() if name not in _MISLEADING}


def _has_uv_settings(base: Mapping[str, str]) -> bool:
    """Whether somebody wrote down for uv where packages come from."""
    home = Path(base.get("XDG_CONFIG_HOME") or Path(_home(base), ".config"))
    files = (base.get("UV_CONFIG_FILE") or str(home / "uv" / "uv.toml"), "/etc/uv/uv.toml")
    return any(re.search(r"index|find-links", _text(file)) for file in files)


def _pip_settings(base: Mapping[str, str]) -> dict[str, list[str]]:
    return pip_settings(base, map(_text, config_files(base, _home(base))))


def _home(base: Mapping[str, str]) -> str:
    return base.get("HOME") or os.path.expanduser("~")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
