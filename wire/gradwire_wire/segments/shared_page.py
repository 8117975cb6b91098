"""The one memory that two processes both write: the page of a lane."""

from __future__ import annotations

import mmap
from typing import Any

from gradwire_wire.errors import MemoryExhaustedError, ProtocolError
from gradwire_wire.interruption import came_from_system
from gradwire_wire.segments.borrowed import ForeignSegment
from gradwire_wire.segments.exporters import plain_exporter
from gradwire_wire.segments.own import OwnSegment
from gradwire_wire.segments.system import MADV_POPULATE_WRITE, Mapping, madvise

__all__ = ["SharedPage"]


class SharedPage:
    """Memory that both ends of a lane write (see page.py). ``memory``: all of it; it stays mapped while a view lives."""

    def __init__(self, mapping: Any, nbytes: int) -> None:
        exporter = plain_exporter(nbytes).from_address(mapping.address)
        exporter.segment = mapping
        self.memory = memoryview(exporter).cast("B")

    @classmethod
    def of(cls, segment: OwnSegment) -> SharedPage:
        """Of an own segment, which keeps its descriptor."""
        return cls(segment.mapping, segment.nbytes)

    @classmethod
    def received(cls, fd: int, nbytes: int) -> SharedPage:
        """Of a received descriptor (takes it over). ProtocolError where it is no such memory, MemoryExhaustedError."""
        segment = ForeignSegment(fd, nbytes)  # which checks it
        if not segment.is_sealed:
            segment.close()
            raise ProtocolError("a lane's page must be a sealed memory file")
        try:
            mapping = Mapping(segment.fd, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            if not came_from_system(error):
                raise
            raise MemoryExhaustedError(
                f"{nbytes} bytes of address space needed for a lane: {error}"
            ) from error
        finally:
            segment.close()
        madvise(mapping.address, nbytes, MADV_POPULATE_WRITE)
        return cls(mapping, nbytes)
