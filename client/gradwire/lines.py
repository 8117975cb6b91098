"""The pool of lines to one worker: each carries one call at a time, and a call takes the one used last.

A line is a lane (`gradwire_wire.lane`) where the two processes share memory and the message fits a packet, and a
ZeroMQ DEALER otherwise. ``GRADWIRE_LANE=zmq`` in the environment switches lanes off. One thread always meets the
same warm line; n threads at once need n. Deques make it thread-safe.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from gradwire_wire.errors import MemoryExhaustedError
from gradwire_wire.exchange import Exchange
from gradwire_wire.lane import MAX_PACKET, Lane, lane_pair
from gradwire_wire.sockets import ClientKeys, Dealer, SocketError, Unreachable

__all__ = ["Line", "Lines", "fits", "lanes_wanted"]

Line = Lane | Dealer


def lanes_wanted() -> bool:
    """Whether this process uses lanes where it can."""
    return os.environ.get("GRADWIRE_LANE", "") != "zmq"


def fits(line: Line, nbytes: int) -> bool:
    """Whether a message of one frame of so many bytes may go by this line."""
    return type(line) is Dealer or nbytes <= MAX_PACKET


class Lines:
    """Check a line out for a call, and in afterwards; or set it aside until the late reply has come."""

    def __init__(
        self,
        endpoint: str,
        client_id: bytes,
        exchange: Exchange,
        look_ms: int,
        lanes: bool,
        keys: ClientKeys | None = None,
    ) -> None:
        self._keys = keys
        self._endpoint, self._client_id, self._exchange, self._look_ms = (
            endpoint,
            client_id,
            exchange,
            look_ms,
        )
        self._has_lanes = lanes
        self._numbers = itertools.count(1)
        self._lanes: deque[Lane] = deque()
        self._dealers: deque[Dealer] = deque()
        self.aside: deque[Line] = deque()

    def check_out(self, nbytes: int, frames: int) -> Line:
        """A line for a message of so many bytes and further frames. Nobody else has it until `check_in`."""
        if self._has_lanes and nbytes <= MAX_PACKET and not frames:
            try:
                return self._lanes.pop()
            except IndexError:
                lane = self._open_lane()
                if lane is not None:
                    return lane
        return self.check_out_dealer()

    def check_out_dealer(self) -> Dealer:
        """A line by ZeroMQ, which takes every message. MemoryExhaustedError where this process has no descriptor left."""
        try:
            return self._dealers.pop()
        except IndexError:
            identity = self._client_id + next(self._numbers).to_bytes(4, "big")
        try:
            return Dealer(self._endpoint, identity, self._look_ms, self._keys)
        except SocketError as error:
            raise MemoryExhaustedError(
                f"this process cannot open a further line to its worker: {error}. Close files, call from fewer threads "
                "at once, or raise the limit (ulimit -n)"
            ) from error

    def _open_lane(self) -> Lane | None:
        try:
            ours, theirs = lane_pair(self._look_ms)
        except OSError:  # too many open files
            return None
        with theirs:
            if self._exchange.pass_lane(theirs.fileno()):
                return ours
        ours.close()
        return None

    def check_in(self, line: Line) -> None:
        """The call is over and its reply was read."""
        if type(line) is Lane:
            self._lanes.append(line)
        else:
            self._dealers.append(line)  # type: ignore[arg-type]

    def set_aside(self, line: Line) -> None:
        """The call was abandoned: the line is good again once the late reply has been read."""
        self.aside.append(line)

    def collect(self, decline: Callable[[Line, list[bytes] | int], Any]) -> None:
        """Give late replies that have come in to ``decline``, with their lines, which go back to the pool."""
        for _ in range(len(self.aside)):
            try:
                line = self.aside.popleft()
            except IndexError:
                return
            try:
                frames = line.receive_nowait()
            except Unreachable:
                line.close()
                continue
            if frames is None:
                self.aside.append(line)
            else:
                decline(line, frames)
                self.check_in(line)

    def close(self) -> None:
        """Close every line that is not in use."""
        for lines in (self._lanes, self._dealers, self.aside):
            while lines:
                lines.pop().close()
