"""One process at a time builds or removes an environment.

The lock is `flock` on a file beside the environment, so it ends with its process, however that ends. The file
is removed with the environment; who was waiting for it meanwhile notices, by its inode, and takes the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["AlreadyLocked", "locked", "owner_of"]

LOOK_S = 0.1


class AlreadyLocked(Exception):
    """Another process has it."""


@contextlib.contextmanager
def locked(path: Path, while_waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock. ``while_waiting``: called every tenth of a second; None raises AlreadyLocked instead of waiting.

    Waits for as long as the other process lives; may be interrupted.
    """
    fd = _taken(path)
    while fd is None:
        if while_waiting is None:
            raise AlreadyLocked
        while_waiting()
        time.sleep(LOOK_S)
        fd = _taken(path)
    try:
        os.truncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # also for a child that was forked meanwhile and has the descriptor
        os.close(fd)


def owner_of(path: Path) -> str:
    """Who holds the lock, for people."""
    try:
        return f"process {int(path.read_text())}"
    except (OSError, ValueError):
        return "another process"


def _taken(path: Path) -> int | None:
    """A descriptor with the lock of the file that lies there now, or None."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
