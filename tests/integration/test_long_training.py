"""10,000 training steps: memory, descriptors, mappings and threads of every process stay as they were."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw

X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
STEPS = 10_000  # with those that warm up
BYTES = 800  # a step: a leak of one small object with what it holds would be more


def usage(pid: int | str) -> dict[str, int]:
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    # (Not VmRSS: it has the pages of libraries' files too, which come and go as the machine's memory is short or not.)
    return {
        "anonymous": int(fields["RssAnon"].split()[0]),
        "shared": int(fields["RssShmem"].split()[0]),
        "threads": int(fields["Threads"]),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
    }


def owned_by_the_worker(net: gw.Remote) -> Callable[[], None]:
    import torch

    optimizer, x = net.optimizer("torch.optim:Adam", lr=1e-3), torch.tensor(X)

    def step() -> None:
        (net(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def owned_by_the_caller(net: gw.Remote) -> Callable[[], None]:
    import jax

    apply, params = gw.jax.functional(net)
    state = [params]

    @jax.jit
    def descended(params: Any) -> Any:
        gradient = jax.grad(lambda p: (apply(p, X) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient)

    def step() -> None:
        state[0] = jax.block_until_ready(descended(state[0]))

    return step


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("owned", "warm_up"),
    [
        (owned_by_the_worker, 1_000),
        (owned_by_the_caller, 4_000),
    ],  # kept graphs of a compiled program fill their share
)
def test_ten_thousand_steps_cost_no_memory(
    worker_of: Callable[[str], gw.Worker], owned: Callable[[gw.Remote], Callable[[], None]], warm_up: int
) -> None:
    worker = worker_of("torch")
    net = worker.module("in_torch:make_block", [6, 4]).eval()
    step = owned(net)
    for _ in range(warm_up):
        step()
    gc.collect()
    before = {"client": usage("self"), "worker": usage(worker.pid)}
    for _ in range(STEPS - warm_up):
        step()
    gc.collect()
    after = {"client": usage("self"), "worker": usage(worker.pid)}
    for process, was in before.items():
        grown = {what: after[process][what] - n for what, n in was.items()}
        assert grown["anonymous"] + grown["shared"] < BYTES * (STEPS - warm_up) / 1024, (process, grown)
        assert grown["descriptors"] <= 2 and grown["threads"] <= 0 and grown["mappings"] <= 8, (
            process,
            grown,
        )
