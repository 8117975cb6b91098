"""Two ends of an exchange in one process, and what every test of shared memory looks at."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
import pytest

from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import dtype_named
from gradwire_wire.exchange import Exchange, Memory
from gradwire_wire.segments import Ledger
from gradwire_wire.tether import Tether


class Side:
    """One process's part: its memory, and its exchange with the other side."""

    def __init__(self, memory: Memory, exchange: Exchange, tether: Tether) -> None:
        self.memory, self.exchange, self.tether = memory, exchange, tether
        self.peer: Side

    def send_carriers(self, *carriers: Carrier | None) -> list[Any]:
        """Lend, pack, unpack and borrow, as two processes do."""
        frames: list[Any] = []
        headers = self.exchange.lend(carriers, frames)
        received = msgpack.unpackb(msgpack.packb(headers))
        return self.peer.exchange.borrow_all(received, frames)

    def send(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The arrays as the peer sees them."""
        return [c.array for c in self.send_carriers(*map(carrier_of, arrays))]

    def settle(self) -> int:
        """How many loans the peer has, after looking."""
        with self.memory.lock:
            self.exchange.settle()
        return len(self.exchange.loans)

    def used_bytes(self) -> int:
        """Of own memory, by whoever."""
        self.settle()
        with self.memory.lock:
            self.memory.arena.drain()
        arena = self.memory.arena
        never_carved = 0 if arena._chunk is None else arena._chunk.nbytes - arena._chunk_used
        return arena.resident_bytes - arena.idle_bytes - never_carved

    def close(self) -> None:
        """The peer is gone, and so is this process; nothing here refers to anything any more."""
        if self.__dict__:
            self.exchange.end()
            self.tether.close()
            self.memory.close()
            self.__dict__.clear()


def carrier_of(array: np.ndarray) -> Carrier:
    dtype = dtype_named(array.dtype.name)
    assert dtype is not None
    return Carrier(array, dtype)


def connect(one: Memory, other: Memory) -> tuple[Side, Side]:
    """Two sides that have shaken hands."""
    ends = [Tether(s) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    ledgers = [Ledger(), Ledger()]
    received = [Ledger.received([os.dup(fd) for fd in ledger.descriptors]) for ledger in ledgers]
    for ledger in ledgers:
        ledger.close()
    sides = (
        Side(one, Exchange(one, ends[0], received[1], ledgers[0]), ends[0]),
        Side(other, Exchange(other, ends[1], received[0], ledgers[1]), ends[1]),
    )
    sides[0].peer, sides[1].peer = sides[1], sides[0]
    return sides


@pytest.fixture
def join() -> Iterator[Callable[..., tuple[Side, Side]]]:
    """Makes pairs of sides from memories (new ones by default), and ends them."""
    made: list[Side] = []

    def join(one: Memory | None = None, other: Memory | None = None) -> tuple[Side, Side]:
        sides = connect(one or Memory(), other or Memory())
        made.extend(sides)
        return sides

    yield join
    for side in made:
        side.close()
    made.clear()
    gc.collect()


@pytest.fixture
def pair(join: Callable[..., tuple[Side, Side]]) -> tuple[Side, Side]:
    """Two sides, each with memory of its own."""
    return join()


def open_descriptors() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return sorted(found)


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("gradwire" in line for line in maps)


@pytest.fixture
def footprint() -> Callable[[], tuple[int, int]]:
    """Numbers of open descriptors and of gradwire's mappings, after a collection."""

    def footprint() -> tuple[int, int]:
        gc.collect()
        return len(open_descriptors()), mappings()

    return footprint


@pytest.fixture
def same() -> Callable[[np.ndarray, np.ndarray], None]:
    """Asserts that two arrays have one dtype, shape and bytes."""

    def same(a: np.ndarray, b: np.ndarray) -> None:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()

    return same


@pytest.fixture
def without_memfd(monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """As in a hardened container: no memory files."""
    asked: list[str] = []

    def refused(name: str) -> int:
        asked.append(name)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("gradwire_wire.segments.files._create_memfd", refused)
    return asked
