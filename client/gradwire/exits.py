"""The interpreter's exit closes what is open.

`import gradwire` loads this module, and what can be open only later: exit functions run last registered first, so those
that a program registers between its imports and its first bridge still find that bridge open.
"""

from __future__ import annotations

import atexit
import time
import weakref
from typing import TYPE_CHECKING

from gradwire_wire import leaving  # noqa: F401 (is told of the exit after what is open has been closed)

if TYPE_CHECKING:
    from gradwire.broker_channel import BrokerChannel

__all__ = ["open_channels"]

EXIT_S = 1.0

open_channels: weakref.WeakSet[BrokerChannel] = weakref.WeakSet()


def _close_all() -> None:
    """All are asked at once, then waited for together."""
    channels = [channel for channel in open_channels if channel.is_ours]
    deadline = time.monotonic() + EXIT_S
    for channel in channels:
        channel.ask_to_end(EXIT_S)
    for channel in channels:
        channel.wait_ended(max(0.0, deadline - time.monotonic()))


atexit.register(_close_all)
