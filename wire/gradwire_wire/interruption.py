"""What a handler of signals raises while a system call waits, told apart from what the call itself raises.

Python runs the handler inside of the waiting call, so its exception comes out of the call: `KeyboardInterrupt`, and as
well whatever a handler of the user's raises, such as the TimeoutError of an alarm, which is an `OSError` like those
of a broken socket.
"""

from __future__ import annotations

__all__ = ["came_from_handler"]


def came_from_handler(error: BaseException, depth: int = 0) -> bool:
    """Whether an exception was raised below a call of C's, so by a handler: it has a frame more than our own.

    depth: frames between the one that catches it and the one that made the call.
    """
    frame = error.__traceback__
    for _ in range(depth + 1):
        frame = None if frame is None else frame.tb_next
    return frame is not None
