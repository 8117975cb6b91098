"""Private memory for large copies that are made again and again: of what a kept forward reads and its owner may write.

Fresh memory of that size costs more than the copy: the system hands it out page by page, zeroed, and takes it back when it is free. So what is
free again waits here for the next copy, in an arena (`gradwire_wire.arena`) like shared memory, and up to the same bound.
"""

from __future__ import annotations

import numpy as np

from gradwire_wire.arena import Arena
from gradwire_wire.exchange.memory import SlotHolder
from gradwire_wire.segments import PrivateSegment

__all__ = ["Scratch"]

LARGE = 1 << 20
"""Bytes from which on; less comes from the allocator's own store."""


class Scratch:
    """Of one thread; copies end in any."""

    def __init__(self) -> None:
        self._arena = Arena(lambda number, nbytes, used: PrivateSegment(nbytes), lambda slot, used: None)

    def copy(self, array: np.ndarray) -> np.ndarray:
        """A copy, writable and nobody else's, with the axes in memory as the array has them. MemoryExhaustedError."""
        if array.nbytes < LARGE or not array.flags.c_contiguous:
            return array.copy(order="K")
        slot = self._arena.take(array.nbytes)
        made: np.ndarray = slot.segment.held_array(
            array.shape, array.dtype, slot.offset, SlotHolder(self._arena, slot)
        )
        np.copyto(made, array)
        return made
