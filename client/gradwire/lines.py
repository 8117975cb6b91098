"""The pool of lines to one worker: each carries one call at a time, and a call takes the one used last.

A line is a lane (`gradwire_wire.lane`, with a page where both sides can: `gradwire_wire.page`) where the two
processes share memory and the message fits a packet, and a ZeroMQ DEALER otherwise. In the environment,
``GRADWIRE_LANE=zmq`` switches lanes off, ``GRADWIRE_LANE=socket`` pages; ``page``, ``auto`` or nothing is the best that
both sides can. One thread always meets the same warm line; n threads at once need n. Deques make it thread-safe.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from gradwire_wire.errors import MemoryExhaustedError, ProtocolError, UsageError
from gradwire_wire.exchange import Exchange
from gradwire_wire.interruption import came_from_system
from gradwire_wire.lane import MAX_PACKET, Lane, lane_pair
from gradwire_wire.page import can_page, page_lane_pair
from gradwire_wire.process import check_descriptors
from gradwire_wire.segments import SharingUnavailableError
from gradwire_wire.sockets import ClientKeys, Dealer, PipelineDealer, SocketError, Unreachable

__all__ = ["MOST_ASIDE_S", "Line", "Lines", "fits", "lanes_wanted", "pages_wanted"]

Line = Lane | Dealer
D = TypeVar("D", bound=Dealer)
CONNECT_LOOKS = 5
MOST_ASIDE_S = 30.0
"""How long a late reply is waited for: after that, whoever was interrupted had perhaps read it already."""
_in_flight: set[int] = set()
"""The ids of the lines that carry a call of this process right now, to whatever worker.

