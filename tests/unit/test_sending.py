"""What becomes of a short call's line and of what it lends, by how its sending ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

from gradwire.sending import Sender
from gradwire_wire.errors import WorkerDiedError
from gradwire_wire.exchange import NotShared
from gradwire_wire.lane import TooLong
from gradwire_wire.sockets import Unreachable


class Notes:
    """Stands in for lines, exchange and life: writes down what is asked of them."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def check_in(self, line: Any) -> None:
        self.done.append("line back")

    def drop(self, line: Any) -> None:
        self.done.append("line dropped")

    def take_back_loans(self, loans: Sequence[int]) -> None:
        self.done.append(list(loans))

    def raise_unreachable(self) -> NoReturn:
        raise WorkerDiedError("it is gone")


@pytest.mark.parametrize(
    ("error", "loans", "done"),
    [
        (NotShared(), None, ["line back"]),  # nothing was written
        (KeyboardInterrupt(), None, ["line back"]),
        (TooLong(), [1, 2], [[1, 2], "line back"]),
        (Unreachable(), [1, 2], [[1, 2], "line dropped"]),
        (KeyboardInterrupt(), [1, 2], ["line dropped"]),  # perhaps sent: the worker may have the loans
    ],
)
def test_a_call_that_was_not_sent(error: BaseException, loans: Any, done: list[Any]) -> None:
    notes = Notes()
    sender = Sender(notes, notes, notes)  # type: ignore[arg-type]
    if isinstance(error, Unreachable):
        with pytest.raises(WorkerDiedError):
            sender.unsent(error, object(), loans)  # type: ignore[arg-type]
    else:
        sender.unsent(error, object(), loans)  # type: ignore[arg-type]
    assert notes.done == done
