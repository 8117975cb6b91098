"""Calls that wait for their target: one after the other, whoever put them there, and whenever."""

from __future__ import annotations

import threading

import pytest

from gradwire.anteroom import Anteroom
from gradwire_wire.errors import MemoryExhaustedError


def test_they_are_done_in_their_order_and_others_see_that_one_is_there() -> None:
    anteroom, done, go_on = Anteroom("test"), [], threading.Event()
    anteroom.put(lambda: done.append(go_on.wait(60)))
    for i in range(50):
        anteroom.put(lambda i=i: done.append(i))  # type: ignore[misc]
    assert anteroom.is_occupied and done == []
    go_on.set()
    anteroom.drain()
    assert not anteroom.is_occupied and done == [True, *range(50)]
    anteroom.put(lambda: done.append("again"))
    anteroom.drain()
    assert done[-1] == "again"


def test_one_thread_serves_though_a_handler_of_signals_has_put_one_in_the_middle_of_a_start() -> None:
    """Two threads are on their way then."""
    done: list[str] = []

    class Interrupted(Anteroom):
        is_interrupted = False

        def _start(self) -> None:
            if not self.is_interrupted:
                self.is_interrupted = True
                self.put(lambda: done.append("by the handler"))
            super()._start()

    anteroom = Interrupted("test")
    anteroom.put(lambda: done.append("by the program"))
    anteroom.drain()
    assert done == ["by the handler", "by the program"]


def test_without_a_thread_it_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    anteroom = Anteroom("test")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(MemoryExhaustedError, match="another thread"):
            anteroom.put(lambda: None)
    assert not anteroom.is_occupied
