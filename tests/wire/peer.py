"""The other process of test_exchange.py: borrows what it is told to, writes it, keeps it, lends it on.

    python peer.py TETHER_FD TALK_FD      (an inherited SOCK_SEQPACKET each)

One request at a time, msgpack [verb, argument, headers, frames]; the answer is [error or None, value, headers, frames].
"""

from __future__ import annotations

import gc
import os
import resource
import select
import socket
import sys
from typing import Any

import msgpack
import numpy as np

from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import dtype_named
from gradwire_wire.exchange import Exchange, Memory
from gradwire_wire.messages import Hello, Welcome
from gradwire_wire.segments import Ledger
from gradwire_wire.tether import Tether


def greet(tether: Tether, memory: Memory) -> Exchange:
    """Be greeted, as a worker is."""
    hello, descriptors = tether.receive(30) or (None, [])
    assert type(hello) is Hello
    ours = Ledger()
    tether.send(Welcome(1, bytes(16), os.getpid(), False, False), ours.descriptors)
    ours.close()
    return Exchange(memory, tether, Ledger.received(descriptors), ours)


class Peer:
    """What can be asked of it; ``kept`` are the arrays that user code would have kept."""

    def __init__(self, exchange: Exchange, memory: Memory) -> None:
        self.exchange, self.memory = exchange, memory
        self.kept: list[np.ndarray] = []

    def echo(self, arrays: list[np.ndarray], _: Any) -> tuple[Any, list[np.ndarray]]:
        return None, arrays

    def copy(self, arrays: list[np.ndarray], _: Any) -> tuple[Any, list[np.ndarray]]:
        return None, [a.copy(order="K") for a in arrays]

    def keep(self, arrays: list[np.ndarray], _: Any) -> tuple[Any, list[np.ndarray]]:
        self.kept += arrays
        return len(self.kept), []

    def drop(self, arrays: list[np.ndarray], _: Any) -> tuple[Any, list[np.ndarray]]:
        self.kept.clear()
        gc.collect()
        return None, []

    def sums(self, arrays: list[np.ndarray], _: Any) -> tuple[Any, list[np.ndarray]]:
        return [float(a.sum(dtype="f8")) for a in arrays], []

    def sums_kept(self, arrays: list[np.ndarray], _: Any) -> tuple[Any, list[np.ndarray]]:
        return [float(a.sum(dtype="f8")) for a in self.kept], []

    def scribble(self, arrays: list[np.ndarray], value: float) -> tuple[Any, list[np.ndarray]]:
        """In place, everywhere, in what came and in what was kept."""
        for a in arrays + self.kept:
            a[...] = value
        return None, arrays

    def make(self, arrays: list[np.ndarray], what: list) -> tuple[Any, list[np.ndarray]]:
        count, value = what
        return None, [np.full(count, value, "f4")]

    def cycle(self, arrays: list[np.ndarray], _: Any) -> tuple[Any, list[np.ndarray]]:
        """Keep what came as garbage that only a collection finds."""
        gc.disable()  # it would come by sooner or later
        node: list = [*arrays]
        node.append(node)
        return None, []

    def loans(self, arrays: list[np.ndarray], _: Any) -> tuple[Any, list[np.ndarray]]:
        with self.memory.lock:
            self.exchange.settle()
        return len(self.exchange.loans), []

    def limit(self, arrays: list[np.ndarray], more: int) -> tuple[Any, list[np.ndarray]]:
        """From now on this process may have so many more bytes of addresses."""
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + more, resource.RLIM_INFINITY))
        return None, []

    def unlimit(self, arrays: list[np.ndarray], _: Any) -> tuple[Any, list[np.ndarray]]:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return None, []

    def answer(self, verb: str, argument: Any, headers: list[Any], frames: list[bytes]) -> list[Any]:
        further: list[Any] = []
        arrays = [c.array for c in self.exchange.borrow_all(headers, frames) if c is not None]
        value, results = getattr(self, verb)(arrays, argument)
        carriers = [Carrier(a, dtype_named(a.dtype.name)) for a in results]  # type: ignore[arg-type]
        return [None, value, self.exchange.lend(carriers, further), further]


def main() -> None:
    tether = Tether(socket.socket(fileno=int(sys.argv[1])))
    talk = socket.socket(fileno=int(sys.argv[2]))
    memory = Memory()
    peer = Peer(greet(tether, memory), memory)
    while True:
        ready, _, _ = select.select([talk, tether], [], [])
        if talk not in ready:
            peer.exchange.receive_segments()
            continue
        request = talk.recv(1 << 20)
        if not request:
            talk.close()
            return
        try:
            answer = peer.answer(*msgpack.unpackb(request, strict_map_key=False))
        except Exception as error:
            answer = [f"{type(error).__name__}: {error}", None, [], []]
        talk.send(msgpack.packb(answer))
        del answer


if __name__ == "__main__":
    main()
