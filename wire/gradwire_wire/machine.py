"""What this machine says about memory: /proc, control groups of either version, and limits of the process."""

from __future__ import annotations

import os
import resource
from functools import lru_cache

from gradwire_wire.budget import Group, Reading
from gradwire_wire.errors import UsageError
from gradwire_wire.interruption import came_from_handler

__all__ = ["LIMIT", "longest_file", "read_memory", "shared_limit"]

LIMIT = "GRADWIRE_MAX_SHARED_BYTES"
"""The variable that limits the shared memory which a process may own."""

GROUPS = "/sys/fs/cgroup"
UNLIMITED = 1 << 60
FILES = {  # version: limit, usage, the caches in memory.stat that the kernel drops before it kills
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def read_memory() -> Reading:
    """What the machine, the control groups and the limits say about memory right now."""
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = address_space != resource.RLIM_INFINITY
    mapped = _text("/proc/self/statm").split() if limited else []
    return Reading(
        available=_number_after("MemAvailable:", _text("/proc/meminfo"), 1024),
        groups=_groups(),
        address_space=address_space if limited else None,
        mapped=int(mapped[0]) * resource.getpagesize() if mapped else 0,
    )


def longest_file() -> int | None:
    """Bytes that a file of this process may have, memory files included; None where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def shared_limit() -> int | None:
    """What the environment says about `LIMIT`: a number of bytes, or None. UsageError for anything else."""
    said = os.environ.get(LIMIT, "")
    if said and not said.isdigit():
        raise UsageError(f"{LIMIT} must be a number of bytes, such as {1 << 30}, not {said!r}")
    return int(said) if said else None


def _text(path: str) -> str:
    """A file's text; "" where it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        if came_from_handler(error):
            raise
        return ""


def _number_after(name: str, text: str, unit: int = 1) -> int | None:
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1]) * unit
    return None


def _groups() -> list[Group]:
    """This process's group and those around it that have a limit."""
    found = []
    for version, folder in _folders(_text("/proc/self/cgroup"), GROUPS):
        limit_file, used_file, caches = FILES[version]
        limit = _text(f"{folder}/{limit_file}").strip()
        if not limit.isdigit() or int(limit) >= UNLIMITED:
            continue
        used = _text(f"{folder}/{used_file}").strip()
        if used.isdigit():
            facts = _text(f"{folder}/memory.stat")
            droppable = sum(_number_after(name, facts) or 0 for name in caches)
            found.append(Group(int(limit), max(0, int(used) - droppable)))
    return found


@lru_cache(maxsize=2)
def _folders(groups: str, root: str) -> list[tuple[int, str]]:
    """Version and folder of each group, from /proc/self/cgroup; in a container that is the root's own."""
    found = []
    for line in groups.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        version, top = (2, root) if number == "0" else (1, f"{root}/memory")
        folder = top + path.rstrip("/")
        while not os.path.isdir(folder) and len(folder) > len(top):
            folder = os.path.dirname(folder)
        while len(folder) > len(top):
            found.append((version, folder))
            folder = os.path.dirname(folder)
        found.append((version, top))
    return found
