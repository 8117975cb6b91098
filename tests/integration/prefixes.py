"""Installations of Python of every kind, made of this program's own: what conda and pyenv make, without either."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

NEEDED = ("zmq", "msgpack", "numpy")


def make_installation(folder: Path) -> Path:
    """A whole Python in a folder of its own, which is no virtual environment; returns its interpreter."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    base = Path(sys.base_prefix)
    if not (base / "bin" / name).exists() or not (base / "lib" / name / "os.py").exists():
        pytest.skip(f"this Python does not lie in {base} as Python's own build puts it")
    (folder / "bin").mkdir(parents=True)
    shutil.copy2(base / "bin" / name, folder / "bin" / name)
    (folder / "bin" / "python").symlink_to(name)
    site = folder / "lib" / name / "site-packages"
    site.mkdir(parents=True)
    for entry in (base / "lib" / name).iterdir():
        if entry.name != "site-packages":
            (site.parent / entry.name).symlink_to(entry)
    borrow(site)
    return folder / "bin" / "python"


def make_venv(folder: Path) -> Path:
    """A virtual environment; returns its interpreter."""
    import venv

    venv.create(folder, symlinks=True)
    borrow(next(folder.glob("lib/python*/site-packages")))
    return folder / "bin" / "python"


def borrow(site: Path) -> None:
    """Put what a worker needs there."""
    for module in NEEDED:
        origin = Path(importlib.import_module(module).__file__ or "").parent
        for path in (origin, *origin.parent.glob(f"{module}.libs"), *origin.parent.glob(f"py{module}.libs")):
            (site / path.name).symlink_to(path)


def content(folder: Path) -> dict[str, int]:
    """Everything in a folder: name → time of its last change in nanoseconds. What Python compiles for itself does not count."""
    return {
        str(path.relative_to(folder)): path.lstat().st_mtime_ns
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts and not (path.is_dir() and not path.is_symlink())
    }
