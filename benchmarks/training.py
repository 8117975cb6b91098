"""What training over the boundary costs, as ratios within one run; exits 1 where a limit is missed.

    python benchmarks/training.py [--json FILE] [--steps N]

- the worker owns the parameters: a whole step (forward, loss, backward, step, zero_grad) of the MLP 64→128→32 at a batch
  of 256, beside the same step of the same module in this process. Once with the loss in this process, which takes three
  messages; once with the loss in the worker, by `Optimizer.minimize`, which takes one; and by `Optimizer.submit`, where the next step is on its
  way while one is made: the time of a loop of steps until the last is done, by their number;
- the caller owns them: 10 M parameters (40 MB, one linear layer, a batch of 8). What the boundary adds to the same step
  here, beside the copies that it needs, made as plain memcpys in the same run: the parameters once, for the worker keeps
  them for the pullback while their owner may write them; and their gradients once, out of the worker's own memory.

All with one thread in each process. The steps of the worker's own once by lane and once by ZeroMQ.
Rounds of both sides alternate; a figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import gradwire as gw

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from roundtrip import machine, median_s

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
ROUNDS = 7
LIMITS = {
    "worker-owned step ÷ local step, by lane": 1.6,
    "worker-owned step ÷ local step, by ZeroMQ": 1.6,
    "worker-owned step in one message ÷ local step, by lane": 1.6,
    "worker-owned step in one message ÷ local step, by ZeroMQ": 1.6,
    "worker-owned step, submitted ÷ local step, by lane": 1.6,
    "worker-owned step, submitted ÷ local step, by ZeroMQ": 1.6,
    "caller-owned 10 M: what the boundary adds ÷ two memcpys": 1.3,
}
Act = Callable[[], object]


def rounds(acts: list[Act], calls: int) -> list[list[float]]:
    """Median seconds of each action, for each round."""
    for act in acts:
        median_s(act, max(3, calls // 4))
    return [[median_s(act, calls) for act in acts] for _ in range(ROUNDS)]


def submitted(
    optimizer: gw.Optimizer, args: tuple[torch.Tensor, ...], local_step: Act, calls: int
) -> dict[str, float]:
    """Seconds of a step of a loop, where no step is waited for but the last; and of a loop of local steps.

    Each loop begins with steps that do not count: until the system has given both processes a processor again, of which this one
    has just computed on one and the other slept.
    """

    def remote_loop(count: int) -> None:
        for _ in range(count):
            future = optimizer.submit(*args)
        future.result()

    def local_loop(count: int) -> None:
        for _ in range(count):
            local_step()

    def timed(loop: Callable[[int], None]) -> float:
        loop(calls // 2)
        return median_s(lambda: loop(calls), 1) / calls

    return figures([(timed(remote_loop), timed(local_loop)) for _ in range(ROUNDS)])


def worker_owned(worker: gw.Worker, calls: int, way: str) -> dict[str, float]:
    from torch_targets import mlp

    x, y = torch.randn(256, 64), torch.randn(256, 32)
    net, local = worker.module(f"torch_targets:mlp{'' if way == 'three messages' else '_with_loss'}"), mlp()
    remote_optimizer = net.optimizer("torch.optim:SGD", lr=1e-3)
    local_optimizer = torch.optim.SGD(local.parameters(), lr=1e-3)

    def remote_step() -> None:
        (net(x) - y).pow(2).mean().backward()
        remote_optimizer.step(zero_grad=True)

    def remote_step_in_one() -> None:
        remote_optimizer.minimize(x, y)

    def local_step() -> None:
        (local(x) - y).pow(2).mean().backward()
        local_optimizer.step()
        local_optimizer.zero_grad()

    if way == "submitted":
        return submitted(remote_optimizer, (x, y), local_step, calls)
    found = rounds([remote_step_in_one if way == "one message" else remote_step, local_step], calls)
    return figures([(a, b) for a, b in found])


def caller_owned(worker: gw.Worker, calls: int) -> dict[str, float]:
    from torch_targets import wide

    net, local = gw.torch.Module(worker.module("torch_targets:wide")), wide()
    size = local.weight.shape[0]
    x = torch.randn(8, size)

    def step(model: Any) -> None:
        model.zero_grad()
        model(x).sum().backward()

    source, target = np.ones((size, size), np.float32), np.zeros((size, size), np.float32)

    def two_copies() -> None:
        np.copyto(target, source)
        np.copyto(source, target)

    found = rounds([lambda: step(net), lambda: step(local), two_copies], calls)
    there = worker.stats()["copied_bytes"]
    step(net)
    result = figures([(a - b, c) for a, b, c in found])
    return {**result, "copied_bytes": worker.stats()["copied_bytes"] - there}


def figures(pairs: list[tuple[float, float]]) -> dict[str, float]:
    return {
        "us": statistics.median(a for a, _ in pairs) * 1e6,
        "beside_us": statistics.median(b for _, b in pairs) * 1e6,
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("build/training.json"))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in LIMITS:
        os.environ["GRADWIRE_LANE"] = "zmq" if name.endswith("ZeroMQ") else "page"
        with gw.connect() as bridge:
            worker = bridge.worker(
                "torch", python=ROOT / ".envs" / "torch" / "bin" / "python", path=[HERE], threads=1
            )
            if name.startswith("caller"):
                found[name] = caller_owned(worker, max(5, args.steps // 15))
            else:
                way = next((w for w in ("one message", "submitted") if w in name), "three messages")
                found[name] = worker_owned(worker, args.steps, way)
    for name, f in found.items():
        print(
            f"{name:58} {f['us']:9.0f} µs ÷ {f['beside_us']:9.0f} µs = {f['ratio']:.2f} (limit {LIMITS[name]})"
        )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"machine": machine(), "ratios": found, "limits": LIMITS}, indent=1))
    print(f"written to {args.json}")
    missed = [name for name, f in found.items() if f["ratio"] > LIMITS[name]]
    if missed:
        print("missed: " + "; ".join(missed))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
