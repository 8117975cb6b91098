"""Clients as the desk knows them, and the lines by which their calls come."""

from __future__ import annotations

from typing import Any, Union

from gradwire_wire.exchange import Exchange
from gradwire_wire.lane import Lane
from gradwire_wire.segments import Ledger
from gradwire_wire.sockets import Addressee
from gradwire_wire.tether import Tether

__all__ = ["Line", "Session", "line_of"]

Line = Union[Addressee, Lane]


class Session:
    """One client process: its tether (none at tcp), the ledger it marks, the tensors exchanged with it, its DEALERs with plans."""

    def __init__(self, client_id: bytes, tether: Tether | None, marks: Ledger, exchange: Exchange) -> None:
        self.client_id, self.tether, self.marks, self.exchange = client_id, tether, marks, exchange
        self.dealers: dict[bytes, Addressee] = {}


def line_of(session: Session | None, router: Any, identity: bytes) -> Addressee:
    """The client's DEALER of that identity, with its plans if it has any."""
    known = None if session is None else session.dealers.get(identity)
    return known or Addressee(router, identity)
