"""What failed in a callback, kept until somebody meets the error that XLA makes of it."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from gradwire.jax.derived import Derived, describe
from gradwire_wire.errors import GradwireError, RemoteError

__all__ = ["CallbackError", "Failure", "recall", "remember"]


class CallbackError(GradwireError):
    """What XLA is told: it keeps the text alone."""


class Failure(NamedTuple):
    """error: the original; None once it was raised. moved_state: whether the state may not be as the program says."""

    error: BaseException | None
    text: str
    moved_state: bool


_recent: deque[Failure] = deque(maxlen=64)
_lock = threading.Lock()


def remember(error: BaseException, derived: Derived) -> CallbackError:
    """Keep the error, and give what to raise instead of it. Any thread."""
    what = str(error) if isinstance(error, RemoteError) else f"{type(error).__name__}: {error}"
    text = f"{describe(derived)} failed: {what}"
    if derived.ordered:
        text += "\n(JAX may repeat this error for later calls that move state, until gradwire.jax.barrier() is called.)"
    with _lock:
        _recent.append(Failure(_without_frames(error), text, derived.moves_state))
    return CallbackError(text)


def recall(error: BaseException) -> Failure | None:
    """What is behind an error of XLA's: each original once. None where it is not one of ours, or long ago."""
    message = str(error)
    with _lock:
        behind = [i for i, failure in enumerate(_recent) if failure.text in message]
        if not behind:
            return None
        i = max(behind, key=lambda i: (_recent[i].error is not None, i))
        failure = _recent[i]
        _recent[i] = failure._replace(error=None)
        return failure


def _without_frames(error: BaseException) -> BaseException:
    """The frames it came through hold XLA's memory, which ends with the callback."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
