"""Whether a worker can be called, and who tells: without a worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from gradwire.life import Life, TetherWatch
from gradwire.worker_records import Death, WorkerFacts
from gradwire_wire.errors import ClosedError, DeadlineError, ProtocolError, WorkerDiedError
from gradwire_wire.tether import TetherClosedError

FACTS = WorkerFacts("w", b"i" * 16, 1, "", "", b"", {})


class Link:
    """Stands in for the link to the broker: its thread does what a test says."""

    broker_alive = True

    def __init__(self) -> None:
        self.watched: dict[int, Callable[[], None]] = {}
        self.told: Callable[[], None] | None = None

    def watch(self, fd: int, act: Callable[[], None]) -> None:
        self.watched[fd] = act

    def unwatch(self, fd: int) -> None:
        self.watched.pop(fd, None)

    def tell_of_death(self, incarnation: bytes, act: Callable[[], None]) -> None:
        self.told = act

    def death_of(self, incarnation: bytes, wait_s: float = 0.0) -> Death:
        return Death(3, None, "last words", "")


class Ends:
    """Stands in for a tether, and for the exchange that it is of."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.done = error, []  # type: ignore[var-annotated]

    def fileno(self) -> int:
        return 9

    def receive_segments(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.done.append("close")

    def end(self) -> None:
        self.done.append("end")

    def leave(self) -> None:
        self.done.append("leave")


def watched(error: Exception | None = None) -> tuple[Link, Life, Ends, TetherWatch]:
    link, ends = Link(), Ends(error)
    life = Life(link, FACTS)  # type: ignore[arg-type]
    return link, life, ends, TetherWatch(ends, ends, link, life)  # type: ignore[arg-type]


def gone(life: Life) -> None:
    life.gone.set()


def closed(life: Life) -> None:
    life.is_closed = True


def replaced(life: Life) -> None:
    life.is_replaced = True


def broken(life: Life) -> None:
    life.broken = "nonsense"
    life.gone.set()


@pytest.mark.parametrize(
    ("ends", "raises", "says"),
    [
        ([gone], WorkerDiedError, "exit code 3"),
        ([broken], ProtocolError, "nonsense"),
        ([closed], ClosedError, "was closed"),
        ([gone, closed], ClosedError, "was closed"),
        ([gone, replaced], WorkerDiedError, "was restarted"),
        ([closed, replaced], WorkerDiedError, "was restarted"),
    ],
)
def test_why_no_call_can_be_made(ends: list[Any], raises: type[Exception], says: str) -> None:
    life = Life(Link(), FACTS)  # type: ignore[arg-type]
    assert life.is_there and life.check_usable() == []
    for end in ends:
        end(life)
    assert not life.is_there
    for ask in (life.check_usable, life.raise_unreachable, lambda: life.raise_unreachable(was_running=True)):
        with pytest.raises(raises, match=says):
            ask()


def test_a_deadline_is_the_last_thing_that_is_looked_at() -> None:
    life = Life(Link(), FACTS)  # type: ignore[arg-type]
    life.look_around(None)
    life.look_around(time.perf_counter() + 60)
    with pytest.raises(DeadlineError):
        life.look_around(0.0)
    gone(life)
    with pytest.raises(WorkerDiedError):
        life.look_around(0.0)


@pytest.mark.parametrize(
    ("error", "says"), [(TetherClosedError(), None), (OSError(), None), (ProtocolError("odd"), "odd")]
)
def test_the_tether_tells_of_the_end(error: Exception, says: str | None) -> None:
    link, life, ends, watch = watched(error)
    link.watched[9]()
    assert life.gone.is_set() and life.broken == says and not link.watched
    watch.stop(), watch.let_go()
    assert ends.done == ["close", "end"]


def test_a_death_that_is_told_late_ends_nobody_elses_watch() -> None:
    """The number of a closed tether is another's soon."""
    link, life, ends, watch = watched()
    watch.stop(), watch.let_go()
    assert ends.done == ["leave"] and not link.watched
    link.watch(9, lambda: None)
    assert link.told is not None
    link.told()
    assert life.gone.is_set() and set(link.watched) == {9}
