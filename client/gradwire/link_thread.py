"""The thread of a link to a broker: waits for descriptors and sockets, does what others hand it, ticks.

Theory of operation. One daemon thread owns the poller and all that is registered with it; nobody else touches them.
Other threads hand it work (`call_soon`: a deque and a byte in a socket pair, no lock, so finalizers may). It never
runs user code and never waits for anything but the poller, so that news is not held up; an exception in what it
calls is printed and does not end it. With nothing to look after it sleeps until something happens.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from gradwire_wire import sockets
from gradwire_wire.interruption import came_from_handler
from gradwire_wire.process import no_thread

__all__ = ["LinkThread", "print_error"]

AGAIN_MS = 50
JOIN_S = 1.0


class LinkThread:
    """``on_end`` is its last act. Methods may be called from any thread where they do not say otherwise."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._stopping = False
        self._poller = sockets.Poller()
        self._watched: dict[Any, Callable[[], None]] = {}
        self._ticks: list[Callable[[], None]] = []
        self._next_tick = 0.0
        self._again: set[Callable[[], None]] = set()
        self._work: deque[Callable[[], None]] = deque()
        self._wake_end, self._waking_end = socket.socketpair()
        for end in (self._wake_end, self._waking_end):
            end.setblocking(False)
        self.listen(self._wake_end.fileno(), self._awake)
        self._thread = threading.Thread(target=self._run, name="gradwire-link", daemon=True)

    def start(self) -> None:
        """Once; what it listens to from the beginning is registered before. MemoryExhaustedError where no thread can be had."""
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            raise no_thread(error) from error

    def close(self) -> None:
        """Its own last act; or that of somebody who could not start it."""
        self._wake_end.close()
        self._waking_end.close()

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether that is where this is asked."""
        return threading.current_thread() is self._thread

    def end(self) -> None:
        """Have it end, and wait for that, at most a second; in the thread itself only the former."""
        if self.is_current:
            self._stop()
            return
        self.call_soon(self._stop)
        self._thread.join(JOIN_S)

    # ---- For all threads ----

    def call_soon(self, work: Callable[[], None]) -> None:
        """Have the thread run this, soon. Takes no lock: finalizers may call it. After its end: dropped."""
        self._work.append(work)
        try:
            self._waking_end.send(b"\0")
        except OSError as error:  # full: the thread is being woken already; or closed
            if came_from_handler(error):
                raise

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Have the thread call this whenever the descriptor is readable or at its end, until `unwatch`."""
        self.call_soon(lambda: self.listen(fd, on_readable))

    def unwatch(self, fd: int) -> None:
        """Forget the descriptor. When this returns it may be closed. Waits at most a second, normally not at all."""
        if self.is_current or not self.is_alive:
            self.unlisten(fd)
            return
        done = threading.Event()

        def forget() -> None:
            self.unlisten(fd)
            done.set()

        self.call_soon(forget)
        done.wait(JOIN_S)

    def every_second(self, tick: Callable[[], None]) -> None:
        """Have the thread call this about once a second."""
        self.call_soon(lambda: self._ticks.append(tick))

    # ---- In the thread, or before its start ----

    def listen(self, key: Any, handler: Callable[[], None]) -> None:
        """Call this whenever the descriptor or socket is readable, until `unlisten` or until it raises."""
        self._watched[key] = handler
        self._poller.register(key, sockets.IN)

    def unlisten(self, key: Any) -> None:
        """Idempotent."""
        if self._watched.pop(key, None) is not None:
            self._poller.unregister(key)

    def again_soon(self, work: Callable[[], None]) -> None:
        """Once more after whatever happens next, or in `AGAIN_MS`: for what nothing to wait for would announce."""
        self._again.add(work)

    # ---- The loop ----

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException:
            print_error()
        finally:
            self._stopping = True
            self._on_end()
            self.close()

    def _turn(self) -> None:
        for key, _ in self._poller.poll(self._wait_ms()):
            handler = self._watched.get(key)
            if handler is not None and not _ran(handler):
                self.unlisten(key)  # it must not be called for ever
        while self._work:
            _ran(self._work.popleft())
        if self._ticks and time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + 1.0
            for tick in list(self._ticks):
                _ran(tick)
        again, self._again = self._again, set()
        for work in again:
            _ran(work)

    def _wait_ms(self) -> int | None:
        if self._again:
            return AGAIN_MS
        return max(0, int(1000 * (self._next_tick - time.monotonic())) + 1) if self._ticks else None

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_end.recv(4096)

    def _stop(self) -> None:
        self._stopping = True


def _ran(callback: Callable[[], None]) -> bool:
    """Whether it ran to its end. It is somebody else's: what it raises must not end the thread."""
    try:
        callback()
    except BaseException:
        print_error()
        return False
    return True


def print_error() -> None:
    """The error at hand. The user's stderr may be closed, or none, or raise anything."""
    with contextlib.suppress(BaseException):
        traceback.print_exc()