Whoever is interrupted between two steps may lose a line: it is closed when it is collected, and is none of these any more.
"""


def _noted(line: Any) -> Any:
    """A line that was just made."""
    weakref.finalize(line, _in_flight.discard, id(line)).atexit = False
    return line


def _wanted() -> str:
    """What is the best that may be used, by the environment. UsageError where it says something else."""
    wanted = os.environ.get("GRADWIRE_LANE") or "page"
    if wanted not in ("auto", "page", "socket", "zmq"):
        raise UsageError(f"GRADWIRE_LANE={wanted} is none of auto, page, socket and zmq: correct or unset it")
    return wanted


def lanes_wanted() -> bool:
    """Whether this process uses lanes where it can. UsageError for an unknown GRADWIRE_LANE."""
    return _wanted() != "zmq"


def pages_wanted() -> bool:
    """Whether its lanes have pages where they can. UsageError for an unknown GRADWIRE_LANE."""
    return _wanted() in ("auto", "page") and can_page()


def fits(line: Line, nbytes: int) -> bool:
    """Whether a message of one frame of so many bytes may go by this line."""
    return isinstance(line, Dealer) or nbytes <= line.max_message


def _check_refusal(error: OSError) -> None:
    """Where the system refuses a lane, ZeroMQ takes the call. Raises what a handler of signals has raised meanwhile."""
    if not came_from_system(error):
        raise error


class Lines:
    """Check a line out for a call, and in afterwards; or set it aside until the late reply has come."""

    def __init__(
        self,
        endpoint: str,
        client_id: bytes,
        exchange: Exchange,
        look_ms: int,
        lanes: bool,
        pages: bool = False,
        keys: ClientKeys | None = None,
    ) -> None:
        self._keys = keys
        self._endpoint, self._client_id, self._exchange, self._look_ms = (
            endpoint,
            client_id,
            exchange,
            look_ms,
        )
        self._has_lanes, self._has_pages = lanes, lanes and pages
        self._numbers = itertools.count(1)
        self._lanes: deque[Lane] = deque()
        self._dealers: deque[Dealer] = deque()
        self.aside: deque[tuple[Line, float]] = deque()  # and since when

    def check_out(self, nbytes: int, frames: int) -> Line:
        """A line for a message of so many bytes and further frames. Nobody else has it until `check_in`."""
        if not self._has_lanes or nbytes > MAX_PACKET or frames:
            return self.check_out_dealer()
        try:
            line = self._lanes.pop()
        except IndexError:
            opened = self._open_page_lane() or self._open_lane()
            if opened is None:
                return self.check_out_dealer()
            line = _noted(opened)
        _in_flight.add(id(line))
        line.is_alone = len(_in_flight) == 1
        return line

    def check_out_dealer(self) -> Dealer:
        """A line by ZeroMQ, which takes every message. MemoryExhaustedError where this process has no descriptor left, Unreachable
        where the worker's socket is gone from its folder.
        """
        line = self._dealer()
        _in_flight.add(id(line))
        return line

    def _dealer(self) -> Dealer:
        try:
            return self._dealers.pop()
        except IndexError:
            identity = self._new_identity()
        try:
            made: Dealer = _noted(self._open_dealer(identity))
            return made
        except (SocketError, OSError) as error:
            raise MemoryExhaustedError(
                f"this process cannot open a further line to its worker: {error}. Close files, call from fewer threads "
                "at once, or raise the limit (ulimit -n)"
            ) from error

    def _new_identity(self) -> bytes:
        return self._client_id + next(self._numbers).to_bytes(4, "big")

    def _open_dealer(self, identity: bytes) -> Dealer:
        if self._keys is not None:
            return Dealer(self._endpoint, identity, self._look_ms, self._keys)
        return self._connected(Dealer, identity)

    def _connected(self, kind: type[D], identity: bytes) -> D:
        """One that is connected, or will be: a worker that is stopped lets nobody in.

        OSError where this process has no descriptor for the connection, Unreachable where the socket is gone: what is sent would
        wait for one, for ever.
        """
        made = kind(self._endpoint, identity, self._look_ms, waits=True)
        for _ in range(CONNECT_LOOKS):
            if made.is_connected(self._look_ms):
                return made
            try:
                check_descriptors(1)
            except OSError:
                made.close()
                raise
        made.close()
        path = self._endpoint.removeprefix("ipc://")
        if not os.path.exists(path):
            raise Unreachable(f"{path} was removed")
        return kind(self._endpoint, identity, self._look_ms)

    def _open_page_lane(self) -> Lane | None:
        if not self._has_pages:
            return None
        try:
            ours, theirs, page = page_lane_pair(self._look_ms)
        except (MemoryExhaustedError, SharingUnavailableError):
            return None
        except OSError as error:
            _check_refusal(error)
            return None
        with theirs:
            passed = self._exchange.pass_lane(theirs.fileno(), page.fd)
        page.close()
        if not passed:
            ours.close()
        return ours if passed else None

    def _open_lane(self) -> Lane | None:
        try:
            ours, theirs = lane_pair(self._look_ms)
        except OSError as error:  # too many open files
            _check_refusal(error)
            return None
        with theirs:
            if self._exchange.pass_lane(theirs.fileno()):
                return ours
        ours.close()
        return None

    @property
    def can_pipeline(self) -> bool:
        """Whether there is a way for many calls at once, though perhaps it cannot be opened just now.

        There is none by tcp: a connection that breaks and is made anew loses what was on its way, and nobody is told.
        """
        return self._keys is None

    def open_pipeline(self) -> Lane | PipelineDealer | None:
        """A line that belongs to no pool, for many calls at once; None where none can be opened."""
        if self._has_lanes:
            return self._open_lane()
        return self._open_pipeline_dealer() if self.can_pipeline else None

    def _open_pipeline_dealer(self) -> PipelineDealer | None:
        try:
            return self._connected(PipelineDealer, self._new_identity())
        except (SocketError, Unreachable):
            return None
        except OSError as error:
            _check_refusal(error)
            return None

    def check_in(self, line: Line) -> None:
        """The call is over and its reply was read."""
        _in_flight.discard(id(line))
        if isinstance(line, Dealer):
            self._dealers.append(line)
        else:
            self._lanes.append(line)

    def drop(self, line: Line) -> None:
        """The line is broken, or whatever comes on it is wanted no more."""
        _in_flight.discard(id(line))
        line.close()

    def set_aside(self, line: Line) -> None:
        """The call was abandoned: the line is good again once the late reply has been read."""
        _in_flight.discard(id(line))
        self.aside.append((line, time.monotonic()))

    def collect(self, decline: Callable[[Line, list[bytes] | int], Any]) -> None:
        """Give late replies that have come in to ``decline``, with their lines, which go back to the pool."""
        for _ in range(len(self.aside)):
            try:
                line, since = self.aside.popleft()
            except IndexError:
                return
            try:
                frames = line.receive_nowait()
                if frames is None and time.monotonic() - since < MOST_ASIDE_S:
                    self.aside.append((line, since))
                    continue
                if frames is None:
                    raise Unreachable("no late reply")
                decline(line, frames)
            except (Unreachable, ProtocolError):  # a late lie harms no other call
                line.close()
            else:
                self.check_in(line)

    def close(self) -> None:
        """Close every line that is not in use."""
        for lines in (self._lanes, self._dealers):
            while lines:
                lines.pop().close()
        while self.aside:
            self.aside.pop()[0].close()
