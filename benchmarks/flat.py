"""10,000 calls of each kind leave nothing behind: memory, descriptors, mappings and threads, in caller, worker and broker.

    python benchmarks/flat.py [--calls 10000] [--only KIND …] [--json FILE]

Kinds: a small call, one through shared memory, one with 50 leaves, by four threads, by `submit`, pipelined; reverse mode, whose pullback is
released or left to the garbage collection; an error; new signatures all the time; a compiled JAX program, where JAX is
installed. Each after a tenth of it to warm up. Exits 1 where something grew.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

import gradwire as gw

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from idle import parent_of
from roundtrip import GROWTH, jitted, usage

CALLS = 10_000
FLIGHT = 32
Act = Callable[[int], object]


def kinds(worker: gw.Worker, pool: ThreadPoolExecutor) -> dict[str, Act]:
    """What is done once of each kind; the argument counts."""
    identity, square = worker.function("targets:identity"), worker.function("targets:square")
    fails, small = worker.function("targets:fails"), np.zeros(1, np.float32)
    large, leaves = np.zeros((100, 200), np.float32), [np.zeros(3, np.float32) for _ in range(50)]
    in_flight: deque[Future[Any]] = deque()

    def pipelined(_: int) -> None:
        in_flight.append(identity.submit(small))
        if len(in_flight) >= FLIGHT:
            in_flight.popleft().result()

    def pulled(i: int) -> None:
        y, pullback = square.vjp(small)
        pullback(y)
        if i % 2:
            pullback.release()

    def failed(_: int) -> None:
        try:
            fails(small)
        except ValueError:
            return
        raise AssertionError("the call that fails did not")

    def by_threads(_: int) -> None:
        list(pool.map(identity, [large] * 4))

    compiled = jitted(identity, large)
    return {
        "small": lambda _: identity(small),
        "shared memory": lambda _: identity(large),
        "50 leaves": lambda _: identity(leaves),
        "four threads": by_threads,
        "pipelined": pipelined,
        "reverse mode": pulled,
        "errors": failed,
        "new signatures": lambda i: identity(np.zeros(1 + i % 5000, np.float32)),
        **({"jitted function": lambda _: compiled()} if compiled is not None else {}),
    }


def growth(act: Act, calls: int, pids: dict[str, int]) -> dict[str, dict[str, int]]:
    """What so many calls leave behind in each process, after a tenth of them to warm up."""

    def look() -> dict[str, dict[str, int]]:
        gc.collect()
        return {who: usage(pid) for who, pid in pids.items()}

    for i in range(calls // 10):
        act(i)
    before = look()
    for i in range(calls):
        act(i)
    after = look()
    return {who: {what: n - before[who][what] for what, n in found.items()} for who, found in after.items()}


def flat(calls: int = CALLS, only: list[str] | None = None) -> dict[str, dict[str, dict[str, int]]]:
    """By kind and process, what grew."""
    found = {}
    with gw.connect() as bridge, ThreadPoolExecutor(4) as pool:
        worker = bridge.worker("numpy", path=[pathlib.Path(__file__).parent])
        pids = {"caller": os.getpid(), "worker": worker.pid, "broker": parent_of(worker.pid)}
        for kind, act in kinds(worker, pool).items():
            if only is None or kind in only:
                found[kind] = growth(act, calls, pids)
    return found


def grown(found: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    """What is more than it may be, in words; empty is as it should be."""
    return [
        f"{kind}, {who}: {n:+d} {what}"
        for kind, processes in found.items()
        for who, figures in processes.items()
        for what, n in figures.items()
        if n > GROWTH[what]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--only", nargs="*", metavar="KIND")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    found = flat(arguments.calls, arguments.only)
    for kind, processes in found.items():
        for who, figures in processes.items():
            print(f"{kind:16} {who:7}" + "".join(f"{n:+8d} {what}" for what, n in figures.items()))
    missed = grown(found)
    print(
        "grown: " + "; ".join(missed) if missed else f"nothing grew over {arguments.calls} calls of each kind"
    )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"calls": arguments.calls, "flat": found, "grown": missed}, indent=1) + "\n"
        )
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
