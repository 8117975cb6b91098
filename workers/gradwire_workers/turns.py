"""Whose turn it is at the desk: lanes that need not be polled for. Calls are served in order of arrival all the same."""

from __future__ import annotations

from typing import Any

from gradwire_wire.lane import Lane
from gradwire_wire.page import WorkerPage
from gradwire_workers.sessions import Session

__all__ = ["TURN_S", "Turns"]

TURN_S = 500e-6
"""For so long one lane may be served while others wait."""
IN_ROW = 2


class Turns:
    """awake: the page whose next call is looked for, if any: its client does not ring. unread: lanes with frames left of a batch."""

    def __init__(self) -> None:
        self.awake: tuple[WorkerPage, Session] | None = None
        self.unread: set[int] = set()
        self._latest: Any = None
        self._in_row = 0

    def note(self, lane: Lane, session: Session) -> None:
        """A lane's call came by the poller: is it a page, and the only lane that is used?"""
        if lane is not self._latest:
            self._latest, self._in_row = lane, 0
            return
        self._in_row += 1
        if self.awake is not None:  # whose client does not ring: it would wait for ever if it were forgotten
            return
        if type(lane) is WorkerPage and self._in_row >= IN_ROW and not lane.was_packet:
            self.awake = (lane, session)

    def forget(self, fd: int, lane: Lane) -> None:
        """This lane is closed."""
        self.unread.discard(fd)
        if self.awake is not None and self.awake[0] is lane:
            self.awake = None
