"""Pages that nobody may touch on either side of every segment that is mapped, so that a read past it is a SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

from gradwire_wire.segments import borrowed, own, shared_page, system

__all__ = ["install"]

PAGE = mmap.PAGESIZE
MAP_FIXED = 0x10
_libc = system.libc


class GuardedMapping:
    """Stands in for `system.Mapping`: the same addresses, between two pages without any rights."""

    __slots__ = ("_start", "address", "nbytes")

    def __init__(self, fd: int, nbytes: int, flags: int) -> None:
        whole = -(-nbytes // PAGE) * PAGE
        none = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | system.MAP_NORESERVE
        start = _libc.mmap(None, whole + 2 * PAGE, 0, none, -1, 0)
        if start == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._start = start
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        made = _libc.mmap(start + PAGE, nbytes, rights, flags | MAP_FIXED, fd, 0)
        if made != start + PAGE:
            _libc.munmap(start, whole + 2 * PAGE)
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address, self.nbytes = made, nbytes

    def __del__(self, munmap: Any = _libc.munmap) -> None:
        if hasattr(self, "address"):
            munmap(self._start, -(-self.nbytes // PAGE) * PAGE + 2 * PAGE)


def install() -> None:
    """From now on every segment of this process is mapped between guards."""
    for module in (own, borrowed, shared_page):
        module.Mapping = GuardedMapping  # type: ignore[attr-defined]
