"""What a bridge costs while nobody calls: processor seconds of caller, broker and workers; exits 1 where the limit is missed.

    python benchmarks/idle.py [--seconds 60] [--json FILE]

A bridge with a numpy worker that has been called, and so has every thread, line and spin that calls bring. The figure is
what the three processes used from then on, scaled to 60 s.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

import numpy as np

import gradwire as gw

LIMIT_S = 0.1
PER_S = 60.0
SETTLE_S = 2.0
TICK = os.sysconf("SC_CLK_TCK")


def used_s(pid: int) -> float:
    """Processor seconds of a process so far, all its threads: nanoseconds from the scheduler where it tells them."""
    tasks = pathlib.Path(f"/proc/{pid}/task")
    try:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
    except OSError:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK


def parent_of(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def idle(seconds: float = PER_S) -> dict[str, float]:
    """Processor seconds in 60 s by process, and ``total``. Takes ``seconds``, without a call."""
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[pathlib.Path(__file__).parent])
        remote, x = worker.function("targets:identity"), np.zeros(1, np.float32)
        for _ in range(1000):
            remote(x)
        pids = {"caller": os.getpid(), "broker": parent_of(worker.pid), "worker": worker.pid}
        time.sleep(SETTLE_S)
        before = {who: used_s(pid) for who, pid in pids.items()}
        begun = time.perf_counter()
        time.sleep(seconds)
        scale = PER_S / (time.perf_counter() - begun)
        found = {who: (used_s(pid) - before[who]) * scale for who, pid in pids.items()}
    return {**found, "total": sum(found.values())}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=PER_S)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    found = idle(arguments.seconds)
    said = ", ".join(f"{who} {seconds:.3f} s" for who, seconds in found.items())
    print(f"processor in 60 s of an idle bridge: {said} (limit {LIMIT_S} s)")
    if arguments.json:
        arguments.json.write_text(json.dumps({"idle": found, "limit_s": LIMIT_S}, indent=1) + "\n")
    return int(found["total"] >= LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
