"""What the soak calls."""

from __future__ import annotations

import gc
import zlib
from typing import Any

import numpy as np


def seen(x: Any) -> Any:
    """The CRC of what arrived, and the bytes back."""
    return zlib.crc32(np.ascontiguousarray(x)), x


def collect() -> int:
    return gc.collect()
