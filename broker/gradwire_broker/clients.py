"""Who is attached to the broker: the token is asked for once, output flows at each client's own pace.

A client comes by one of the broker's routers. By the one in the runtime folder come programs of this user, which show
a token. By the one at ``tcp://``, if there is one, come *far* clients, whose keys were looked at before their first
message got here; they use workers, and neither start nor end any.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

from gradwire_broker.output import Outlet
from gradwire_wire import control, sockets
from gradwire_wire.errors import ProtocolError

__all__ = ["FAR", "NEAR", "Clients", "denied", "is_far"]

NEAR, FAR = b"n", b"f"
"""The first byte of what a client is called here: which router it came by; the rest is its identity there."""


class Client:
    """One that was let in. ``shows``: the workers whose output it is sent."""

    def __init__(self, is_owner: bool) -> None:
        self.is_owner = is_owner
        self.outlet = Outlet()
        self.shows: set[str] = set()


class Clients:
    """All clients that were admitted. Nothing here ever blocks."""

    def __init__(self, router: Any, token: bytes, owner_token: bytes) -> None:
        self._routers = {NEAR: router}
        self._token, self._owner_token = token, owner_token
        self._admitted: dict[bytes, Client] = {}

    def __len__(self) -> int:
        return len(self._admitted)

    def come_also_by(self, router: Any) -> None:
        """The router of far clients."""
        self._routers[FAR] = router

    def admitted(self, way: bytes, frames: list[bytes]) -> tuple[bytes, Any]:
        """Who said what the router of that way received, and the message for the broker in it (None: nothing left to do)."""
        client = way + frames[0]
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message is one frame, not {len(frames) - 1}")
            message = control.unpack(frames[1])
        except ProtocolError as error:
            self.send(client, control.Refused("ProtocolError", str(error)))
            return client, None
        if isinstance(message, control.Attach):
            return client, message if self._attach(client, message) else None
        known = self._admitted.get(client)
        if known is None:
            self.send(client, control.Refused("ConnectError", "attach first"))
        elif isinstance(message, control.Heard):
            known.outlet.heard(message.cost)
            self._pour(client)
        elif isinstance(message, control.Show):
            (known.shows.add if message.wanted else known.shows.discard)(message.name)
        else:
            return client, message
        return client, None

    def _attach(self, client: bytes, message: control.Attach) -> bool:
        """Whether it is new here and was let in."""
        is_owner = hmac.compare_digest(message.token, self._owner_token) and not is_far(client)
        if message.protocol != control.PROTOCOL:
            why = f"the broker speaks version {control.PROTOCOL} of the protocol, the client {message.protocol}; use the same gradwire"
            self.send(client, control.Refused("VersionMismatchError", why))
        elif not (is_owner or is_far(client) or hmac.compare_digest(message.token, self._token)):
            self.send(client, control.Refused("ConnectError", "the token is not the broker's"))
        else:
            is_new = client not in self._admitted
            self._admitted.setdefault(client, Client(is_owner))
            self.send(client, control.Attached(control.PROTOCOL, os.getpid()))
            return is_new
        return False

    def is_here(self, client: bytes) -> bool:
        """Whether it was let in and is not gone, as far as is known."""
        return client in self._admitted

    def is_owner(self, client: bytes) -> bool:
        """Whether it showed the owner's token."""
        return client in self._admitted and self._admitted[client].is_owner

    def show(self, client: bytes, name: str) -> None:
        """From now on it is sent what the worker of that name prints."""
        if client in self._admitted:
            self._admitted[client].shows.add(name)

    def forget(self, client: bytes) -> None:
        """It is gone."""
        self._admitted.pop(client, None)

    def send(self, client: bytes, message: Any) -> None:
        """To one of them; a client that is gone is forgotten."""
        try:
            sockets.send_nowait(self._routers[client[:1]], [client[1:], control.pack(message)])
        except sockets.Unreachable:
            self.forget(client)

    def tell(self, message: Any) -> None:
        """To all of them."""
        for client in list(self._admitted):
            self.send(client, message)

    def tell_output(self, name: str, text: str) -> None:
        """What a worker wrote, to those who are shown it, as fast as each shows it."""
        if not text:
            return
        for client, known in list(self._admitted.items()):
            if name in known.shows:
                known.outlet.write(name, text)
                self._pour(client)

    def _pour(self, client: bytes) -> None:
        known = self._admitted.get(client)
        for piece in known.outlet.take() if known else ():
            self.send(client, piece)


def is_far(client: bytes) -> bool:
    """Whether it came over tcp."""
    return client[:1] == FAR


def denied(message: Any, why: str) -> control.Denied | control.Refused:
    """What tells a client that it does not get what it has asked for."""
    request = getattr(message, "request", None)
    return (
        control.Refused("UsageError", why) if request is None else control.Denied(request, "UsageError", why)
    )
