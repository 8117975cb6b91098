"""The runtime directory: where the sockets of one broker and its workers lie, and who removes it.

``<candidate>/gradwire-<uid>-<random>``, mode 0700, locked (``flock`` on the folder itself) by its broker for as
long as that lives. The broker removes it at its end. What a killed broker left is swept by the next one: a
folder of our name and user that nobody has locked. A folder that is swept between being made and being
locked is noticed, by its inode, and another one is made.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from gradwire_wire.rendezvous import LONGEST_NAME, SUN_PATH, candidates, check_fit, folder_prefix

__all__ = ["LONGEST_NAME", "SUN_PATH", "NoRuntimeFolder", "RuntimeFolder", "candidates", "sweep"]


class NoRuntimeFolder(Exception):
    """No candidate will do; the message says why each does not."""


class RuntimeFolder:
    """One that this process made and has locked."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, environment: Mapping[str, str]) -> RuntimeFolder:
        """In the first candidate that will do, after sweeping it. Raises NoRuntimeFolder."""
        refused = []
        for parent in candidates(environment):
            try:
                check_fit(parent)
                sweep(parent)
                return cls._make_in(parent)
            except OSError as error:
                refused.append(f"{parent}: {error.strerror or error}")
        raise NoRuntimeFolder(
            "there is no folder for sockets: set XDG_RUNTIME_DIR to a folder of yours with a short name\n  "
            + "\n  ".join(refused)
        )

    @classmethod
    def _make_in(cls, parent: Path) -> RuntimeFolder:
        for _ in range(100):
            path = parent / f"{folder_prefix()}{secrets.token_hex(4)}"
            os.mkdir(path, 0o700)
            lock = _lock(path)
            if lock is not None:
                os.chmod(path, 0o700)  # whatever the umask was
                return cls(path, lock)
        raise OSError(errno.EAGAIN, "its folders vanish as soon as they are made")

    def remove(self) -> None:
        """Remove the folder and all in it, then unlock. Idempotent; never raises."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> list[Path]:
    """Remove what earlier brokers of this user left in a candidate; returns what was removed."""
    swept = []
    for path in parent.glob(f"{folder_prefix()}*"):
        lock = _lock(path)
        if lock is None:
            continue  # its broker lives, or it is not ours
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
        swept.append(path)
    return swept


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock of this very folder, if it is ours and was free."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = os.fstat(fd)
        there = os.lstat(path)
        if ours.st_uid == os.geteuid() and (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None
