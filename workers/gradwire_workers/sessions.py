"""Clients as the desk knows them, and the lines by which their calls come."""

from __future__ import annotations

from typing import Any, Collection, Iterable, Union

from gradwire_wire.exchange import Exchange
from gradwire_wire.lane import Lane
from gradwire_wire.segments import Ledger
from gradwire_wire.sockets import Addressee
from gradwire_wire.tether import Tether
from gradwire_workers.program import Program

__all__ = ["Line", "Session", "forget_plans", "line_of"]

Line = Union[Addressee, Lane]


class Session:
    """One client process: its tether (none at tcp), the ledger it marks, the tensors exchanged with it, its DEALERs with plans."""

    def __init__(self, client_id: bytes, tether: Tether | None, marks: Ledger, exchange: Exchange) -> None:
        self.client_id, self.tether, self.marks, self.exchange = client_id, tether, marks, exchange
        self.dealers: dict[bytes, Addressee] = {}
        self.not_recorded_until = 0  # the id of the message that has ended a recording last


def forget_plans(lines: Iterable[Line], programs: Collection[Program]) -> None:
    """These programs are let go of: no call that was planned will come for them."""
    for line in lines:
        for number in [number for number, plan in line.plans.items() if plan.program in programs]:
            del line.plans[number]


def line_of(session: Session | None, router: Any, identity: bytes) -> Addressee:
    """The client's DEALER of that identity, with its plans if it has any."""
    known = None if session is None else session.dealers.get(identity)
    return known or Addressee(router, identity)
