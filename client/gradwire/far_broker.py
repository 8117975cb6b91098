"""A shared broker on another machine, reached over ``tcp://`` with keys. There is no process to watch, only a connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradwire_wire.errors import UsageError
from gradwire_wire.keys import client_keys
from gradwire_wire.sockets import FarEnd, is_address

__all__ = ["FarBroker"]


class FarBroker:
    """The same as `gradwire.private_broker.PrivateBroker`, for one at an address."""

    ends_with_us = False
    ending = "the connection to the broker ended"
    token = b""  # the key has been looked at before any message arrives

    def __init__(self, address: str, keys: str | None) -> None:
        """``keys``: the client's folder (see `gradwire_wire.keys`). UsageError, before a byte is sent."""
        if not keys:
            raise UsageError(
                f"{address}: tcp is used with keys only, and never in the clear. Name the folder of this client's keys in "
                "GRADWIRE_KEYS, or write address and keys into a .toml file and connect by that; "
                "`gradwire keys create DIR` makes them where the broker runs"
            )
        if not is_address(address):
            raise UsageError(f"{address}: an address is tcp://HOST:PORT, IPv6's HOST in brackets")
        self.address, self.keys = address, client_keys(Path(keys))
        self.revival = f"see whether `gradwire up` still runs there ({address}), then connect anew"
        self.when_silent = (
            ". Does `gradwire up` still run there, and does everything between here and there let it through?"
        )
        self.folder = Path()
        self._why = ""
        self._end: FarEnd | None = None

    def watch(self, dealer: Any) -> Any:
        """What a poller finds readable when the connection may have ended."""
        self._end = FarEnd(dealer)
        return self._end.socket

    def has_ended(self) -> bool:
        """Whether it has; then it is not come back to: what was under way would meet another broker."""
        self._why = self._why or ("" if self._end is None else self._end.end())
        return bool(self._why)

    def reachable(self, endpoint: str) -> str:
        """Its workers are where it is, whatever the name of its interface there."""
        return f"{self.address.rpartition(':')[0]}:{endpoint.rpartition(':')[2]}"

    def last_words(self) -> str:
        """Why the connection ended."""
        return self._why

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether the connection ended."""
        return bool(self._why)

    def resume(self) -> None:
        """It is not ours to end, either."""

    def kill(self) -> None:
        """It is not ours to kill."""

    def close(self) -> None:
        """Stop watching the connection. Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end.close()
