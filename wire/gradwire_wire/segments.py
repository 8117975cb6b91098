"""The one file that touches shared memory: segments, views with a lease, private pages.

Theory of operation
-------------------
A *segment* is a nameless memfd. Its owner maps it shared and writes; the descriptor crosses a
tether; everybody else maps it ``MAP_PRIVATE``, readable and writable::

    owner (MAP_SHARED)          memfd, sealed against shrinking         borrower (MAP_PRIVATE)
    writes slot, then sends  ─►  pages of the file  ◄─ reads; a write makes a private copy of the page
    the header

Two rules keep that right.

1. *A slot is rewritten only after its last view is gone.* Every view is an ndarray over a `_Span`, an
   object that exports the mapping's buffer. numpy, torch and JAX keep the exporter of a buffer alive
   until their last alias dies; then ``_Span.__del__`` stores 1 into the lease's byte of the *ledger*,
   a small shared page of bytes. The owner looks there before it reuses the slot. No message and no
   lock: a finalizer runs in any thread, in the middle of anything.
2. *A private copy must not outlive its lease*, or it would hide the next tenant's data. Before the
   byte is stored, ``/proc/self/pagemap`` tells whether pages of the slot were privately copied (2-3 µs);
   they are dropped with MADV_DONTNEED. Slots are whole pages, so no two leases share one.

Order of memory: the borrower's loads of the tensor come before its store of the byte in program
order, with a system call between them; the owner loads the byte, then stores. x86 keeps that order by
itself, elsewhere the system call is the barrier. In the other direction the owner's stores precede
the ZeroMQ send, whose locks are barriers.

``fork``: parent and child would share leases, and the first to drop a view would end it for both.
A before-fork hook therefore copies every leased page privately (the child inherits the copies, which
no owner can change), and a lease is ended only by the process that took it.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import mmap
import os
import resource
import stat
import weakref
from functools import lru_cache
from typing import Any

import numpy as np

from gradwire_wire.budget import Reading, room_for
from gradwire_wire.errors import MemoryExhaustedError, ProtocolError

__all__ = ["ForeignSegment", "Ledger", "OwnSegment", "SharingUnavailableError", "holder_of", "take_memory"]

PAGE = mmap.PAGESIZE
STEP = 16 << 20
MADV_DONTNEED, MADV_POPULATE_READ, MADV_POPULATE_WRITE = 4, 22, 23
F_ADD_SEALS, F_GET_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1034, 2, 4
FALLOC_KEEP_SIZE_PUNCH_HOLE = 3
MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
MAP_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_madvise = _libc.madvise
_getpid = os.getpid
_foreign: weakref.WeakSet[ForeignSegment] = weakref.WeakSet()
_leaving = False


class SharingUnavailableError(Exception):
    """No memfd here (a hardened container, another system): tensors travel inside the messages."""


def _memfd(name: str) -> int:
    try:
        if hasattr(os, "memfd_create"):
            return os.memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)
        fd = _libc.memfd_create(name.encode(), MFD_CLOEXEC | MFD_ALLOW_SEALING)  # conda and uv builds
    except (OSError, AttributeError) as error:
        raise SharingUnavailableError(str(error)) from error
    if fd < 0:
        raise SharingUnavailableError(os.strerror(ctypes.get_errno()))
    return int(fd)


def read_memory() -> Reading:
    """What the machine, the control group and the limits say about memory right now."""
    fields = {}
    try:
        with open("/proc/meminfo") as lines:
            fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    except (OSError, ValueError, IndexError):
        pass
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    mapped = 0
    if address_space != resource.RLIM_INFINITY:
        try:
            with open("/proc/self/statm") as statm:
                mapped = int(statm.read().split()[0]) * PAGE
        except (OSError, ValueError):
            pass
    return Reading(
        available=fields.get("MemAvailable"),
        group_limit=_group_number("memory.max"),
        group_used=_group_number("memory.current"),
        address_space=None if address_space == resource.RLIM_INFINITY else address_space,
        mapped=mapped,
    )


@lru_cache(maxsize=1)
def _group_folder() -> str | None:
    try:
        with open("/proc/self/cgroup") as lines:
            for line in lines:
                if line.startswith("0::"):
                    return "/sys/fs/cgroup" + line[3:].strip()
    except OSError:
        pass
    return None


def _group_number(name: str) -> int | None:
    try:
        with open(f"{_group_folder()}/{name}") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


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
    except OSError as error:
        _libc.fallocate(fd, FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, nbytes)
        raise MemoryExhaustedError(
            f"{nbytes} bytes of shared memory needed, the system refused: {error}"
        ) from error


class OwnSegment:
    """Memory of ours that others may map. Shared mapping; lives until closed and its views are gone."""

    def __init__(self, number: int, nbytes: int, *, limit: int | None = None, used: int = 0) -> None:
        self.number, self.nbytes = number, nbytes
        self.fd = _memfd(f"gradwire-{number}")
        try:
            os.ftruncate(self.fd, nbytes)
            take_memory(self.fd, 0, nbytes, limit, used)
            fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, nbytes)
        except BaseException as error:
            os.close(self.fd)
            if isinstance(error, OSError):
                raise MemoryExhaustedError(
                    f"a segment of {nbytes} bytes cannot be mapped: {error}"
                ) from error
            raise
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _madvise(self.address, nbytes, MADV_POPULATE_WRITE)

    def array(
        self, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """A plain view for writing a slot; whoever has it answers for the slot. ``strides`` in bytes."""
        return np.ndarray(shape, dtype, self._map, offset, strides)

    def held_array(self, shape: tuple[int, ...], dtype: Any, offset: int, held: Any) -> np.ndarray:
        """A view that keeps ``held`` (a slot's holder) alive as long as any alias of it lives."""
        span = _span_type(self.nbytes).from_buffer(self._map)
        span.held = held
        return np.ndarray(shape, dtype, span, offset)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return the pages of an idle slot to the system (they read as zeros until taken again)."""
        _libc.fallocate(self.fd, FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, nbytes)

    def close(self) -> None:
        """Close the descriptor; the mapping goes with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class ForeignSegment:
    """Memory of another process, mapped privately: what is written here nobody else ever sees."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes over the descriptor. ProtocolError where it could be pulled from under our feet."""
        try:
            status = os.fstat(fd)
            sealed = fcntl.fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK
            if not stat.S_ISREG(status.st_mode) or not sealed or nbytes <= 0 or status.st_size < nbytes:
                raise ProtocolError(f"a segment must be a sealed memory file of {nbytes} bytes or more")
            self._map = mmap.mmap(
                fd, nbytes, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        except OSError as error:
            os.close(fd)
            raise ProtocolError(f"a received descriptor cannot be mapped as a segment: {error}") from error
        except BaseException:
            os.close(fd)
            raise
        self.fd, self.nbytes = fd, nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.leases: dict[int, tuple[int, int]] = {}  # loan -> (offset, nbytes), for fork
        self._pid = _getpid()
        self._span = _span_type(nbytes)
        _madvise(self.address, nbytes, MADV_POPULATE_READ)
        _foreign.add(self)

    def view(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        offset: int,
        strides: tuple[int, ...] | None,
        loan: int,
        nbytes: int,
        ledger: Ledger,
    ) -> np.ndarray:
        """A leased view: private, writable, valid while any alias of it lives. ``strides`` in bytes."""
        self.leases[loan] = (offset, nbytes)
        span = self._span.from_buffer(self._map)
        span.held = _Lease(self, offset, nbytes, loan, ledger)
        return np.ndarray(shape, dtype, span, offset, strides)

    def is_changed(self, offset: int, nbytes: int) -> bool:
        """Whether any page of the range was privately written (True where that cannot be known)."""
        return _has_private_pages(self.address + offset, nbytes)

    def end_lease(self, offset: int, nbytes: int, loan: int, ledger: Ledger) -> None:
        """Called by finalizers: drop private pages, then let the owner have the slot."""
        if _leaving or self._pid != _getpid():
            return
        start = offset & -PAGE
        if _has_private_pages(self.address + offset, nbytes):
            _madvise(self.address + start, offset + nbytes - start, MADV_DONTNEED)
        self.leases.pop(loan, None)
        ledger.mark(loan)

    def privatise_leases(self) -> None:
        """Before a fork: give every leased page a private copy, which parent and child then share."""
        everything = np.frombuffer(self._map, np.uint8)
        for offset, nbytes in list(self.leases.values()):
            pages = everything[offset & -PAGE : offset + nbytes : PAGE]
            pages[...] = pages.copy()

    def close(self) -> None:
        """Close the descriptor; the mapping goes with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


class _Lease:
    """Ends a lease when the last alias of a view is gone."""

    __slots__ = ("ledger", "loan", "nbytes", "offset", "segment")

    def __init__(self, segment: ForeignSegment, offset: int, nbytes: int, loan: int, ledger: Ledger) -> None:
        self.segment, self.offset, self.nbytes, self.loan, self.ledger = segment, offset, nbytes, loan, ledger

    def __del__(self) -> None:
        self.segment.end_lease(self.offset, self.nbytes, self.loan, self.ledger)


@lru_cache(maxsize=None)
def _span_type(nbytes: int) -> Any:
    """The exporter under views of a segment of this size; its ``held`` lives as long as any alias."""
    return type("_Span", (ctypes.c_char * nbytes, _Held), {"__slots__": ("held",)})


class _Held:
    """Marks the exporters of this file among all objects that can be under an array."""

    __slots__ = ()
    held: Any


def holder_of(array: np.ndarray) -> Any:
    """What keeps an array's memory: a `_Lease`, the holder given to `held_array`, or None for other memory."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return base.held if isinstance(base, _Held) else None


def _has_private_pages(address: int, nbytes: int) -> bool:
    first = address // PAGE
    count = (address + nbytes - 1) // PAGE - first + 1
    entries = _read_pagemap(first, count)
    if entries is None:
        return True
    kinds = entries >> np.uint64(61)  # bit 0: page of the file; bits 1, 2: swapped, present
    return bool(((kinds & np.uint64(1)) < (kinds != 0)).any())


_pagemap: dict[int, int] = {}


def _read_pagemap(first: int, count: int) -> np.ndarray | None:
    pid = _getpid()
    fd = _pagemap.get(pid)
    if fd is None:
        try:
            fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            fd = -1
        _pagemap[pid] = fd
    if fd < 0:
        return None
    raw = os.pread(fd, count * 8, first * 8)
    return np.frombuffer(raw, np.uint64) if len(raw) == count * 8 else None


class Ledger:
    """A page of bytes shared by lender and borrower: entry n is 1 once loan n has been returned."""

    ENTRIES = 1 << 16

    def __init__(self, fd: int | None = None) -> None:
        """A new ledger, or (taking over ``fd``) one that was received; ProtocolError if unusable."""
        if fd is None:
            self.fd = _memfd("gradwire-ledger")
            os.ftruncate(self.fd, self.ENTRIES)
            fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        else:
            self.fd = fd
            try:
                usable = fcntl.fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK and os.fstat(fd).st_size == self.ENTRIES
            except OSError:
                usable = False
            if not usable:
                os.close(fd)
                raise ProtocolError(f"a ledger must be a sealed memory file of {self.ENTRIES} bytes")
        self._map = mmap.mmap(self.fd, self.ENTRIES)
        os.close(self.fd) if fd is not None else None

    def mark(self, loan: int) -> None:
        """Borrower: this loan is over."""
        self._map[loan] = 1

    def clear(self, loan: int) -> None:
        """Lender: this entry is about to be used again."""
        self._map[loan] = 0

    def first_marked(self, start: int, stop: int) -> int:
        """Lender: the first marked entry in [start, stop), or -1."""
        return self._map.find(b"\x01", start, stop)

    def cancel(self, call_id: int) -> None:
        """Caller: nobody waits for this call any more (the last 8 bytes hold the latest such id)."""
        self._map[-8:] = call_id.to_bytes(8, "little")

    def cancelled(self) -> int:
        """Worker: the latest call that nobody waits for any more."""
        return int.from_bytes(self._map[-8:], "little")

    def close_descriptor(self) -> None:
        """After the descriptor was passed on; the mapping stays."""
        os.close(self.fd)


def _privatise_all() -> None:
    for segment in list(_foreign):
        segment.privatise_leases()


def _leave() -> None:
    global _leaving
    _leaving = True


os.register_at_fork(before=_privatise_all)
atexit.register(_leave)
