"""What is asked of the system here: its functions and numbers, descriptors that are closed and addresses that are unmapped."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

from gradwire_wire.interruption import postpone

__all__ = [
    "FALLOC_KEEP_SIZE_PUNCH_HOLE",
    "MADV_DONTNEED",
    "MADV_POPULATE_READ",
    "MADV_POPULATE_WRITE",
    "MAP_NORESERVE",
    "PAGE",
    "Descriptor",
    "Mapping",
    "libc",
    "madvise",
]

PAGE = mmap.PAGESIZE
MADV_DONTNEED, MADV_POPULATE_READ, MADV_POPULATE_WRITE = 4, 22, 23
FALLOC_KEEP_SIZE_PUNCH_HOLE = 3
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000

libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munlock.argtypes = libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
madvise = libc.madvise


class Descriptor:
    """Something with a descriptor of its own, closed by `close` or with the object."""

    fd = -1

    # os.close is bound here: at the interpreter's end the module is emptied first
    def close(self, close: Any = os.close) -> None:
        """Close the descriptor; a mapping stays until its last view is gone. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close(fd)

    def __del__(self, postpone: Any = postpone) -> None:
        try:
            self.close()
        except BaseException as error:  # of a handler of signals
            postpone(error)


class Mapping:
    """Addresses of a memory file, unmapped with this object. (`mmap.mmap` would keep a second descriptor.)"""

    __slots__ = ("address", "nbytes")

    def __init__(self, fd: int, nbytes: int, flags: int) -> None:
        """OSError where there are not so many addresses."""
        address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address, self.nbytes = address, nbytes

    def make_private(self, fd: int) -> None:
        """From now on what is written here is seen here alone. ``fd``: the memory file's. Where the system refuses, it stays as it is."""
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED
        libc.mmap(self.address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)

    def __del__(self, munmap: Any = libc.munmap, postpone: Any = postpone) -> None:
        try:
            if hasattr(self, "address"):
                munmap(self.address, self.nbytes)
        except BaseException as error:  # of a handler of signals; perhaps it is unmapped by then
            postpone(error)
