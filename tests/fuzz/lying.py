"""A worker that lies: greets like one, and answers with mutations of right answers."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from mutator import mutated, other_value

from gradwire_wire import messages, sockets
from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.exchange import Exchange, Memory, close_all
from gradwire_wire.lane import received_lane
from gradwire_wire.page import WorkerPage, received_page_lane
from gradwire_wire.segments import Ledger
from gradwire_wire.structures import flatten
from gradwire_wire.tether import TetherClosedError, accept_tether, listen_tether

__all__ = ["Liar", "odd_descriptors"]

_GIVEN = {
    "optimizer": 7,
    "step": 0.5,
    "frozen": ["weight"],
    "regularizers": [],
    "training": True,
    "functional": 2,
}
"""What these verbs about a module's state give. The others give a tensor by name, or nothing."""


def odd_descriptors(chance: random.Random, count: int) -> list[int]:
    """Descriptors of all kinds; the caller closes them."""
    made = []
    for _ in range(count):
        kind = chance.randrange(6)
        if kind == 0:
            fd = os.memfd_create("gradwire-fuzz", os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, chance.choice([0, 1, 4096, 65536, 1 << 20]))
        elif kind == 1:
            fd = os.open(tempfile.gettempdir(), os.O_RDONLY)
        elif kind == 2:
            fd = os.open("/dev/zero", os.O_RDWR)
        elif kind == 3:
            fd, other = os.pipe()
            os.close(other)
        elif kind == 4:
            fd, path = tempfile.mkstemp(prefix="gradwire-fuzz-")
            os.unlink(path)
            os.ftruncate(fd, 4096)
        else:
            fd = os.open("/proc/self/exe", os.O_RDONLY)
        made.append(fd)
    return made


