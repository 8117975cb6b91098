"""What two peers tell each other by their tether: segments, lanes, and that memory is short."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any, Sequence

from gradwire_wire import messages
from gradwire_wire.errors import ClosedError, ProtocolError
from gradwire_wire.exchange.memory import Memory
from gradwire_wire.segments import ForeignSegment
from gradwire_wire.tether import Tether, TetherClosedError

__all__ = ["Ended", "Tethered", "close_all"]


class Ended(ClosedError):
    """This end was closed, or the peer is gone, while what it lends was looked at."""

    def __init__(self) -> None:
        super().__init__("the connection was closed while its reply was read")


class Tethered:
    """One end of a tether (or of none, where the peer is far)."""

    def __init__(self, memory: Memory, tether: Tether | None) -> None:
        self._memory = memory
        self._tether = tether
        self._announced: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._theirs: dict[int, ForeignSegment] = {}
        self._lanes: list[list[int]] | None = None

    def settle(self) -> None:
        """See `Lender.settle`."""
        raise NotImplementedError

    def _announce(self, segment: Any) -> int:
        """The number the peer knows a segment by; its descriptor is sent along the first time (lock held).

        0 where that cannot be done at once: the peer does not read its tether, or is gone.
        """
        number = self._announced.get(segment, 0)
        if not number and segment.fd >= 0 and self._tether is not None:
            # (a new number each time: an interrupt after it was sent and before it was noted harms nobody)
            number = self._memory.arena.next_number()
            if not self._tether.send_nowait(messages.Segment(number, segment.nbytes), [segment.fd]):
                return 0
            self._announced[segment] = number
        return number

    def _nbytes_of(self, number: int) -> int:
        segment = self._theirs.get(number)
        if segment is None:
            try:
                self.receive_segments()
            except TetherClosedError:  # what it had said before it ended has been read all the same
                pass
            segment = self._theirs.get(number)
            if segment is None and self._tether is None:
                raise Ended
            if segment is None:
                raise ProtocolError(f"segment {number} was never announced")
        return segment.nbytes

    def receive_segments(self) -> None:
        """Read all that lies in the tether, and do what it asks; takes the lock. TetherClosedError at its end."""
        is_short = False
        with self._memory.lock:
            while self._tether is not None:
                received = self._tether.receive(0)
                if received is None:
                    break
                message, descriptors = received
                if type(message) is messages.Collect and not descriptors:
                    is_short = True
                else:
                    self._note_passed(message, descriptors)
        if is_short:
            gc.collect()
            with self._memory.lock:
                self.settle()

    def _note_passed(self, message: Any, descriptors: list[int]) -> None:
        """A segment or a lane, with its descriptors, or nothing that may come by a tether: ProtocolError."""
        kind, count = type(message), len(descriptors)
        if kind is messages.Segment and count == 1 and message.number not in self._theirs:
            self._theirs[message.number] = ForeignSegment(descriptors[0], message.nbytes)
        elif kind is messages.NewLane and count in (1, 2) and self._lanes is not None:
            self._lanes.append(descriptors)
        else:
            close_all(descriptors)
            raise ProtocolError(f"unexpected on the tether: {message!r:.80}")

    def pass_lane(self, *descriptors: int) -> bool:
        """Client: give the worker its end of a lane, and the page if it has one. False where that cannot be done at once."""
        with self._memory.lock:
            return self._tether is not None and self._tether.send_nowait(messages.NewLane(), descriptors)

    def expect_lanes(self) -> None:
        """Worker: the client may pass lanes from now on."""
        self._lanes = []

    @property
    def has_lanes(self) -> bool:
        """Worker: whether `take_lanes` would give any."""
        return bool(self._lanes)

    def take_lanes(self) -> list[list[int]]:
        """Worker: the descriptors of lanes that have come since the last look; the caller owns them."""
        taken = self._lanes or []
        if taken:
            self._lanes = []
        return taken


def close_all(descriptors: Sequence[int]) -> None:
    """Close received descriptors that nobody wants."""
    for fd in descriptors:
        os.close(fd)
