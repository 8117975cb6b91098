"""Where clients come and go: tethers and their Hello, lanes, the Hello of clients on other machines.

A client is there as long as its tether is; one at tcp, which has none, until too many others have come. Nothing here waits
for a client: one that does not read what it is told has gone.
"""

from __future__ import annotations

import hmac
import os
import time
from typing import Any, Callable

from gradwire_wire import messages, sockets
from gradwire_wire.errors import GradwireError, MemoryExhaustedError, ProtocolError, VersionMismatchError
from gradwire_wire.exchange import Exchange, Memory, close_all
from gradwire_wire.lane import Lane, received_lane
from gradwire_wire.messages import Hello, Refused, Welcome
from gradwire_wire.page import can_page, received_page_lane
from gradwire_wire.reserve import Reserve
from gradwire_wire.segments import Ledger
from gradwire_wire.sockets import Addressee
from gradwire_wire.tether import Tether, TetherClosedError, accept_tether, listen_tether
from gradwire_workers.far import FarDoor
from gradwire_workers.sessions import Session
from gradwire_workers.turns import Turns

__all__ = ["Reception"]

SHORT_S = 0.02  # while descriptors are short tethers are looked at at this pace


class Reception:
    """Listens at once. sessions: those with a tether, by their client's id. tethers and lanes: by descriptor.
    reserve: descriptors for clients that come when user code has taken all others.

    turns: is told of lanes that are closed. on_end: is called with a session that is over, when its lanes are closed.
    """

    def __init__(
        self,
        tether_path: str,
        memory: Memory,
        poller: sockets.Poller,
        *,
        incarnation: bytes,
        token: bytes,
        turns: Turns,
        on_end: Callable[[Session], None],
    ) -> None:
        self.listener = listen_tether(tether_path)
        self.reserve = Reserve()
        self.sessions: dict[bytes, Session] = {}
        self.tethers: dict[int, tuple[Tether, Session | None]] = {}
        self.lanes: dict[int, tuple[Lane, Session]] = {}
        self._memory, self._poller, self._turns, self._on_end = memory, poller, turns, on_end
        self._incarnation, self._token = incarnation, token

    def accept(self) -> None:
        """Somebody knocks: what it has to say is read when it has said it."""
        tether = accept_tether(self.listener)
        if tether is not None:
            self.tethers[tether.fileno()] = (tether, None)
            self._poller.register(tether.fileno(), sockets.IN)

    def read_tether(self, fd: int) -> None:
        """A greeting, segments, lanes, or the end of a client."""
        tether, session = self.tethers[fd]
        try:
            if session is None:
                self._greet(fd, tether)
            else:
                session.exchange.receive_segments()
                self.take_lanes(session)
        except MemoryExhaustedError:  # no descriptor left: what has come stays to be read
            if not self.reserve.release():
                time.sleep(SHORT_S)
        except (TetherClosedError, GradwireError, OSError):
            self._end(fd)

    # -- Hello -----------------------------------------------------------------------------------

    def _greet(self, fd: int, tether: Tether) -> None:
        received = tether.receive(0)
        if received is None:
            return
        hello, descriptors = received
        try:
            marks = self._checked_hello(hello, descriptors)
        except GradwireError as error:
            tether.send(_refused(error), timeout_s=0.1)
            raise
        ours = Ledger(self._memory.folder)
        tether.send(self._welcome(True, can_page()), ours.descriptors, timeout_s=1.0)
        ours.close()
        session = Session(hello.client_id, tether, marks, Exchange(self._memory, tether, marks, ours))
        session.exchange.expect_lanes()
        self.sessions[hello.client_id] = session
        self.tethers[fd] = (tether, session)

    def greet_far(self, far: FarDoor, hello: Hello, line: Addressee) -> None:
        """A client by tcp. It has no tether: it says Hello on the socket on which it calls, and all its tensors come in frames."""
        try:
            marks = self._checked_hello(hello, [])
        except GradwireError as error:
            far.answer(line, _refused(error))
            return
        ours = Ledger.received([])
        session = Session(hello.client_id, None, marks, Exchange(self._memory, None, marks, ours))
        for left in far.admit(session):
            self._on_end(left)
        far.answer(line, self._welcome(False, False))

    def _welcome(self, has_lanes: bool, has_pages: bool) -> Welcome:
        return Welcome(messages.PROTOCOL, self._incarnation, os.getpid(), has_lanes, has_pages)

    def _checked_hello(self, hello: Any, descriptors: list[int]) -> Ledger:
        """The client's ledger, once everything else is right."""
        problem: GradwireError | None = None
        if type(hello) is not Hello or len(descriptors) > 1:
            problem = ProtocolError("a client must say Hello first, with its ledger")
        elif hello.protocol != messages.PROTOCOL:
            problem = VersionMismatchError(
                f"this worker speaks protocol {messages.PROTOCOL}, the client {hello.protocol}; use the same gradwire at both ends. "
                "If it was installed anew meanwhile, start the program again"
            )
        elif not hmac.compare_digest(hello.token, self._token):
            problem = ProtocolError("wrong token: this worker belongs to another broker")
        elif len(hello.client_id) != 16 or hello.client_id in self.sessions:
            problem = ProtocolError("a client's id must be 16 bytes of its own")
        if problem is not None:
            close_all(descriptors)
            raise problem
        return Ledger.received(descriptors)

    # -- lanes -----------------------------------------------------------------------------------

    def take_lanes(self, session: Session) -> None:
        """Open what lanes have come by the session's tether."""
        for descriptors in session.exchange.take_lanes():
            lane = received_lane(*descriptors) if len(descriptors) == 1 else received_page_lane(*descriptors)
            if lane is not None:
                self.lanes[lane.fileno()] = (lane, session)
                self._poller.register(lane.fileno(), sockets.IN)

    def close_lane(self, fd: int) -> None:
        """Its client is gone, or has broken the rules."""
        lane, _ = self.lanes.pop(fd)
        self._turns.forget(fd, lane)
        self._poller.unregister(fd)
        lane.close()

    # -- the end ---------------------------------------------------------------------------------

    def _end(self, fd: int) -> None:
        """A client is gone: its loans, its residuals, its lanes and its tether go."""
        tether, session = self.tethers.pop(fd)
        self._poller.unregister(fd)
        tether.close()
        if session is not None:
            self.sessions.pop(session.client_id, None)
            for lane in [lane for lane, (_, owner) in self.lanes.items() if owner is session]:
                self.close_lane(lane)
            self._on_end(session)


def _refused(error: GradwireError) -> Refused:
    return Refused(type(error).__name__, str(error))
