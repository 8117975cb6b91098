"""How much shared memory may be taken: the least of what machine, control groups and limits leave. Pure."""

from __future__ import annotations

from typing import NamedTuple, Sequence

__all__ = ["Group", "Reading", "room_for"]

SPARE = 64 << 20
"""Left to everybody else: once the kernel's own killer runs it is too late for an exception."""
SPARE_ADDRESSES = 8 << 20
"""Left to this process's own objects under RLIMIT_AS."""


class Group(NamedTuple):
    """A control group's limit and what counts against it, without caches that the kernel would drop."""

    limit: int
    used: int


class Reading(NamedTuple):
    """Numbers of bytes as the system reports them; None where it reports none."""

    available: int | None
    groups: Sequence[Group]
    address_space: int | None
    mapped: int


def room_for(reading: Reading, limit: int | None, used: int) -> tuple[int, str]:
    """Bytes that may still be taken, and which limit says so.

    limit, used: what GRADWIRE_MAX_SHARED_BYTES says, and how much of it is taken.
    """
    rooms = [
        (group.limit - group.used - SPARE, "memory left to this control group") for group in reading.groups
    ]
    if reading.available is not None:
        rooms.append((reading.available - SPARE, "memory available on this machine"))
    if reading.address_space is not None:
        rooms.append((reading.address_space - reading.mapped - SPARE_ADDRESSES, "RLIMIT_AS of this process"))
    if limit is not None:
        rooms.append((limit - used, "GRADWIRE_MAX_SHARED_BYTES of this process"))
    room, why = min(rooms, default=(1 << 62, "no limit known"))
    return max(0, room), why
