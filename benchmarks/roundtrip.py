"""What a call costs over the boundary, as ratios within one run; exits 1 where a limit is missed.

    python benchmarks/roundtrip.py [--json FILE] [--calls N]

- an empty call (one float32 in and out) beside a raw pyzmq ping-pong of 200 bytes;
- 64 MiB there and 64 other MiB back beside two memcpys of 64 MiB;
- 10,000 calls, from one thread and from a jitted function: nothing grows in any of the processes.

Rounds of both sides of a ratio alternate; the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import gradwire as gw
from gradwire.benchmark.report import machine

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from echo import ping_pong

ROUNDS = 5
LIMITS = {"empty call ÷ raw ping-pong": 2.0, "64 MiB there and back ÷ two memcpys": 1.5}
GROWTH = {"descriptors": 0, "threads": 0, "mappings": 4, "resident_kib": 4096}


def median_s(act: Callable[[], object], calls: int) -> float:
    """Median seconds of one call."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def compare(act: Callable[[], object], other: Callable[[], object], calls: int) -> dict[str, float]:
    """Alternate rounds of two actions."""
    for warm_up in (act, other):
        median_s(warm_up, max(3, calls // 10))
    rounds = [(median_s(act, calls), median_s(other, calls)) for _ in range(ROUNDS)]
    return {
        "us": statistics.median(a for a, _ in rounds) * 1e6,
        "beside_us": statistics.median(b for _, b in rounds) * 1e6,
        "ratio": statistics.median(a / b for a, b in rounds),
    }


def empty_call(worker: gw.Worker) -> dict[str, float]:
    remote, x = worker.function("targets:identity"), np.zeros(1, np.float32)
    with ping_pong() as once:
        return compare(lambda: remote(x), once, 2000)


def large_call(worker: gw.Worker) -> dict[str, float]:
    remote, x = worker.function("targets:swap_64_mib"), np.ones(64 << 20, np.uint8)
    there, back = np.empty_like(x), np.empty_like(x)

    def two_copies() -> None:
        np.copyto(there, x)
        np.copyto(back, there)

    return compare(lambda: remote(x), two_copies, 9)


def usage(pid: int) -> dict[str, int]:
    """What a process holds right now."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
        "mappings": pathlib.Path(f"/proc/{pid}/maps").read_text().count("\n"),
        "resident_kib": int(fields["VmRSS"].split()[0]),
    }


def growth(act: Callable[[], object], worker: gw.Worker, calls: int) -> dict[str, dict[str, int]]:
    """What ``calls`` calls leave behind, in this process and in the worker's, after a tenth to warm up."""
    pids = {"caller": os.getpid(), "worker": worker.pid}
    for _ in range(calls // 10):
        act()
    before = {who: usage(pid) for who, pid in pids.items()}
    for _ in range(calls):
        act()
    after = {who: usage(pid) for who, pid in pids.items()}
    return {
        who: {what: after[who][what] - n for what, n in figures.items()} for who, figures in before.items()
    }


def jitted(remote: gw.Remote, x: np.ndarray) -> Callable[[], object] | None:
    """The call inside a compiled JAX program; None where JAX is not installed."""
    try:
        import jax
    except ImportError:
        return None
    known = remote.options(out_spec=gw.ShapeDtype(x.shape, x.dtype.name))
    program, device_x = jax.jit(lambda x: known(x) + 1), jax.numpy.asarray(x)
    return lambda: program(device_x).block_until_ready()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("build/roundtrip.json"))
    parser.add_argument("--calls", type=int, default=10_000)
    args = parser.parse_args()
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[pathlib.Path(__file__).parent])
        ratios = dict(zip(LIMITS, (empty_call(worker), large_call(worker)), strict=True))
        remote, x = worker.function("targets:identity"), np.zeros((100, 200), np.float32)
        left = {"one thread": growth(lambda: remote(x), worker, args.calls)}
        compiled = jitted(remote, x)
        if compiled is not None:
            left["jitted function"] = growth(compiled, worker, args.calls)
    missed = [name for name, figures in ratios.items() if figures["ratio"] > LIMITS[name]]
    for name, figures in ratios.items():
        print(
            f"{name:40} {figures['us']:10.1f} µs ÷ {figures['beside_us']:10.1f} µs = {figures['ratio']:.2f} (limit {LIMITS[name]})"
        )
    for how, processes in left.items():
        for who, figures in processes.items():
            print(
                f"{args.calls} calls from {how:16} {who}: "
                + ", ".join(f"{what} {n:+d}" for what, n in figures.items())
            )
            missed += [f"{how}, {who}: {what}" for what, n in figures.items() if n > GROWTH[what]]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(
        json.dumps({"machine": machine(), "ratios": ratios, "limits": LIMITS, "growth": left}, indent=1)
    )
    print(f"written to {args.json}")
    if missed:
        print("missed: " + "; ".join(missed))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
