"""What a handler of signals raises while a system call waits, told apart from what the call itself raises.

Python runs the handler inside of the waiting call, so its exception comes out of the call: `KeyboardInterrupt`, and as
well whatever a handler of the user's raises, such as the TimeoutError of an alarm, which is an `OSError` like those
of a broken socket.

It runs the handler inside of finalizers as well, and there prints what it raises and goes on: Ctrl-C would be lost. Those of
ours that take a while postpone it instead, to the next call of the thread that handles signals.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque

__all__ = [
    "came_from_handler",
    "came_from_parsing",
    "came_from_system",
    "postpone",
    "postponed",
    "raise_postponed",
]

postponed: deque[BaseException] = deque()
"""What is still to be raised; looked at before each call."""


def came_from_handler(error: BaseException, depth: int = 0) -> bool:
    """Whether an exception was raised below a call of C's, so by a handler: it has a frame more than our own.

    depth: frames between the one that catches it and the one that made the call.
    """
    frame = error.__traceback__
    for _ in range(depth + 1):
        frame = None if frame is None else frame.tb_next
    return frame is not None


_SOCKETS = os.path.abspath(socket.__file__)
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def came_from_parsing(error: BaseException) -> bool:
    """Whether what msgpack, or what we do in its stead, was given is to blame; otherwise a handler was run meanwhile.

    msgpack raises many kinds, and may have frames of its own.
    """
    file = _origin(error)
    return file.startswith(_OURS) or "msgpack" in file


def came_from_system(error: BaseException) -> bool:
    """The same of a call of the system's somewhere within, ours or by a socket's methods: whether it is to blame."""
    file = _origin(error)
    return file.startswith(_OURS) or file == _SOCKETS


def _origin(error: BaseException) -> str:
    """The file in which it was raised."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return "" if innermost is None else os.path.abspath(innermost.tb_frame.f_code.co_filename)


def postpone(error: BaseException) -> None:
    """Note what a finalizer of ours has met, which itself raises nothing: so a handler did, in the main thread."""
    postponed.append(error)


def raise_postponed() -> None:
    """Raise the first of what was postponed, if this is the thread in which handlers run."""
    if postponed and threading.current_thread() is threading.main_thread():
        raise postponed.popleft()
