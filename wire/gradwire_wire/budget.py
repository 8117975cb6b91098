"""How much shared memory may be taken: the least of what machine, control group and limits leave. Pure."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Reading", "room_for"]

SPARE = 64 << 20
"""Left to everybody else: once the kernel's own killer runs it is too late for an exception."""


class Reading(NamedTuple):
    """Numbers of bytes as the system reports them; None where it reports none."""

    available: int | None
    group_limit: int | None
    group_used: int | None
    address_space: int | None
    mapped: int


def room_for(reading: Reading, limit: int | None, used: int) -> tuple[int, str]:
    """Bytes that may still be taken, and which limit says so.

    limit, used: the user's own ``max_shared_bytes`` and how much of it is taken.
    """
    rooms = []
    if reading.available is not None:
        rooms.append((reading.available - SPARE, "memory available on this machine"))
    if reading.group_limit is not None and reading.group_used is not None:
        rooms.append((reading.group_limit - reading.group_used - SPARE, "memory left to this control group"))
    if reading.address_space is not None:
        rooms.append((reading.address_space - reading.mapped, "RLIMIT_AS of this process"))
    if limit is not None:
        rooms.append((limit - used, "max_shared_bytes"))
    room, why = min(rooms, default=(1 << 62, "no limit known"))
    return max(0, room), why
