"""Whether this process has private copies of pages that it maps: the kernel's answer."""

from __future__ import annotations

import os
import sys
from resource import RUSAGE_SELF, getrusage

from gradwire_wire.interruption import came_from_handler
from gradwire_wire.segments.system import PAGE

__all__ = ["has_private_pages", "page_faults"]

_getpid = os.getpid


def page_faults() -> int:
    """How many page faults this process has had. A private copy of a page begins with one, whoever writes it.

    (The kernel's own writes for a system call too. Only another process that writes into this one, as a debugger
    does, has the fault instead.)
    """
    usage = getrusage(RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def has_private_pages(address: int, nbytes: int) -> bool:
    first = address // PAGE
    count = (address + nbytes - 1) // PAGE - first + 1
    entries = _read_pagemap(first, count)
    return entries is None or bool(entries[_TOP::8].translate(None, _NOT_PRIVATE))


_TOP = 7 if sys.byteorder == "little" else 0
"""Which byte of an entry of 64 bits has its highest bits: 0x80 present, 0x40 swapped, 0x20 page of the file."""
_NOT_PRIVATE = bytes(top for top in range(256) if top & 0x20 or not top & 0xC0)
_pagemap: dict[int, int] = {}


def _read_pagemap(first: int, count: int) -> bytes | None:
    pid = _getpid()
    fd = _pagemap.get(pid)
    if fd is None:
        try:
            fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if came_from_handler(error):
                raise
            fd = -1
        _pagemap[pid] = fd
    if fd < 0:
        return None
    try:
        raw = os.pread(fd, count * 8, first * 8)
    except OSError as error:
        if came_from_handler(error):
            raise
        return None
    return raw if len(raw) == count * 8 else None
