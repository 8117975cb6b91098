"""Calls under way as they get on their lane: several in a packet, in order, each once.

A worker that has nothing to do is sent a call at once; else calls go in packets of several, which a worker serves without a sleep in
between. One thread sends at a time, and no lock of the pipeline's is held then: whoever finds somebody sending goes on, for that one
looks again before it leaves off. What the lane does not take now goes when answers have come.

Handlers of signals may raise between any two steps of the main thread. So calls are numbered as they stand in line, from 1; how far they are
sent is one number, and a packet is sent and that noted in one step (`Lane.send_and_note`); by ZeroMQ
the reader of answers alone sends, which no handler interrupts (`PipelineDealer`). (An answer may come between the two: what is under
way tells nothing about what was sent.)
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

from gradwire.submissions import Submission
from gradwire_wire import sockets
from gradwire_wire.batches import MAX_BATCH, batch_of
from gradwire_wire.lane import Lane, TooLong
from gradwire_wire.sockets import PipelineDealer

__all__ = ["Packets"]

BATCH, BATCH_NBYTES, SOON = 16, 16 << 10, 1 << 10
"""Calls that go as soon as there are so many; bytes of one packet; bytes of arguments that do not wait for others."""


class Packets:
    """Of one pipeline. under_way: its calls that have no answer yet, in order; those at its end are perhaps not sent.

    latest: the number of the call that was put there last, by whoever puts it.
    """

    def __init__(self, lane: Lane | PipelineDealer, under_way: deque[Submission]) -> None:
        self._lane, self._under_way = lane, under_way
        self.latest = 0
        self._sent = deque([0], maxlen=1)  # the number of the last call that was sent
        self._sending = threading.Lock()  # who has it sends
        self._sender = 0  # that thread

    @property
    def are_sent_here(self) -> bool:
        """Whether this thread sends just now: a handler of signals has interrupted it."""
        return self._sender == threading.get_ident()

    def send_soon(self, nbytes: int) -> None:
        """A call with so many bytes of arguments is under way: send, unless it is better to wait for others."""
        unsent = self.latest - self._sent[-1]
        if unsent >= BATCH or nbytes > SOON or unsent >= len(self._under_way):
            self.flush()

    def flush(self) -> None:
        """Send what the lane takes of what is unsent. One thread at a time; nobody waits."""
        while self._sent[-1] < self.latest and self._lane.may_send() and not self._sending.locked():
            with self._sending:
                self._sender = threading.get_ident()
                try:
                    if not self._send_packet():
                        return
                finally:
                    self._sender = 0

    def _send_packet(self) -> bool:
        """Send the first frames that are unsent. Whether the lane took them."""
        calls = list(self._under_way)
        first = self._sent[-1] + 1 - calls[0].number if calls else 0
        most = MAX_BATCH if self._lane.takes_batches else 1
        frames = of_one_packet([call.frame for call in calls[first : first + most]])
        try:
            return bool(frames) and self._send_frames(frames)
        except sockets.Unreachable:
            return False  # whoever reads answers will see it, and why

    def _send_frames(self, frames: list[bytes]) -> bool:
        lane, note, sent = self._lane, self._sent.append, self._sent[-1]
        try:
            packet = frames[0] if len(frames) == 1 else batch_of(frames)
            return lane.send_and_note(packet, note, sent + len(frames))
        except TooLong:  # the system is short of buffers, or has small ones
            pass
        with contextlib.suppress(TooLong):
            return lane.send_and_note(frames[0], note, sent + 1)
        return False


def of_one_packet(unsent: list[bytes]) -> list[bytes]:
    """The first frames: as many as go into one packet."""
    frames: list[bytes] = []
    nbytes = 0
    for frame in unsent[:MAX_BATCH]:
        nbytes += 4 + len(frame)
        if frames and nbytes > BATCH_NBYTES:
            break
        frames.append(frame)
    return frames
