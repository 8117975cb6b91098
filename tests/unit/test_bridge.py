"""A bridge that is closed while other threads start workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gradwire.bridge
from gradwire.bridge import Bridge
from gradwire.worker_records import WorkerSpec
from gradwire_wire.errors import ClosedError


class Link:
    """A broker's that starts nothing."""

    is_shared, folder = False, None

    def every_second(self, tick: Callable[[], None]) -> None:
        """Nothing ticks."""

    def close(self) -> None:
        """Nothing to end."""


class Worker:
    """Its process is there as soon as it is asked for; ``on_detach`` is what happens while the bridge lets go of it."""

    alive = keeps_name = True
    on_start: Callable[[], None] = staticmethod(lambda: None)
    on_detach: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, link: Any, memory: Any, spec: WorkerSpec, restart: str) -> None:
        self.name, self.told = spec.name, []
        type(self).on_start()

    def detach(self) -> None:
        self.told.append("detach")
        type(self).on_detach()

    def bury(self) -> None:
        self.told.append("bury")


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> Bridge:
    monkeypatch.setattr(gradwire.bridge, "Worker", Worker)
    monkeypatch.setattr(Worker, "on_start", Worker.on_start)
    monkeypatch.setattr(Worker, "on_detach", Worker.on_detach)
    return Bridge(Link())  # type: ignore[arg-type]


def test_a_worker_that_is_there_while_the_bridge_closes_harms_nobody(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another thread would do at that moment."""
    first: Any = bridge.worker("numpy")

    def start_another() -> None:
        Worker.on_detach = staticmethod(lambda: None)
        with pytest.raises(ClosedError, match="was closed"):
            bridge._take_in(Worker(None, None, WorkerSpec("numpy", "second"), "never"))  # type: ignore[arg-type]

    Worker.on_detach = staticmethod(start_another)
    bridge.close()
    assert first.told == ["detach", "bury"]
    late: Any = bridge._workers["second"]
    assert late.told == ["detach", "bury"]


def test_a_worker_that_starts_into_a_closed_bridge_is_let_go_of(bridge: Bridge) -> None:
    Worker.on_start = staticmethod(bridge.close)
    with pytest.raises(ClosedError, match="was closed"):
        bridge.worker("numpy")
    made: Any = bridge._workers["numpy"]
    assert made.told == ["detach", "bury"]
