"""What failed in a callback, kept until somebody meets the error that XLA makes of it."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from gradwire.jax.derived import Derived, describe
from gradwire_wire.errors import GradwireError

__all__ = ["CallbackError", "Failure", "recall", "remember"]


class CallbackError(GradwireError):
    """What XLA is told: it keeps the text alone."""


class Failure(NamedTuple):
    """error: the original, without the frames it came through (they hold XLA's memory)."""

    error: BaseException
    text: str
    moved_state: bool


_recent: deque[Failure] = deque(maxlen=64)
_lock = threading.Lock()


def remember(error: BaseException, derived: Derived) -> CallbackError:
    """Keep the error, and give what to raise instead of it. Any thread."""
    text = f"{describe(derived)} failed: {type(error).__name__}: {error}"
    with _lock:
        _recent.append(Failure(error.with_traceback(None), text, derived.moves_state))
    return CallbackError(text)


def recall(error: BaseException) -> Failure | None:
    """What is behind an error of XLA's, once; None where it is not one of ours."""
    message = str(error)
    with _lock:
        for failure in reversed(_recent):
            if failure.text in message:
                _recent.remove(failure)
                return failure
    return None
