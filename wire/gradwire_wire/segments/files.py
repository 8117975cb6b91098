"""Memory files: making them, giving them their pages, and telling whether one that was received can be trusted."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat

from gradwire_wire.budget import room_for
from gradwire_wire.errors import MemoryExhaustedError, ProtocolError
from gradwire_wire.interruption import came_from_handler, came_from_system
from gradwire_wire.machine import longest_file, read_memory
from gradwire_wire.segments.system import FALLOC_KEEP_SIZE_PUNCH_HOLE, libc

__all__ = [
    "SharingUnavailableError",
    "is_sealed_memory",
    "memory_file",
    "seal",
    "take_memory",
    "why_only_short_files",
]

STEP = 16 << 20
F_ADD_SEALS, F_GET_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1034, 1, 2, 4
MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
LEAST_LONGEST = 64 << 20
"""Where files may not even be so long, messages carry more than memory files would."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)


class SharingUnavailableError(Exception):
    """Neither memfds nor files here (a hardened container, another system): tensors travel inside the messages."""


def why_only_short_files() -> str:
    """Why sharing would not pay, where this process starts with a low limit on files; "" where it has none."""
    longest = longest_file()
    if longest is None or longest >= LEAST_LONGEST:
        return ""
    return f"this process may have no file of more than {longest} bytes: RLIMIT_FSIZE, ulimit -f"


def memory_file(name: str, nbytes: int, folder: str | None) -> tuple[int, str]:
    """A descriptor of so much new memory, and why it is no memfd, "" if it is: a file of ``folder`` cannot be sealed.

    Raises MemoryExhaustedError, or SharingUnavailableError with the reasons.
    """
    reasons: list[str] = []
    for is_memfd in (True, False):
        fd = -1
        try:
            fd = _create_memfd(name) if is_memfd else _nameless_file(folder)
            os.ftruncate(fd, nbytes)
            return fd, "; ".join(reasons)
        except BaseException as error:
            is_handlers = came_from_handler(error, 0 if fd >= 0 else 1)
            if fd >= 0:
                os.close(fd)
            if not isinstance(error, AttributeError) and (is_handlers or not isinstance(error, OSError)):
                raise
            if getattr(error, "errno", None) == errno.EFBIG:
                raise MemoryExhaustedError(
                    f"{nbytes} bytes of shared memory needed, {longest_file()} free (RLIMIT_FSIZE of this process, ulimit -f, which "
                    "limits memory that is shared as it does files). Send smaller pieces, or raise that limit"
                ) from error
            if getattr(error, "errno", None) in _SHORT:
                raise MemoryExhaustedError(f"no further shared memory can be opened: {error}") from error
            reasons.append(f"no {'memfd' if is_memfd else 'file'}: {error}")
    raise SharingUnavailableError("; ".join(reasons))


def _nameless_file(folder: str | None) -> int:
    if folder is None:
        raise OSError(errno.ENOENT, "there is no runtime folder for one")
    try:
        return os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    import tempfile  # rarely needed, and `import gradwire` is to cost little

    try:
        fd, path = tempfile.mkstemp(prefix="segment-", dir=folder)
    except OSError as error:
        raise error.with_traceback(None) from None  # as if the system had been asked here
    os.unlink(path)
    return fd


def seal(fd: int) -> None:
    """Nobody can change the size of this memfd any more: whoever maps it is safe from the others who have it."""
    fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)


def is_sealed_memory(fd: int, nbytes: int, what: str) -> bool:
    """Whether a received descriptor is a memfd that cannot shrink (True) or a file that only its owner knows (False).

    ProtocolError for anything else; nothing is closed.
    """
    try:
        status = os.fstat(fd)
        try:
            seals = fcntl.fcntl(fd, F_GET_SEALS)
        except OSError:
            seals = F_SEAL_SEAL  # not of a kind that has seals
    except OSError as error:
        if not came_from_system(error):
            raise
        raise ProtocolError(f"a received descriptor is no memory file: {error}") from error
    is_nameless = status.st_nlink == 0 and status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o077
    is_file = seals == F_SEAL_SEAL and is_nameless
    is_memory = stat.S_ISREG(status.st_mode) and (seals & F_SEAL_SHRINK or is_file)
    if not is_memory or not 0 < nbytes <= status.st_size:
        raise ProtocolError(
            f"{what} must be a sealed memory file of {nbytes} bytes or more, or a nameless one"
        )
    return not is_file


def _create_memfd(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)
    fd = int(libc.memfd_create(name.encode(), MFD_CLOEXEC | MFD_ALLOW_SEALING))  # conda and uv builds
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def take_memory(fd: int, offset: int, nbytes: int, limit: int | None = None, used: int = 0) -> None:
    """Give a range of a memfd its pages: asks first, then allocates in steps that signals cannot starve.

    Raises MemoryExhaustedError with needed and free bytes; the process is never killed for asking.
    """
    free, why = room_for(read_memory(), limit, used)
    if nbytes > free:
        raise MemoryExhaustedError(
            f"{nbytes} bytes of shared memory needed, {free} free ({why}). Drop results you no longer use, "
            "send smaller pieces, or raise that limit"
        )
    try:
        for start in range(offset, offset + nbytes, STEP):
            os.posix_fallocate(fd, start, min(STEP, offset + nbytes - start))
    except BaseException as error:
        libc.fallocate(fd, FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, nbytes)
        if not isinstance(error, OSError):
            raise
        raise MemoryExhaustedError(
            f"{nbytes} bytes of shared memory needed, {free} free ({why}), but the system refused: {error}"
        ) from error
