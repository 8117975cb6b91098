"""``python share_bytecode.py FROM TO…``: what Python has compiled in one environment holds in others, for the same files.

uv links a package's files from its cache (environments/install.py), so that environments share them. Bytecode holds for
the file whose size and time it notes, whatever the file's path, and these are then the same. So what `.venv` had compiled
to import three frameworks need not be compiled by the first worker of each. Files that are not shared are left alone.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path


def packages(environment: str) -> Path:
    """The folder of its packages, for the Python that runs this (others have no bytecode to give or take)."""
    return Path(environment, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")


def compiled(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Bytecode below the folder, and what it was compiled from, as paths below it."""
    for parent, _, names in os.walk(folder):
        if os.path.basename(parent) == "__pycache__":
            cached = Path(parent).relative_to(folder)
            for name in names:
                if name.endswith(f".{sys.implementation.cache_tag}.pyc"):
                    yield cached / name, cached.parent / f"{name.split('.')[0]}.py"


def share(origin: Path, target: Path) -> None:
    for bytecode, source in compiled(origin):
        try:
            if os.path.samefile(origin / source, target / source) and not (target / bytecode).exists():
                (target / bytecode).parent.mkdir(exist_ok=True)
                os.link(origin / bytecode, target / bytecode)
        except FileNotFoundError:
            continue  # a package that the other one does not have


if __name__ == "__main__":
    origin, *targets = map(packages, sys.argv[1:])
    for target in targets:
        share(origin, target)
