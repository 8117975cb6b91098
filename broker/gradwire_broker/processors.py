"""How many processors this process may really use: its affinity, and its control group's quota."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["available_processors", "share_of"]


def available_processors(root: Path = Path("/")) -> int:
    """At least 1. ``root`` holds proc and sys."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), _quota(root))))


def share_of(available: int, workers: int) -> int:
    """What each of so many workers gets."""
    return max(1, available // max(1, workers))


def _quota(root: Path) -> float:
    """Processors' worth of time that the control groups allow, the tightest of all levels."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    quotas = [math.inf]
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            quotas += _unified(root / "sys/fs/cgroup", group)
        elif "cpu" in controllers.split(","):
            quotas += _first_version(root / "sys/fs/cgroup" / controllers, group)
    return min(quotas)


def _levels(mount: Path, group: str) -> list[Path]:
    """The group's folder and all above it. (In a container the mount often shows the group itself as its root.)"""
    here = mount / group.strip("/")
    return [folder for folder in (here, *here.parents) if folder.is_relative_to(mount)]


def _unified(mount: Path, group: str) -> list[float]:
    found = []
    for folder in _levels(mount, group):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            found.append(math.inf if quota == "max" else int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return found


def _first_version(mount: Path, group: str) -> list[float]:
    found = []
    for folder in _levels(mount, group):
        try:
            quota = int((folder / "cpu.cfs_quota_us").read_text())
            period = int((folder / "cpu.cfs_period_us").read_text())
            found.append(math.inf if quota < 0 else quota / period)
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return found
