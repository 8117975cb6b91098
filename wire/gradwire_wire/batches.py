"""Several frames in one packet of a lane: who makes many calls without waiting pays for one packet, and wakes its worker once.

A batch is a head, and then each frame with its length in front. Frames are messages or short calls, in the order in
which they are to be served. Pure.
"""

from __future__ import annotations

import struct
from typing import Sequence

from gradwire_wire.errors import ProtocolError

__all__ = ["BATCH", "MAX_BATCH", "SHORT_BATCH", "batch_of", "frames_in"]

SHORT_BATCH = 3
"""The first byte of a batch. See `gradwire_wire.plans` for those of short frames."""
MAX_BATCH = 64
"""Frames of one batch."""
BATCH = struct.Struct("<BBHI")
"""kind, 0, how many frames, 0."""
LENGTH = struct.Struct("<I")


def batch_of(frames: Sequence[bytes]) -> bytes:
    """The packet of these frames."""
    parts = [BATCH.pack(SHORT_BATCH, 0, len(frames), 0)]
    for frame in frames:
        parts.append(LENGTH.pack(len(frame)))
        parts.append(frame)
    return b"".join(parts)


def frames_in(packet: bytes) -> list[bytes]:
    """The frames of a batch. ProtocolError where it is none."""
    if len(packet) < BATCH.size:
        raise ProtocolError(f"a batch of {len(packet)} bytes")
    kind, _, count, _ = BATCH.unpack_from(packet)
    if kind != SHORT_BATCH or not 0 < count <= MAX_BATCH:
        raise ProtocolError(f"a batch of kind {kind} with {count} frames")
    frames, start = [], BATCH.size
    for _ in range(count):
        if start + LENGTH.size > len(packet):
            raise ProtocolError("a batch that ends before its last frame")
        (nbytes,) = LENGTH.unpack_from(packet, start)
        start += LENGTH.size
        if not 0 < nbytes <= len(packet) - start:
            raise ProtocolError(f"a frame of {nbytes} bytes in a batch with {len(packet) - start} left")
        frames.append(packet[start : start + nbytes])
        start += nbytes
    if start != len(packet):
        raise ProtocolError(f"{len(packet) - start} bytes after a batch's last frame")
    return frames