class Liar(threading.Thread):
    """Serves clients in ``folder`` until `stop`; one thread, never blocks for long."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(name="liar", daemon=True)
        self.chance = random.Random(seed)
        self.said = 0
        self._stopping = False
        self._memory = Memory()
        self._router = sockets.bind_router(f"ipc://{folder}/z")
        self._listener = listen_tether(str(folder / "t"))
        self._tethers: dict[int, tuple[Any, Any]] = {}
        self._lanes: dict[int, Any] = {}
        self._poller = sockets.Poller()
        for waited in (self._router, self._listener.fileno()):
            self._poller.register(waited, sockets.IN)

    def stop(self) -> None:
        self._stopping = True
        self.join(10)

    def run(self) -> None:
        while not self._stopping:
            for waited, _ in self._poller.poll(50):
                with contextlib.suppress(
                    Exception
                ):  # it is a liar, not a server: what fails here is no finding
                    self._serve(waited)
        for tether, exchange in self._tethers.values():
            tether.close()
            exchange.end()
        for lane in self._lanes.values():
            lane.close()
        self._router.close()
        self._listener.close()
        self._memory.close()

    def _serve(self, waited: Any) -> None:
        if waited == self._listener.fileno():
            self._greet()
        elif waited in self._tethers:
            self._listen(waited)
        elif waited in self._lanes:
            self._serve_lane(waited)
        else:
            frames = sockets.receive_nowait(self._router)
            if frames:
                identity, frame = frames[:2]
                sockets.send_nowait(self._router, [identity, *self._answer(frame, self._exchange())])

    def _exchange(self) -> Any:
        return list(self._tethers.values())[-1][1]

    def _greet(self) -> None:
        tether = accept_tether(self._listener)
        assert tether is not None
        received = tether.receive(2)
        assert received is not None
        _, descriptors = received
        welcome = messages.pack(messages.Welcome(messages.PROTOCOL, b"i" * 16, os.getpid(), True, True))
        if self.chance.random() < 0.1:  # not even a greeting
            odd = odd_descriptors(self.chance, self.chance.randrange(3))
            self._say_raw(tether, mutated(self.chance, welcome), odd)
            close_all([*descriptors, *odd])
            tether.close()
            return
        ours = Ledger()
        self._say_raw(tether, welcome, ours.descriptors)
        ours.close()
        exchange = Exchange(self._memory, tether, Ledger.received(descriptors), ours)
        exchange.expect_lanes()
        self._tethers[tether.fileno()] = (tether, exchange)
        self._poller.register(tether.fileno(), sockets.IN)

    def _say_raw(self, tether: Any, packet: bytes, descriptors: list[int]) -> None:
        import array
        import socket

        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        with contextlib.suppress(OSError):
            tether._socket.sendmsg([packet[:4096]], rights, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _listen(self, fd: int) -> None:
        tether, exchange = self._tethers[fd]
        try:
            exchange.receive_segments()
        except (TetherClosedError, Exception):
            self._poller.unregister(fd)
            del self._tethers[fd]
            tether.close()
            exchange.end()
            return
        for descriptors in exchange.take_lanes():
            lane = received_lane(*descriptors) if len(descriptors) == 1 else received_page_lane(*descriptors)
            if lane is not None:
                self._lanes[lane.fileno()] = lane
                self._poller.register(lane.fileno(), sockets.IN)

    def _serve_lane(self, fd: int) -> None:
        lane = self._lanes[fd]
        try:
            frames = lane.receive_nowait()
            if type(frames) is int:
                self._answer_short(lane, frames)
            elif frames is not None:
                answer = self._answer(frames[0], self._exchange())
                if len(answer[0]) < 60_000:
                    lane.send_nowait(answer[:1])
        except sockets.Unreachable:
            self._poller.unregister(fd)
            del self._lanes[fd]
            lane.close()

    def _answer_short(self, lane: Any, nbytes: int) -> None:
        """A short answer of the right call, and then anything may be wrong about it."""
        chance = self.chance
        self.said += 1
        head = bytearray(bytes(lane.incoming[:24]))
        head[0:2] = b"\2\0"
        length = chance.choice([64, 68, 88, nbytes, 64 + 8 * 3, 64 + 8 * 2000, 1])
        answer = bytearray(head + chance.randbytes(length))[:length]
        if chance.random() < 0.6:
            for _ in range(chance.randrange(3)):
                answer[chance.randrange(len(answer))] = chance.randrange(256)
        lane.outgoing[:length] = answer
        if type(lane) is WorkerPage and chance.random() < 0.3:
            self._lie_in_page(lane)
        lane.send_short_nowait(length)

    def _lie_in_page(self, lane: Any) -> None:
        """Any word, any byte, at any time; an answer twice, or of another call."""
        chance = self.chance
        how = chance.randrange(5)
        if how == 0:
            lane._words[chance.choice([0, 8, 16, 24])] = chance.choice([1, chance.getrandbits(64)])
        elif how == 1:
            lane._number += chance.choice([-1, 1, 1 << 30])
        elif how == 2:
            lane.incoming[chance.randrange(300)] = chance.randrange(256)
        elif how == 3:
            lane.was_packet = not lane.was_packet
        else:
            lane._show(chance.choice([0, 1, 64, 262144, 262145]))

    def _answer(self, frame: bytes, exchange: Any) -> list[bytes]:
        message = messages.unpack(frame)
        self.said += 1
        right = self._packed(message, exchange)
        chance = self.chance.random()
        further = [self.chance.randbytes(self.chance.choice([0, 1, 4000]))] if chance < 0.05 else []
        if chance < 0.25 or (type(message) is messages.Load and chance < 0.8):
            return [right, *further]
        if 0.25 <= chance < 0.27:
            tether = next(t for t, e in self._tethers.values() if e is exchange)
            odd = odd_descriptors(self.chance, self.chance.randrange(3))
            packet = messages.pack(
                messages.Segment(self.chance.randrange(50), self.chance.choice([1, 4096, 2**40]))
            )
            self._say_raw(tether, mutated(self.chance, packet) if chance < 0.26 else packet, odd)
            close_all(odd)
        return [mutated(self.chance, right), *further]

    def _packed(self, message: Any, exchange: Any) -> bytes:
        while True:
            with contextlib.suppress(
                OverflowError, UnicodeEncodeError
            ):  # numbers that msgpack has no place for
                return messages.pack(self._right(message, exchange))

    def _right(self, message: Any, exchange: Any) -> Any:
        if type(message) is messages.Load:
            is_module = message.kind == "module"
            facts = {
                "remote": 1,
                "is_module": is_module,
                "training": None,
                "moves_in_evaluation": False,
                "may_have_parameters": True,
                "may_have_rules": False,
            }
            return messages.Done(message.call_id, flatten(facts, lambda x: False)[0], [], 0, 0)
        if type(message) is messages.Spec:
            facts = [[[[2, 3], [2, 32, 1]]], flatten(0.5, lambda x: True)[0], False]
            return messages.Done(message.call_id, flatten(facts, lambda x: False)[0], [], 0, 0)
        if type(message) is messages.State and message.verb in _GIVEN:
            tree = _GIVEN[message.verb]
            return messages.Done(message.call_id, flatten(tree, lambda x: False)[0], [], 0, 0)
        if self.chance.random() < 0.1:
            return messages.Failed(message.call_id, "RemoteError", "ValueError", "bad", "")
        array = np.ones(self.chance.choice([1, 600, 2000, 20_000]))
        headers = exchange.lend([Carrier(array, BY_NAME["float64"])], [])
        if self.chance.random() < 0.6:
            at = self.chance.randrange(8)
            headers[0] = list(headers[0])
            headers[0][at] = other_value(self.chance, headers[0][at])
        tree = {"weight": array} if type(message) is messages.State else array
        structure, _ = flatten(tree, lambda x: type(x) is np.ndarray)
        done = messages.Done(message.call_id, structure, headers, 1, 0)
        return messages.Long(message.call_id, headers) if self.chance.random() < 0.1 else done
