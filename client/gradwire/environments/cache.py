"""Where built environments lie, and which there are.

::

    $GRADWIRE_CACHE, or $XDG_CACHE_HOME/gradwire, or ~/.cache/gradwire       mode 0700
      environments/
        py3.9-tensorflow-cpu-1f2e…/              a virtual environment, in the place where it was built
          gradwire-environment.json              its manifest, written last: without it the rest is a leftover.
                                                 Its time of change is the environment's last use
        py3.9-tensorflow-cpu-1f2e….lock          who builds or removes it (see `locks`)

A virtual environment cannot be moved (its scripts and its pyvenv.cfg name their own folder), so it is built in its
place, and it is the manifest that makes it one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gradwire.environments.locks import AlreadyLocked, locked, owner_of
from gradwire.environments.manifest import Manifest
from gradwire_wire.errors import UsageError

__all__ = ["Cache", "Environment"]

MANIFEST = "gradwire-environment.json"


class Environment(NamedTuple):
    """One that is in the cache. ``manifest``: None for what an interrupted build has left."""

    folder: Path
    manifest: Manifest | None

    @property
    def name(self) -> str:
        """Its folder's."""
        return self.folder.name

    @property
    def python(self) -> str:
        """The path of its interpreter."""
        return str(self.folder / "bin" / "python")

    @property
    def last_use(self) -> float:
        """Seconds since 1970; of a leftover, since when it has been one."""
        file = self.folder / MANIFEST
        return (file if file.exists() else self.folder).stat().st_mtime


class Cache:
    """The folder of all environments. Made when it is first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folder = root / "environments"

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> Cache:
        """The one that these environment variables say."""
        if variables.get("GRADWIRE_CACHE"):
            return cls(Path(variables["GRADWIRE_CACHE"]).expanduser().absolute())
        caches = Path(variables.get("XDG_CACHE_HOME", ""))
        home = variables.get("HOME") or os.path.expanduser("~")
        return cls((caches if caches.is_absolute() else Path(home, ".cache")) / "gradwire")

    def make(self) -> None:
        """The folders. Raises UsageError where they cannot be, or another user could change what is in them."""
        try:
            for folder in (self.root, self._folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._check(folder)
        except OSError as error:
            raise UsageError(
                f"environments cannot be kept in {error.filename or self.root}: {error.strerror or error}; "
                "set GRADWIRE_CACHE to a folder of yours"
            ) from error

    def _check(self, folder: Path) -> None:
        about = folder.stat()
        if about.st_uid != os.geteuid():
            raise UsageError(f"{folder} belongs to another user: set GRADWIRE_CACHE to a folder of yours")
        if stat.S_IMODE(about.st_mode) & 0o022:
            raise UsageError(
                f"others may change what is in {folder}: run `chmod go-w {folder}`, or set GRADWIRE_CACHE"
            )

    def place(self, name: str) -> Path:
        """Where the environment of that name is, or would be."""
        return self._folder / name

    def lock_of(self, name: str) -> Path:
        """See `locks.locked`."""
        return self._folder / f"{name}.lock"

    def find(self, name: str, key: str) -> Environment | None:
        """The finished environment, if there is one whose interpreter is still there."""
        found = self._read(self.place(name))
        usable = found.manifest is not None and found.manifest.key == key and os.access(found.python, os.X_OK)
        return found if usable else None

    def used(self, environment: Environment) -> None:
        """Note that it is used now."""
        with contextlib.suppress(OSError):
            os.utime(environment.folder / MANIFEST)

    def finish(self, folder: Path, manifest: Manifest) -> Environment:
        """The last act of a build: from now on it is one, all at once."""
        unfinished = folder / f"{MANIFEST}.part"
        with open(unfinished, "w") as file:
            file.write(manifest.to_text())
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, folder / MANIFEST)
        return Environment(folder, manifest)

    def listed(self) -> list[Environment]:
        """All there are, leftovers too, by name."""
        if not self._folder.is_dir():
            return []
        return [self._read(path) for path in sorted(self._folder.iterdir()) if path.is_dir()]

    def _read(self, folder: Path) -> Environment:
        try:
            return Environment(folder, Manifest.from_text((folder / MANIFEST).read_text(errors="replace")))
        except OSError:
            return Environment(folder, None)

    def remove(self, name: str) -> None:
        """Remove it. Raises UsageError while it is being built, or a process runs on it."""
        folder, lock = self.place(name), self.lock_of(name)
        try:
            with locked(lock):
                users = list(_processes_in(folder))
                if users:
                    raise UsageError(
                        f"{name} is in use by process {', '.join(map(str, users))}: stop that first"
                    )
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(folder / MANIFEST)  # so that half of it is never taken for the whole
                shutil.rmtree(folder)
                os.unlink(lock)
        except AlreadyLocked:
            raise UsageError(f"{name} is being built or removed by {owner_of(lock)}") from None


def _processes_in(folder: Path) -> Iterator[int]:
    """Processes whose interpreter lies in that folder, by the name they were started with."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(os.fsencode(folder) + b"/"):
                yield int(process.name)
