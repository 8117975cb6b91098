"""A worker's door to other machines: a ROUTER at ``tcp://`` with CURVE, and the sessions that come by it.

There is no tether over tcp, so nothing tells when a client has gone. A session costs little (what its client keeps
for pullbacks is bounded like everybody's), and beyond `MOST_SESSIONS` the one that was heard of longest ago ends.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, Sequence

from gradwire_wire import keys, messages, sockets
from gradwire_wire.errors import ProtocolError

__all__ = ["FarDoor"]

MOST_SESSIONS = 256


class Sessions(OrderedDict):
    """Sessions by their client's id, the one heard of last at the end."""

    def get(self, client_id: bytes, default: Any = None) -> Any:
        """The session, which has been heard of now."""
        if client_id in self:
            self.move_to_end(client_id)
        return super().get(client_id, default)


class FarDoor:
    """Binds at once. ``endpoint``: where. ``gate`` lets known keys in, as long as it is polled with ``router``."""

    def __init__(self, host: str, folder: str) -> None:
        """``host``: as in ``tcp://HOST``. ``folder``: see `gradwire_wire.keys`. UsageError, ZMQError."""
        self.gate = sockets.Gatekeeper(lambda public: keys.is_known(Path(folder), public))
        self.router = sockets.bind_router(f"{host}:*", keys.server_key(Path(folder)))
        self.endpoint = sockets.address_of(self.router)
        self.sessions = Sessions()

    def hello_in(self, identity: bytes, frames: Sequence[bytes]) -> Any:
        """The greeting that a message is, where it is the first of its client; None where it is anything else."""
        if identity[:16] in self.sessions or not frames:
            return None
        try:
            message = messages.unpack(frames[0])
        except ProtocolError:
            return None  # which the desk tells its sender
        is_own = type(message) is messages.Hello and message.client_id == identity[:16]
        return message if is_own else None

    def admit(self, session: Any) -> list[Any]:
        """A new session; returns those that ended for it."""
        self.sessions[session.client_id] = session
        return [self.sessions.popitem(last=False)[1] for _ in range(len(self.sessions) - MOST_SESSIONS)]

    def answer(self, line: sockets.Addressee, message: Any) -> None:
        """To a greeting."""
        try:
            line.send_nowait([messages.pack(message)])
        except sockets.Unreachable:
            pass
