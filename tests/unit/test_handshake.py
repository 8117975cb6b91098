"""How long a client waits for the welcome of a worker that is in somebody's call."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.handshake import shake_hands
from gradwire.worker_records import WorkerFacts
from gradwire_wire import messages
from gradwire_wire.errors import DeadlineError, UsageError
from gradwire_wire.exchange import Memory

REFUSED = messages.Refused("UsageError", "not you")


class LateTether:
    """Stands in for a tether whose other end answers when it was waited for so often in vain."""

    def __init__(self, in_vain: int) -> None:
        self.answers: list[Any] = [None] * in_vain + [(REFUSED, [])]

    def send(self, *_: Any) -> None: ...

    def receive(self, timeout_s: float) -> Any:
        return self.answers.pop(0)


def greet(in_vain: int, busy: list[bool]) -> None:
    facts = WorkerFacts("slow", 1, b"0123456789abcdef", "ipc:///nowhere", "/nowhere", b"token", {})
    shake_hands(LateTether(in_vain), facts, b"client", Memory(), 0.0, lambda: busy.pop(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("busy", [[True], [True, False], [True, True, False]])
def test_an_answer_that_comes_while_it_is_asked_whether_the_worker_is_busy_is_heard(busy: list[bool]) -> None:
    """Its call has ended just then, and its welcome is on the way: that is no worker that does not answer."""
    with pytest.raises(UsageError, match="not you"):
        greet(len(busy), busy)


@pytest.mark.parametrize("busy", [[False], [True, False, False]])
def test_one_that_is_idle_and_does_not_answer_is_given_up(busy: list[bool]) -> None:
    with pytest.raises(DeadlineError, match="'slow' did not answer within"):
        greet(len(busy), busy)
