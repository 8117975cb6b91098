"""Waiting for what threads of XLA's let go of."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

__all__ = ["soon"]


def soon(holds: Callable[[], bool], nudge: Callable[[], Any] = gc.collect) -> bool:
    """Whether it holds before long: threads of XLA's drop what a program used when they get to it.

    nudge: by what JAX lets go of that: Python's collection, or a call of it.
    """
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        nudge()
        time.sleep(0.001)
    return holds()
