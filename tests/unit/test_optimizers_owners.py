"""Optimizers in a worker belong to the client that has made them, also those of a module that several clients use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gradwire_wire.errors import UsageError
from gradwire_workers.state import State

MINE, THEIRS = b"mine", b"theirs"


def made(state: State, program: Any, client: bytes) -> int:
    number: int = state.act(program, "optimizer", ["sgd", {}], {})
    state.give(number, client)
    return number


@pytest.fixture
def shared() -> Any:
    return SimpleNamespace(
        is_module=True, optimizer=lambda target, kwargs: SimpleNamespace(zero_grad=lambda: None)
    )


@pytest.fixture
def state() -> State:
    return State(SimpleNamespace(), lambda program: 1, lambda target: target)  # type: ignore[arg-type]


def test_one_clients_optimizers_are_forgotten_by_no_other(state: State, shared: Any) -> None:
    mine, theirs = made(state, shared, MINE), made(state, shared, THEIRS)
    assert not state.forget([theirs, 7], MINE) and state.forget([mine, theirs], MINE)
    state.act(shared, "zero_grad", [theirs], {})
    with pytest.raises(UsageError, match="Make a new one"):
        state.act(shared, "zero_grad", [mine], {})


def test_they_go_with_their_client_and_with_their_module(state: State, shared: Any) -> None:
    mine, theirs = made(state, shared, MINE), made(state, shared, THEIRS)
    assert state.end(MINE) and not state.end(MINE)
    with pytest.raises(UsageError, match="Make a new one"):
        state.act(shared, "zero_grad", [mine], {})
    state.act(shared, "zero_grad", [theirs], {})
    assert state.forget_of([shared]) and not state.end(THEIRS)
