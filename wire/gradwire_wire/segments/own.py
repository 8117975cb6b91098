"""Segments of this process, for others to map."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import numpy as np

from gradwire_wire.errors import MemoryExhaustedError
from gradwire_wire.interruption import came_from_system
from gradwire_wire.segments.exporters import plain_exporter, span_exporter
from gradwire_wire.segments.files import memory_file, seal, take_memory
from gradwire_wire.segments.system import (
    FALLOC_KEEP_SIZE_PUNCH_HOLE,
    MADV_POPULATE_WRITE,
    Descriptor,
    Mapping,
    libc,
    madvise,
)

__all__ = ["OwnSegment"]

_own: weakref.WeakSet[OwnSegment] = weakref.WeakSet()


class OwnSegment(Descriptor):
    """Memory of ours that others may map. Shared mapping; lives until closed and its views are gone."""

    def __init__(
        self, number: int, nbytes: int, *, limit: int | None = None, used: int = 0, folder: str | None = None
    ) -> None:
        self.number, self.nbytes = number, nbytes
        try:
            self.fd, why_file = memory_file(f"gradwire-{number}", nbytes, folder)
        except OverflowError as error:
            raise MemoryExhaustedError(f"{nbytes} bytes are more than any system has") from error
        try:
            take_memory(self.fd, 0, nbytes, limit, used)
            if not why_file:
                seal(self.fd)
            self.mapping = Mapping(self.fd, nbytes, mmap.MAP_SHARED)
        except BaseException as error:
            self.close()
            if isinstance(error, OverflowError) or (isinstance(error, OSError) and came_from_system(error)):
                raise MemoryExhaustedError(
                    f"{nbytes} bytes of shared memory needed, the system refused: {error}"
                ) from error
            raise
        self.address: int = self.mapping.address
        madvise(self.address, nbytes, MADV_POPULATE_WRITE)
        _own.add(self)

    def array(
        self, shape: tuple[int, ...], dtype: Any, offset: int, strides: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """A plain view for writing a slot; whoever has it answers for the slot. ``strides`` in bytes."""
        memory = plain_exporter(self.nbytes).from_address(self.address)
        memory.segment = self
        return np.ndarray(shape, dtype, memory, offset, strides)

    def held_array(self, shape: tuple[int, ...], dtype: Any, offset: int, held: Any) -> np.ndarray:
        """A view that keeps ``held`` (a slot's holder) alive as long as any alias of it lives."""
        span = span_exporter(self.nbytes).from_address(self.address)
        span.held = held
        return np.ndarray(shape, dtype, span, offset)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return the pages of an idle slot to the system (they read as zeros until taken again)."""
        libc.fallocate(self.fd, FALLOC_KEEP_SIZE_PUNCH_HOLE, offset, nbytes)


def _leave_to_the_parent() -> None:
    for segment in list(_own):
        if segment.fd >= 0:
            segment.mapping.make_private(segment.fd)


os.register_at_fork(after_in_child=_leave_to_the_parent)
