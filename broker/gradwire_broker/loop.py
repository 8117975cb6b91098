"""One wait for everything. Nothing is polled; whoever has nothing to wait for sleeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradwire_wire import sockets

__all__ = ["Loop"]


class Loop:
    """Calls what was to be called when a socket or a descriptor is readable. Handlers may listen, and stop others listening."""

    def __init__(self) -> None:
        self._poller = sockets.Poller()
        self._handlers: dict[Any, Callable[[], object]] = {}

    def listen(self, key: Any, handler: Callable[[], object]) -> None:
        """From now on, ``handler()`` whenever this is readable."""
        self._handlers[key] = handler
        self._poller.register(key, sockets.IN)

    def unlisten(self, key: Any) -> None:
        """No more. Idempotent."""
        if self._handlers.pop(key, None) is not None:
            self._poller.unregister(key)

    def turn(self, wait_ms: int | None) -> None:
        """Wait at most so long (None: for ever), and call the handlers of all that is readable.

        A handler may close descriptors, and another that begins to listen meanwhile may get their numbers: what was readable then was
        not that one. (The pidfd of a worker that is restarted would be taken for readable, and the worker for ended.)
        """
        ready = [(key, self._handlers.get(key)) for key, _ in self._poller.poll(wait_ms)]
        for key, handler in ready:
            if handler is not None and self._handlers.get(key) is handler:
                handler()
