"""Steps of optimizers that were submitted: how many may be under way, and errors that nobody has asked for.

What is called after `Optimizer.submit` must see what the step has done. But it goes by another line, and could overtake the step. So every other
message of the connection waits first until the pipeline is empty (`Connection.settle`).

Nobody is forced to ask a future. A step that failed would then be missing in the training without anybody knowing. So the next thing that is
asked of the worker raises the step's error, once, unless its future has raised it already.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradwire.futures import CallFuture, finish

if TYPE_CHECKING:
    from gradwire.pipeline import Pipeline

__all__ = ["StepFuture", "Steps", "together"]

UNDER_WAY = 10
"""Steps under way at most. Two keep the worker busy, and answers that come together are always less than half of ten; with a hundred the worker reads
what has left its caches long ago (1.4 times the time)."""
QUICK_NS, TOGETHER = 1_000_000, 4
"""Nanoseconds of a step whose answer may wait for that of the next; so many answers come together at most."""


class StepFuture(CallFuture):
    """A future of a step. is_told: whether somebody has learned from it how the step ended."""

    is_told = False

    def result(self, timeout: float | None = None) -> Any:
        """See `concurrent.futures.Future.result`."""
        try:
            return super().result(timeout)
        finally:
            self.is_told = self._is_over()
            del self  # as in the class above

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `concurrent.futures.Future.exception`."""
        error = super().exception(timeout)
        self.is_told = True
        return error


class Steps:
    """Of one connection. Any thread."""

    def __init__(self) -> None:
        self._futures: deque[StepFuture] = deque()

    def new_future(self, pipeline: Pipeline) -> StepFuture:
        """A future for a step that goes by that pipeline."""
        return StepFuture(pipeline.finished)

    def done(self, make: Callable[[], Any]) -> StepFuture:
        """A step that is made here and now."""
        future = StepFuture(threading.Condition(threading.RLock()))
        try:
            finish(future, make(), None)
        except Exception as error:
            finish(future, None, error)
        return future

    def noted(self, future: StepFuture) -> StepFuture:
        """It was submitted."""
        self._futures.append(future)
        return future

    def make_room(self) -> None:
        """Wait until one more may be under way. Raises as `raise_failed`."""
        self.raise_failed()
        while len(self._futures) >= UNDER_WAY:
            with contextlib.suppress(IndexError):  # another thread has noted its end
                self._futures[0].wait()
            self.raise_failed()

    def raise_failed(self) -> None:
        """Raises what the first of them has raised that is done, and has failed untold."""
        futures = self._futures
        while futures and (first := futures[0]).done():
            with contextlib.suppress(ValueError):  # another thread has
                futures.remove(first)
            error = None if first.is_told else first.exception()
            del first
            if error is not None:
                error.add_note(
                    "This was raised by a step that was submitted before, and whose future nobody has asked."
                )
                try:
                    raise error
                finally:
                    del error  # which has this frame


def together(took_ns: int, under_way: int) -> int:
    """How many answers may come together, of a step whose like took so long (0: unknown) and before which so many are under way. Pure.

    At most half of those that are under way with this one: the worker goes on with the others while their sender is woken, and makes new ones.
    """
    return min(TOGETHER, (under_way + 1) // 2) if 0 < took_ns < QUICK_NS else 0
