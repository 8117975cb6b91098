"""What a worker does with calls that nobody waits for one by one."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

_noted: list[int] = []


def note(x: Any, text: str = "") -> Any:
    """In which order calls come."""
    _noted.append(int(x.flat[0]))
    return x


note_too = note


def noted(x: Any) -> Any:
    """What has come since the last time."""
    found = np.array(_noted, np.int64)
    _noted.clear()
    return found


def nap(x: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return x


def waits_for(path: str) -> bool:
    """Whether somebody makes that file, before the time is up."""
    until = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.01)
    return os.path.exists(path)


def first(x: Any) -> Any:
    return x.flat[0] * np.ones(1)


def spread(x: Any) -> Any:
    """8 KiB that say which call it was."""
    return np.full(1024, float(x.flat[0]))


def write(x: Any, path: str) -> Any:
    """A line for each time that this runs; the process ends at 7."""
    with open(path, "a") as file:
        file.write(f"{int(x.flat[0])}\n")
    if x.flat[0] == 7:
        os._exit(3)
    return x


def odd_fails(x: Any) -> Any:
    if int(x.flat[0]) % 2:
        raise ValueError(f"odd: {int(x.flat[0])}")
    return x
