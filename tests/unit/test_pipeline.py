"""What threads share in a pipeline, without a worker. With one: tests/integration/test_submit.py."""

from __future__ import annotations

import sys
import threading
from collections import deque

from gradwire.pipeline import BATCH_NBYTES, _of_one_packet
from gradwire_wire.batches import MAX_BATCH


def test_a_packet_is_the_first_frames_that_fit() -> None:
    frames = [bytes(10)] * (MAX_BATCH + 5)
    assert _of_one_packet(deque(frames)) == frames[:MAX_BATCH]
    assert _of_one_packet(deque()) == []
    long = bytes(BATCH_NBYTES)
    assert _of_one_packet(deque([long, b"x"])) == [long]
    assert _of_one_packet(deque([b"x", long])) == [b"x"]


def test_others_append_while_a_packet_is_made() -> None:
    outbox: deque[bytes] = deque()
    is_over = threading.Event()

    def append() -> None:
        while not is_over.is_set():
            outbox.append(b"frame")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    other = threading.Thread(target=append)
    other.start()
    try:
        for _ in range(3000):
            for _ in _of_one_packet(outbox):
                outbox.popleft()
    finally:
        is_over.set()
        other.join()
        sys.setswitchinterval(before)
