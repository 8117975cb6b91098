"""Wheels of a few bytes, so that real installers can be watched at work without a network."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

NEEDED = ("pyzmq", "msgpack", "numpy")


def make_wheel(folder: Path, name: str, version: str = "99.0", requires: Iterable[str] = ()) -> Path:
    """A package of that name with one module that knows its version."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}/__init__.py": f"__version__ = {version!r}\n",
        f"{about}/METADATA": head + "".join(f"Requires-Dist: {other}\n" for other in requires),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [*(f"{file},," for file in files), f"{about}/RECORD,,"]
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
        wheel.writestr(f"{about}/RECORD", "\n".join(record) + "\n")
    return path


def make_index(folder: Path, *more: str) -> Path:
    """A folder with what a worker needs, all of it hollow, and these besides; for ``--find-links``."""
    folder.mkdir(exist_ok=True)
    for name in (*NEEDED, *more):
        make_wheel(folder, name)
    return folder
