"""What a client asks a shared broker for, without a broker."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from gradwire.broker_link import BrokerLink
from gradwire.private_broker import PrivateBroker
from gradwire_wire import control
from gradwire_wire.errors import DeadlineError, UsageError


class NeverBack(BrokerLink):
    """Of a worker that has died, and that nobody can have started."""

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> Any:
        self.looks += 1
        return [
            control.Present._make([None] * len(control.Present._fields))._replace(
                name="w",
                state="ended",
                doing="SIGKILL",
                restart="always",
                incarnation=b"i",
                framework="numpy",
            )
        ]

    def restart_worker(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError("another client has had it started")


def test_a_worker_that_does_not_come_back_is_waited_for_until_the_deadline() -> None:
    link = NeverBack()
    with pytest.raises(DeadlineError, match=r"is still not there again \(SIGKILL\) after"):
        link.find_worker("w", 0.15)
    assert link.looks < 10, "it looks now and then, and not all the time"


def test_a_program_that_has_given_up_its_rights_can_still_end() -> None:
    """As servers do that begin as root, and may send its processes no signals then. Their broker sees their end."""

    def refuse(_: int) -> NoReturn:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    broker: Any = PrivateBroker.__new__(PrivateBroker)
    broker._process = SimpleNamespace(send_signal=refuse, wait=lambda timeout: 0)
    broker.resume()
    broker.kill()
