"""Calls of all sizes from several threads while workers are killed: every payload right, nothing lost, nothing left.

    python tests/integration/soak.py [SECONDS]      (1800; ``make soak``; `test_soak.py` runs half a minute of it)

Each thread calls one of two workers with an array of 0 to 64 MiB of random bytes and checks the CRC of what the worker saw
and of what came back. A worker is killed every 20 s; a call in flight may then say WorkerDiedError, and nothing else may
go wrong. Some results are kept over many calls and checked again before they are dropped. At the end all memory, descriptors
and mappings of this process are what they were. Exits with 1 and says why if anything is not so.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import random
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import gradwire as gw

TARGETS = Path(__file__).parent / "targets"
THREADS, KILL_EVERY_S, LARGEST, KEPT_BYTES = 4, 20.0, 64 << 20, 128 << 20
ANSWER_S = 60.0


class Tally:
    """What happened, counted by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.counts[what] += n

    def note_wrong(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)


def payload(chance: random.Random) -> np.ndarray:
    """Random bytes; small ones are as frequent as large ones."""
    nbytes = 0 if chance.random() < 0.05 else int(2 ** chance.uniform(0, LARGEST.bit_length() - 1))
    block = np.frombuffer(chance.randbytes(min(nbytes, 1 << 16)), np.uint8)
    return np.resize(block, nbytes) if nbytes else np.empty(0, np.uint8)


def caller(number: int, seed: int, remotes: list[gw.Remote], end: float, tally: Tally) -> None:
    """One thread's calls."""
    chance = random.Random(seed * 100 + number)
    kept: list[tuple[np.ndarray, int]] = []
    while time.monotonic() < end and not tally.wrong:
        x = payload(chance)
        crc = zlib.crc32(x)
        try:
            seen, back = one_call(chance, remotes, x)
        except gw.WorkerDiedError:
            tally.count("calls told of a death")
            continue
        except BaseException as error:
            tally.note_wrong(f"thread {number}: {type(error).__name__}: {error}")
            return
        if int(seen) != crc or zlib.crc32(np.ascontiguousarray(back)) != crc or back.size != x.size:
            tally.note_wrong(
                f"thread {number}: {x.nbytes} bytes of CRC {crc} were seen as {int(seen)}, {zlib.crc32(back)}"
            )
        tally.count("calls answered")
        tally.count("bytes each way", x.nbytes)
        if chance.random() < 0.3 and sum(k.nbytes for k, _ in kept) + x.nbytes < KEPT_BYTES / THREADS:
            kept.append((back, crc))
        while kept and chance.random() < 0.25:
            check_kept(kept.pop(chance.randrange(len(kept))), tally)
    for one in kept:
        check_kept(one, tally)


def one_call(chance: random.Random, remotes: list[gw.Remote], x: np.ndarray) -> tuple[Any, np.ndarray]:
    how = chance.random()
    remote = chance.choice(remotes)
    if how < 0.2:
        result: tuple[Any, np.ndarray] = remote.submit(x).result(ANSWER_S)
        return result
    if how < 0.3:  # through both: a result is passed on without a copy
        _, x = remotes[0](x)
        return tuple(remotes[1](x))  # type: ignore[return-value]
    return tuple(remote(x))  # type: ignore[return-value]


def check_kept(kept: tuple[np.ndarray, int], tally: Tally) -> None:
    array, crc = kept
    tally.count("kept results checked")
    if zlib.crc32(np.ascontiguousarray(array)) != crc:
        tally.note_wrong(f"a kept result of {array.nbytes} bytes has changed")


def killer(workers: list[gw.Worker], every_s: float, end: float, tally: Tally) -> None:
    """Kill one after the other, also while it starts."""
    for i in range(10**9):
        if time.monotonic() + every_s > end:
            return
        time.sleep(every_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[i % len(workers)].pid, signal.SIGKILL)
            tally.count("workers killed")


@contextlib.contextmanager
def nothing_left(tally: Tally) -> Iterator[None]:
    """Descriptors, mappings of segments and children of this process are at the end what they were."""
    before = held()
    yield
    deadline = time.monotonic() + 60
    while (after := held()) != before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.1)
    for what in before:
        if before[what] != after[what]:
            tally.note_wrong(f"{what} left: {after[what]}, were {before[what]}")


def held() -> dict[str, Any]:
    """What this process holds of gradwire's."""
    descriptors = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if re.match(r"socket:|pipe:|/memfd:gradwire|anon_inode:\[pidfd\]", target):
                descriptors.append(target if target.startswith("/memfd") else target.partition(":")[0])
    mappings = Path("/proc/self/maps").read_text().count("gradwire")
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {"descriptors": sorted(descriptors), "mappings": mappings, "children": children}


def soak(seconds: float, seed: int, kill_every_s: float = KILL_EVERY_S) -> Tally:
    """The whole of it."""
    tally = Tally()
    with nothing_left(tally):
        with gw.connect() as bridge:
            workers = [
                bridge.worker("numpy", path=[TARGETS], threads=1, restart="on-failure") for _ in range(2)
            ]
            remotes = [worker.function("checked:seen") for worker in workers]
            end = time.monotonic() + seconds
            threads = [
                threading.Thread(target=caller, args=(n, seed, remotes, end, tally)) for n in range(THREADS)
            ]
            threads.append(threading.Thread(target=killer, args=(workers, kill_every_s, end, tally)))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(seconds + ANSWER_S)
                if thread.is_alive():
                    tally.note_wrong("a call hangs")
            lent = lent_after(workers, bridge)
            if lent:
                tally.note_wrong(f"{lent} loans were never returned")
        del workers, remotes, bridge
    return tally


def lent_after(workers: list[gw.Worker], bridge: gw.Bridge, timeout_s: float = 60.0) -> int:
    """Loans that living workers have not returned in time, and that are not kept for a result that a dead one was lent."""
    deadline = time.monotonic() + timeout_s
    while True:
        gc.collect()
        lent = 0
        for worker in workers:
            if worker.alive:
                worker.function("checked:collect")()
                lent += worker.stats()["lent"]
        lent = max(0, lent - len(bridge._memory._orphans))
        if not lent or time.monotonic() > deadline:
            return lent
        time.sleep(0.1)


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 1800.0
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, {seconds:g} s", flush=True)
    tally = soak(seconds, seed)
    for what, n in sorted(tally.counts.items()):
        print(f"  {n:>16,} {what}")
    for what in tally.wrong:
        print(f"WRONG: {what}")
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
