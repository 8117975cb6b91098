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
   until their last alias dies; then ``Lease.__del__`` stores 1 into the lease's byte of the *ledger*,
   a small shared page of bytes. The owner looks there before it reuses the slot. No message and no
   lock: a finalizer runs in any thread, in the middle of anything.
2. *A private copy must not outlive its lease*, or it would hide the next tenant's data. Before the
   byte is stored, ``/proc/self/pagemap`` tells whether pages of the slot were privately copied (2-3 µs; of large
   slots, whose pages are many, only if this process had a page fault since: every private copy begins with one);
   they are dropped with MADV_DONTNEED. Slots are whole pages, so no two leases share one.

Order of memory: the borrower's loads of the tensor come before its store of the byte in program
order, with a system call between them; the owner loads the byte, then stores. x86 keeps that order by
itself, elsewhere the system call is the barrier. In the other direction the owner's stores precede
the ZeroMQ send, whose locks are barriers.

Where there is no memfd (forbidden, another kernel), segments are *files*: nameless ones (O_TMPFILE, or unlinked as soon as they are
open) in the runtime folder of mode 0700. A file cannot be sealed: whoever has its descriptor can truncate it under a mapping,
which is a SIGBUS for who looks. So nobody maps a file of another process: a borrower *reads* its tensors (``pread``, one more copy;
too short a file is a short read and an error), and the loan is over at once; a ledger that is a file is read and written
with ``pread`` and ``pwrite``. Only the owner maps its own file. A peer could truncate that, on purpose: it is a process of the same user
(SO_PEERCRED), and could as well kill this one. Where no file can be had either, tensors travel inside the messages.

``fork``: parent and child would share leases, and the first to drop a view would end it for both.
A before-fork hook therefore copies every leased page privately (the child inherits the copies, which
no owner can change), and a lease is ended only by the process that took it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import sys
import weakref
from functools import lru_cache
from resource import RUSAGE_SELF, getrusage
from typing import Any, Sequence

import numpy as np

from gradwire_wire.budget import room_for
from gradwire_wire.errors import MemoryExhaustedError, ProtocolError
from gradwire_wire.interruption import postpone
from gradwire_wire.leaving import INTERPRETER
from gradwire_wire.machine import read_memory

__all__ = [
    "ForeignSegment",
    "Lease",
    "Ledger",
    "OwnSegment",
    "SharedPage",
    "SharingUnavailableError",
    "holder_of",
    "read_memory",
    "take_memory",
]

PAGE = mmap.PAGESIZE
STEP = 16 << 20
MADV_DONTNEED, MADV_POPULATE_READ, MADV_POPULATE_WRITE = 4, 22, 23
F_ADD_SEALS, F_GET_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1034, 2, 4
FALLOC_KEEP_SIZE_PUNCH_HOLE = 3
MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
MAP_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munlock.argtypes = _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_madvise = _libc.madvise
_getpid = os.getpid
_foreign: weakref.WeakSet[ForeignSegment] = weakref.WeakSet()


class SharingUnavailableError(Exception):
    """Neither memfds nor files here (a hardened container, another system): tensors travel inside the messages."""


F_SEAL_SEAL = 1
LARGE = 1 << 20
"""Bytes from which on it is cheaper to ask whether any page fault happened than to look at every page."""
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)


def _memory_file(name: str, nbytes: int, folder: str | None) -> tuple[int, str]:
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
        except (AttributeError, OSError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, OverflowError):
                raise
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

    fd, path = tempfile.mkstemp(prefix="segment-", dir=folder)
    os.unlink(path)
    return fd


def _is_sealed(fd: int, nbytes: int, what: str) -> bool:
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
    fd = int(_libc.memfd_create(name.encode(), MFD_CLOEXEC | MFD_ALLOW_SEALING))  # conda and uv builds
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
        _libc.fallocate(fd, FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, nbytes)
        if not isinstance(error, OSError):
            raise
        raise MemoryExhaustedError(
            f"{nbytes} bytes of shared memory needed, {free} free ({why}), but the system refused: {error}"
        ) from error


