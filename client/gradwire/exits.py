"""The interpreter's exit closes what is open.

`import gradwire` loads this module, and what can be open only later: exit functions run last registered first, so those
that a program registers between its imports and its first bridge still find that bridge open.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import TYPE_CHECKING

from gradwire_wire import leaving  # noqa: F401 (is told of the exit after what is open has been closed)

if TYPE_CHECKING:
    from gradwire.broker_channel import BrokerChannel

__all__ = ["OWN_THREADS", "end_daemon", "is_leaving", "open_channels"]

EXIT_S = 1.0
OWN_THREADS = "gradwire-"
"""How the names of gradwire's own threads begin."""
_leaving: list[bool] = []

open_channels: weakref.WeakSet[BrokerChannel] = weakref.WeakSet()


def is_leaving() -> bool:
    """Whether what is open is closed because the interpreter is at its exit."""
    return bool(_leaving)


def end_daemon() -> None:
    """At the interpreter's exit, in one of the program's daemon threads: end the thread, as the interpreter is about to do itself.

    The call that the thread makes can have no result any more. `SystemExit` is what `threading` does not report. (In a compiled
    program the thread gets an error instead, which says that the worker was closed.)
    """
    if not _leaving:
        return
    thread = threading.current_thread()
    if thread.daemon and not thread.name.startswith(OWN_THREADS):
        raise SystemExit


def _close_all() -> None:
    """All are asked at once, then waited for together."""
    _leaving.append(True)
    channels = [channel for channel in open_channels if channel.is_ours]
    deadline = time.monotonic() + EXIT_S
    for channel in channels:
        channel.ask_to_end(EXIT_S)
    for channel in channels:
        channel.wait_ended(max(0.0, deadline - time.monotonic()))


atexit.register(_close_all)
