"""The same work through gradwire and through its peers, each in an environment of its own, and a table of it.

    python benchmarks/peers/run.py [--only NAME …] [--json FILE] [--rounds N]

Environments are built once into gradwire's cache (minutes, some GB of packages). A peer that cannot be installed or does
not run is listed with the reason. Peers are set up as their own documentation advises for speed; see their files. Rounds
go through all peers in turn, and the median of the rounds' medians is shown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np

import gradwire as gw
from gradwire.environments import build

HERE = pathlib.Path(__file__).resolve().parent
TORCH = "torch==2.13.0"
JAX = ("jax==0.10.2", "jaxlib==0.10.2")
LIMIT_S = 240


class Peer(NamedTuple):
    """A way of calling. ``requirements``: of its environment; None: this program's."""

    name: str
    command: tuple[str, ...]
    requirements: tuple[str, ...] | None = None


PEERS = [
    Peer("torch itself, no boundary", ("direct.py",)),
    Peer("gradwire, numpy caller", ("gradwire_numpy.py",)),
    Peer("gradwire, jax.jit caller", ("gradwire_jax.py",)),
    Peer("pyzmq by hand", ("pyzmq_raw.py",)),
    Peer("multiprocessing.Pipe", ("pipe.py",)),
    Peer("torch.multiprocessing", ("torch_queues.py",)),
    Peer("torch.distributed.rpc", ("torch_rpc.py",)),
    Peer("Ray actor", ("ray_actor.py",), ("ray==2.60.0", TORCH)),
    Peer(
        "Tesseract, json+base64",
        ("tesseract.py", "json+base64", "numpy"),
        ("tesseract-core[runtime]==1.15.0", "tesseract-jax==0.4.0", TORCH, *JAX),
    ),
    Peer(
        "Tesseract, json+binref",
        ("tesseract.py", "json+binref", "numpy"),
        ("tesseract-core[runtime]==1.15.0", "tesseract-jax==0.4.0", TORCH, *JAX),
    ),
    Peer(
        "tesseract-jax, jit",
        ("tesseract.py", "json+base64", "jax"),
        ("tesseract-core[runtime]==1.15.0", "tesseract-jax==0.4.0", TORCH, *JAX),
    ),
    Peer(
        "torch-jax-interop, eager, one process",
        ("torch_jax_interop_bridge.py", "eager"),
        ("torch-jax-interop==0.0.8", "chex==0.1.92", "flax==0.12.8", TORCH, *JAX),
    ),
    Peer(
        "torch-jax-interop, jit, one process",
        ("torch_jax_interop_bridge.py", "jit"),
        ("torch-jax-interop==0.0.8", "chex==0.1.92", "flax==0.12.8", TORCH, *JAX),
    ),
    Peer(
        "jax2torch, one process",
        ("jax2torch_bridge.py",),
        ("jax2torch==0.0.7", TORCH, "jax==0.4.31", "jaxlib==0.4.31"),
    ),
    Peer("torch2jax, translated to XLA", ("torch2jax_bridge.py",), ("torch2jax==0.1.0", TORCH, *JAX)),
]


class Failed(Exception):
    """Why a peer has no figures."""


def interpreter_of(peer: Peer) -> str:
    if peer.requirements is None:
        return sys.executable
    try:
        return build(peer.requirements, "3.11").python
    except gw.GradwireError as error:
        raise Failed(f"its environment cannot be built: {str(error).splitlines()[0]}") from error


def figures_of(peer: Peer, python: str) -> dict[str, Any]:
    """What the peer's script reports."""
    command = [python, str(HERE / peer.command[0]), *peer.command[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {LIMIT_S} s") from None
    if run.returncode:
        raise Failed(_reason(run.stderr.strip().splitlines()) or f"exit code {run.returncode}")
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def _reason(said: list[str]) -> str:
    """The error's first line, where a traceback ends with one; the last line otherwise."""
    errors = [line for line in said if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    return (errors or said or [""])[-1][:300]


def measured(peers: list[Peer], rounds: int) -> dict[str, dict[str, Any]]:
    """By peer: its versions, and by row the figures of each round; or why there are none."""
    results: dict[str, dict[str, Any]] = {}
    pythons: dict[str, str] = {}
    for peer in peers:
        try:
            pythons[peer.name] = interpreter_of(peer)
        except Failed as error:
            results[peer.name] = {"failed": str(error)}
    for number in range(rounds):
        for peer in peers:
            result = results.setdefault(peer.name, {"rows": {}})
            if "failed" in result:
                continue
            print(f"round {number + 1}: {peer.name}", file=sys.stderr, flush=True)
            try:
                found = figures_of(peer, pythons[peer.name])
            except Failed as error:
                results[peer.name] = {"failed": str(error)}
                continue
            result["versions"] = found["versions"]
            for row, figures in found["rows"].items():
                result["rows"].setdefault(row, []).append(figures)
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: peers down, work across, microseconds (median of the rounds' medians)."""
    columns = list(dict.fromkeys(row for result in results.values() for row in result.get("rows", {})))
    columns.sort(key=lambda c: c.startswith("MLP"))
    lines = [f"| µs, p50 | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, result in results.items():
        cells = [_cell(result.get("rows", {}).get(column, [])) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    reasons = [f"{name}: {result['failed']}" for name, result in results.items() if "failed" in result]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _cell(rounds: list[dict[str, Any]]) -> str:
    values = [figures["p50_us"] for figures in rounds if "p50_us" in figures]
    if not values:
        return next((figures["failed"] for figures in rounds), "")
    p50 = statistics.median(values)
    return f"{p50:,.0f}".replace(",", " ")


def machine() -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "processors": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--only", nargs="*", metavar="NAME", help="peers whose name has one of these in it")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=pathlib.Path)
    chosen = options.parse_args()
    wanted = [p for p in PEERS if not chosen.only or any(part in p.name for part in chosen.only)]
    results = measured(wanted, chosen.rounds)
    print(table(results))
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": machine(), "peers": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
