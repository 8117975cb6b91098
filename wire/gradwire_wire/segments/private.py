"""Pages of this process alone, which an arena hands out like those that are shared."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import numpy as np

from gradwire_wire.errors import MemoryExhaustedError
from gradwire_wire.segments.exporters import plain_exporter

__all__ = ["PrivateSegment"]


class PrivateSegment:
    """Anonymous memory; lives until its views are gone."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self._pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryExhaustedError(f"{nbytes} bytes of memory needed for a copy: {error}") from error
        with contextlib.suppress(AttributeError, OSError):  # a system without them
            self._pages.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def held_array(self, shape: tuple[int, ...], dtype: Any, offset: int, held: Any) -> np.ndarray:
        """A view that keeps ``held``, which refers to this segment, alive as long as any alias of it lives. Nothing here can be lent by reference."""
        memory = plain_exporter(self.nbytes).from_address(self._address)
        memory.segment = held
        return np.ndarray(shape, dtype, memory, offset)

    def give_back(self, offset: int, nbytes: int) -> None:
        """The system may have these pages until they are written again."""
        self._pages.madvise(mmap.MADV_DONTNEED, offset, nbytes)

    def close(self) -> None:
        """Its memory goes with its last view."""
