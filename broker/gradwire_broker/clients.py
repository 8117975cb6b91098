"""Who is attached to the broker: the token is asked for once, output flows at each client's own pace."""

from __future__ import annotations

import hmac
import os
from typing import Any

from gradwire_broker.output import Outlet
from gradwire_wire import control, sockets
from gradwire_wire.errors import ProtocolError

__all__ = ["Clients"]


class Clients:
    """All clients that showed the token, by their ROUTER identity. Nothing here ever blocks."""

    def __init__(self, router: Any, token: bytes) -> None:
        self._router = router
        self._token = token
        self._outlets: dict[bytes, Outlet] = {}

    def admitted(self, frames: list[bytes]) -> Any:
        """The message for the broker in what the router received; None where there is none (left to do)."""
        client = frames[0]
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message is one frame, not {len(frames) - 1}")
            message = control.unpack(frames[1])
        except ProtocolError as error:
            self.send(client, control.Refused("ProtocolError", str(error)))
            return None
        if isinstance(message, control.Attach):
            self._attach(client, message)
        elif client not in self._outlets:
            self.send(client, control.Refused("ConnectError", "attach first"))
        elif isinstance(message, control.Heard):
            self._outlets[client].heard(message.cost)
            self._pour(client)
        else:
            return message
        return None

    def _attach(self, client: bytes, message: control.Attach) -> None:
        if message.protocol != control.PROTOCOL:
            why = (
                f"the broker speaks version {control.PROTOCOL} of the protocol, the client {message.protocol}"
            )
            self.send(client, control.Refused("VersionMismatchError", why))
        elif not hmac.compare_digest(message.token, self._token):
            self.send(client, control.Refused("ConnectError", "the token is not the broker's"))
        else:
            self._outlets.setdefault(client, Outlet())
            self.send(client, control.Attached(control.PROTOCOL, os.getpid()))

    def send(self, client: bytes, message: Any) -> None:
        """To one of them; a client that is gone is forgotten."""
        try:
            sockets.send_nowait(self._router, [client, control.pack(message)])
        except sockets.Unreachable:
            self._outlets.pop(client, None)

    def tell(self, message: Any) -> None:
        """To all of them."""
        for client in list(self._outlets):
            self.send(client, message)

    def tell_output(self, name: str, text: str) -> None:
        """What a worker wrote, to all of them, as fast as each shows it."""
        if not text:
            return
        for client, outlet in list(self._outlets.items()):
            outlet.write(name, text)
            self._pour(client)

    def _pour(self, client: bytes) -> None:
        outlet = self._outlets.get(client)
        for piece in outlet.take() if outlet else ():
            self.send(client, piece)