class _Descriptor:
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


class _Mapping:
    """Addresses of a memory file, unmapped with this object. (`mmap.mmap` would keep a second descriptor.)"""

    __slots__ = ("address", "nbytes")

    def __init__(self, fd: int, nbytes: int, flags: int) -> None:
        """OSError where there are not so many addresses."""
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address, self.nbytes = address, nbytes

    def __del__(self, munmap: Any = _libc.munmap, postpone: Any = postpone) -> None:
        try:
            if hasattr(self, "address"):
                munmap(self.address, self.nbytes)
        except BaseException as error:  # of a handler of signals; perhaps it is unmapped by then
            postpone(error)


class OwnSegment(_Descriptor):
    """Memory of ours that others may map. Shared mapping; lives until closed and its views are gone."""

    def __init__(
        self, number: int, nbytes: int, *, limit: int | None = None, used: int = 0, folder: str | None = None
    ) -> None:
        self.number, self.nbytes = number, nbytes
        try:
            self.fd, why_file = _memory_file(f"gradwire-{number}", nbytes, folder)
        except OverflowError as error:
            raise MemoryExhaustedError(f"{nbytes} bytes are more than any system has") from error
        try:
            take_memory(self.fd, 0, nbytes, limit, used)
            if not why_file:
                fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            self._map = _Mapping(self.fd, nbytes, mmap.MAP_SHARED)
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, OverflowError)):
                raise MemoryExhaustedError(
                    f"{nbytes} bytes of shared memory needed, the system refused: {error}"
                ) from error
            raise
        self.address: int = self._map.address
        _madvise(self.address, nbytes, MADV_POPULATE_WRITE)

    def array(
        self, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """A plain view for writing a slot; whoever has it answers for the slot. ``strides`` in bytes."""
        memory = _memory_type(self.nbytes).from_address(self.address)
        memory.segment = self
        return np.ndarray(shape, dtype, memory, offset, strides)

    def held_array(self, shape: tuple[int, ...], dtype: Any, offset: int, held: Any) -> np.ndarray:
        """A view that keeps ``held`` (a slot's holder) alive as long as any alias of it lives."""
        span = _span_type(self.nbytes).from_address(self.address)
        span.held = held
        return np.ndarray(shape, dtype, span, offset)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return the pages of an idle slot to the system (they read as zeros until taken again)."""
        _libc.fallocate(self.fd, FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, nbytes)


class SharedPage:
    """Memory that both ends of a lane write (see page.py). ``memory``: all of it; it stays mapped while a view lives."""

    def __init__(self, mapping: Any, nbytes: int) -> None:
        exporter = _memory_type(nbytes).from_address(mapping.address)
        exporter.segment = mapping
        self.memory = memoryview(exporter).cast("B")

    @classmethod
    def of(cls, segment: OwnSegment) -> SharedPage:
        """Of an own segment, which keeps its descriptor."""
        return cls(segment._map, segment.nbytes)

    @classmethod
    def received(cls, fd: int, nbytes: int) -> SharedPage:
        """Of a received descriptor (takes it over). ProtocolError where it is no such memory, MemoryExhaustedError."""
        segment = ForeignSegment(fd, nbytes)  # which checks it
        if not segment.is_sealed:
            segment.close()
            raise ProtocolError("a lane's page must be a sealed memory file")
        try:
            mapping = _Mapping(segment.fd, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            raise MemoryExhaustedError(
                f"{nbytes} bytes of address space needed for a lane: {error}"
            ) from error
        finally:
            segment.close()
        _madvise(mapping.address, nbytes, MADV_POPULATE_WRITE)
        return cls(mapping, nbytes)


class ForeignSegment(_Descriptor):
    """Memory of another process, mapped privately: what is written here nobody else ever sees.

    Mapped at the first view, so that being told of memory costs none. ``until_unused``: something that
    lives as long as any view of this segment. ``is_sealed``: a memfd; otherwise a file, which is read and never mapped.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes over the descriptor. ProtocolError where it could be pulled from under our feet."""
        self.fd, self.nbytes = fd, nbytes
        try:
            self.is_sealed = _is_sealed(fd, nbytes, "a segment")
        except ProtocolError:
            self.close()
            raise
        self._map: Any = None
        self.address = 0
        self.leases: dict[int, tuple[int, int]] = {}  # loan -> (offset, nbytes), for fork
        self.until_unused: Any = None
        self._pid = _getpid()

    @property
    def is_mapped(self) -> bool:
        """Whether `view` may be called."""
        return self._map is not None

    def map(self) -> None:
        """Map it, once (callers see to that). MemoryExhaustedError where this process has no room."""
        if not self.is_sealed:
            self._map = self.fd
            return
        try:
            made = _Mapping(self.fd, self.nbytes, mmap.MAP_PRIVATE | MAP_NORESERVE)
        except OSError as error:
            free, why = room_for(read_memory(), None, 0)
            raise MemoryExhaustedError(
                f"{self.nbytes} bytes of address space needed to see a tensor of the other side, {free} free "
                f"({why}): {error}"
            ) from error
        self.address = made.address
        self._span = _span_type(self.nbytes)
        _libc.munlock(self.address, self.nbytes)  # after mlockall() every page here would be a private copy
        _madvise(self.address, self.nbytes, MADV_DONTNEED)
        _madvise(self.address, self.nbytes, MADV_POPULATE_READ)
        _foreign.add(self)
        self._map = made

    def view(
        self, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None, lease: Lease
    ) -> np.ndarray:
        """A view of what was leased: private, writable, valid while any alias of it lives. ``strides`` in bytes.

        Of a file it is a copy, which needs the lease no more.
        """
        if not self.is_sealed:
            return np.ndarray(shape, dtype, self._read(lease.offset, lease.nbytes), 0, strides)
        span = self._span.from_address(self.address)
        span.held = lease
        return np.ndarray(shape, dtype, span, lease.offset, strides)

    def _read(self, offset: int, nbytes: int) -> np.ndarray:
        """A copy of a range of a file. ProtocolError where somebody has cut the file off."""
        try:
            made = np.empty(nbytes, np.uint8)
        except MemoryError as error:
            raise MemoryExhaustedError(
                f"{nbytes} bytes of memory needed for a tensor of the other side"
            ) from error
        rest = made.data
        while rest:
            count = os.preadv(self.fd, [rest], offset + nbytes - len(rest))
            if not count:
                raise ProtocolError("a segment is shorter than it was")
            rest = rest[count:]
        return made

    def is_changed(self, offset: int, nbytes: int, faults: int = -1) -> bool:
        """Whether any page of the range was privately written (True where that cannot be known).

        faults: the page faults this process had had when the range was as its owner wrote it, if known.
        """
        if faults >= 0 and faults == _page_faults():
            return False
        return _has_private_pages(self.address + offset, nbytes)

    def end_lease(self, lease: Lease, interpreter: Any = INTERPRETER) -> None:
        """Called by finalizers: drop private pages, then let the owner have the slot.

        Where they cannot be dropped the slot stays leased: lost memory is better than wrong numbers.
        """
        if interpreter.is_leaving or self._pid != _getpid():
            return
        offset, nbytes = lease.offset, lease.nbytes
        if self.is_sealed and lease.is_changed():
            start = offset & -PAGE
            if _madvise(self.address + start, offset + nbytes - start, MADV_DONTNEED):
                return
        self.leases.pop(lease.loan, None)
        lease.is_over = True
        lease.ledger.mark(lease.loan)

    def privatise_leases(self) -> None:
        """Before a fork: give every leased page a private copy, which parent and child then share."""
        everything = np.ndarray((self.nbytes,), np.uint8, self._span.from_address(self.address))
        for offset, nbytes in list(self.leases.values()):
            pages = everything[offset & -PAGE : offset + nbytes : PAGE]
            pages[...] = pages.copy()


class Lease:
    """Held by views: the range of a foreign segment is ours until the last alias is gone.

    owned: the owner made this copy for us and will not write it; False for memory passed by reference.
    faults: the page faults of this process when nothing had been written for certain; -1 where looking at the pages is cheap enough.
    """

    __slots__ = ("faults", "is_over", "ledger", "loan", "nbytes", "offset", "owned", "segment")

    def __init__(
        self, segment: ForeignSegment, offset: int, nbytes: int, loan: int, ledger: Ledger, owned: bool
    ) -> None:
        self.segment, self.offset, self.nbytes, self.loan, self.ledger = segment, offset, nbytes, loan, ledger
        self.owned, self.is_over = owned, False
        self.faults = _page_faults() if nbytes >= LARGE else -1
        segment.leases[loan] = (offset, nbytes)

    def is_changed(self) -> bool:
        """Whether any page of it was privately written. Where none was, only faults after this look are of interest."""
        faults = _page_faults() if self.faults >= 0 else -1
        is_changed = self.segment.is_changed(self.offset, self.nbytes, self.faults)
        if not is_changed:
            self.faults = faults
        return is_changed

    def __del__(self) -> None:
        try:
            self.segment.end_lease(self)
        except BaseException as error:  # of a handler of signals, which comes in the middle of anything
            postpone(error)
            if not self.is_over:
                self.segment.end_lease(self)


@lru_cache(maxsize=None)
def _memory_type(nbytes: int) -> Any:
    """The exporter under plain views of an own segment of this size."""
    return type("_Memory", (ctypes.c_char * nbytes,), {"__slots__": ("segment",)})


@lru_cache(maxsize=None)
def _span_type(nbytes: int) -> Any:
    """The exporter under views of a segment of this size; its ``held`` lives as long as any alias.

    Whatever is held refers to the segment, and so keeps the addresses mapped.
    """
    return type("_Span", (ctypes.c_char * nbytes, _Held), {"__slots__": ("held",)})


class _Held:
    """Marks the exporters of this file among all objects that can be under an array."""

    __slots__ = ()
    held: Any


def holder_of(array: np.ndarray) -> Any:
    """What keeps an array's memory: a `Lease`, the holder given to `held_array`, or None for other memory."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return base.held if isinstance(base, _Held) else None


def _page_faults() -> int:
    """How many page faults this process has had. A private copy of a page begins with one, whoever writes it.

    (The kernel's own writes for a system call too. Only another process that writes into this one, as a debugger
    does, has the fault instead.)
    """
    usage = getrusage(RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def _has_private_pages(address: int, nbytes: int) -> bool:
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
        except OSError:
            fd = -1
        _pagemap[pid] = fd
    if fd < 0:
        return None
    try:
        raw = os.pread(fd, count * 8, first * 8)
    except OSError:
        return None
    return raw if len(raw) == count * 8 else None


class _FileBytes(_Descriptor):
    """A file as a ledger's bytes: read and written, never mapped, since it cannot be sealed. What was cut off reads as zeros."""

    def __init__(self, fd: int) -> None:
        """Takes over the descriptor."""
        self.fd = fd

    def __setitem__(self, at: int | slice, value: int | bytes) -> None:
        start, data = (at, bytes([value])) if isinstance(at, int) else (at.start, value)  # type: ignore[list-item]
        os.pwrite(self.fd, data, start)  # type: ignore[arg-type]

    def __getitem__(self, at: slice) -> bytes:
        return os.pread(self.fd, at.stop - at.start, at.start)

    def find(self, wanted: bytes, start: int, stop: int) -> int:
        """As of bytes."""
        found = os.pread(self.fd, stop - start, start).find(wanted)
        return found if found < 0 else start + found


class Ledger(_Descriptor):
    """A page of bytes shared by lender and borrower: entry n is 1 once loan n has been returned.

    The last `CANCELLED` of 8 bytes each hold ids of calls that nobody waits for any more, each id in the
    place it has modulo their number. Where memory cannot be shared, a ledger is this process's own: then
    nothing can be lent on it (``is_shared``) and cancelling has no effect.
    """

    ENTRIES = 1 << 16
    CANCELLED = 64
    LOANS = ENTRIES - 8 * CANCELLED
    """Loans are the entries 1 .. LOANS - 1."""

    def __init__(self, folder: str | None = None) -> None:
        """A new ledger, whose descriptor is to be passed on. ``why``: the reason where it is not shared memory."""
        self._map: Any = bytearray(self.ENTRIES)
        self.why = ""
        try:
            self.fd, self.why = _memory_file("gradwire-ledger", self.ENTRIES, folder)
        except SharingUnavailableError as error:
            self.why = str(error)
            return
        if not self.why:
            fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        self._share(not self.why)

    @classmethod
    def received(cls, descriptors: Sequence[int]) -> Ledger:
        """The ledger that came with a greeting (takes over the descriptor, if any); ProtocolError if unusable."""
        ledger = cls.__new__(cls)
        ledger._map, ledger.why = bytearray(cls.ENTRIES), ""
        if descriptors:
            (ledger.fd,) = descriptors
            try:
                sealed = _is_sealed(ledger.fd, cls.ENTRIES, "a ledger")
                if os.fstat(ledger.fd).st_size != cls.ENTRIES:
                    raise ProtocolError(f"a ledger must be a sealed memory file of {cls.ENTRIES} bytes")
                ledger._share(sealed)
            except OSError as error:
                raise ProtocolError(f"a ledger cannot be mapped: {error}") from error
            finally:
                ledger.close()
        return ledger

    def _share(self, is_sealed: bool) -> None:
        self._map = mmap.mmap(self.fd, self.ENTRIES) if is_sealed else _FileBytes(os.dup(self.fd))

    @property
    def carrier(self) -> str:
        """What memory that its process lends is: ``"shared memory"``, ``"files"`` or, where none, ``"messages"``."""
        names = {mmap.mmap: "shared memory", _FileBytes: "files"}
        return names.get(type(self._map), "messages")

    def detach(self) -> None:
        """The other side is gone: marks go nowhere from now on, and the memory is unmapped."""
        self._map = bytearray(self.ENTRIES)

    @property
    def is_shared(self) -> bool:
        """Whether the other side sees what is marked here."""
        return type(self._map) is not bytearray

    @property
    def descriptors(self) -> list[int]:
        """What to pass on with the greeting: one descriptor, or none where memory cannot be shared."""
        return [self.fd] if self.fd >= 0 else []

    def mark(self, loan: int) -> None:
        """Borrower: this loan is over."""
        self._map[loan] = 1

    def clear(self, loan: int) -> None:
        """Lender: this entry is about to be used again."""
        self._map[loan] = 0

    def first_marked(self, start: int, stop: int) -> int:
        """Lender: the first marked entry in [start, stop), or -1."""
        found: int = self._map.find(b"\x01", start, stop)
        return found

    def cancel(self, call_id: int) -> None:
        """Caller: nobody waits for this call any more."""
        self._map[self._place_of(call_id)] = call_id.to_bytes(8, "little")

    def is_cancelled(self, call_id: int) -> bool:
        """Worker: whether nobody waits for this call any more."""
        start = self.LOANS + 8 * (call_id % self.CANCELLED)
        return bool(self._map[start : start + 8] == call_id.to_bytes(8, "little"))

    def _place_of(self, call_id: int) -> slice:
        start = self.LOANS + 8 * (call_id % self.CANCELLED)
        return slice(start, start + 8)


def _privatise_all() -> None:
    for segment in list(_foreign):
        segment.privatise_leases()


os.register_at_fork(before=_privatise_all)
