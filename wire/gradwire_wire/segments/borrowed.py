"""Segments of other processes, and leases on ranges of them."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import numpy as np

from gradwire_wire.budget import room_for
from gradwire_wire.errors import MemoryExhaustedError, ProtocolError
from gradwire_wire.interruption import came_from_system, postpone
from gradwire_wire.leaving import INTERPRETER
from gradwire_wire.machine import read_memory
from gradwire_wire.segments.exporters import span_exporter
from gradwire_wire.segments.files import is_sealed_memory
from gradwire_wire.segments.ledger import Ledger
from gradwire_wire.segments.private_copies import has_private_pages, page_faults
from gradwire_wire.segments.system import (
    MADV_DONTNEED,
    MADV_POPULATE_READ,
    MAP_NORESERVE,
    PAGE,
    Descriptor,
    Mapping,
    libc,
    madvise,
)

__all__ = ["ForeignSegment", "Lease"]

_getpid = os.getpid
_foreign: weakref.WeakSet[ForeignSegment] = weakref.WeakSet()
LARGE = 1 << 20
"""Bytes from which on it is cheaper to ask whether any page fault happened than to look at every page."""


class ForeignSegment(Descriptor):
    """Memory of another process, mapped privately: what is written here nobody else ever sees.

    Mapped at the first view, so that being told of memory costs none. ``until_unused``: something that
    lives as long as any view of this segment. ``is_sealed``: a memfd; otherwise a file, which is read and never mapped.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes over the descriptor. ProtocolError where it could be pulled from under our feet."""
        self.fd, self.nbytes = fd, nbytes
        try:
            self.is_sealed = is_sealed_memory(fd, nbytes, "a segment")
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
            made = Mapping(self.fd, self.nbytes, mmap.MAP_PRIVATE | MAP_NORESERVE)
        except OSError as error:
            if not came_from_system(error):
                raise
            free, why = room_for(read_memory(), None, 0)
            raise MemoryExhaustedError(
                f"{self.nbytes} bytes of address space needed to see a tensor of the other side, {free} free "
                f"({why}): {error}"
            ) from error
        self.address = made.address
        self._span = span_exporter(self.nbytes)
        libc.munlock(self.address, self.nbytes)  # after mlockall() every page here would be a private copy
        madvise(self.address, self.nbytes, MADV_DONTNEED)
        madvise(self.address, self.nbytes, MADV_POPULATE_READ)
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
        if faults >= 0 and faults == page_faults():
            return False
        return has_private_pages(self.address + offset, nbytes)

    def end_lease(self, lease: Lease, interpreter: Any = INTERPRETER) -> None:
        """Called by finalizers: drop private pages, then let the owner have the slot.

        Where they cannot be dropped the slot stays leased: lost memory is better than wrong numbers.
        """
        if interpreter.is_leaving or self._pid != _getpid():
            return
        offset, nbytes = lease.offset, lease.nbytes
        if self.is_sealed and lease.is_changed():
            start = offset & -PAGE
            if madvise(self.address + start, offset + nbytes - start, MADV_DONTNEED):
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
        self.owned, self.is_over, self.faults = owned, False, -1
        if nbytes >= LARGE:
            self.faults = page_faults()
        segment.leases[loan] = (offset, nbytes)

    def is_changed(self) -> bool:
        """Whether any page of it was privately written. Where none was, only faults after this look are of interest."""
        faults = page_faults() if self.faults >= 0 else -1
        is_changed = self.segment.is_changed(self.offset, self.nbytes, self.faults)
        if not is_changed:
            self.faults = faults
        return is_changed

    def __del__(self) -> None:
        if not hasattr(self, "faults"):  # it was interrupted while it was made
            return
        try:
            self.segment.end_lease(self)
        except BaseException as error:  # of a handler of signals, which comes in the middle of anything
            postpone(error)
            if not self.is_over:
                self.segment.end_lease(self)


def _privatise_all() -> None:
    for segment in list(_foreign):
        segment.privatise_leases()


os.register_at_fork(before=_privatise_all)
