"""The limits that gradwire sets itself, as ratios within one run; exits 1 where one is missed.

    python benchmarks/limits.py [--only TEXT] [--json FILE] [--idle SECONDS]
                                [--torch PYTHON] [--jax PYTHON] [--tensorflow PYTHON]

Each row is one question. Rounds of its two sides alternate, five of each; the figure is the median of the rounds'
ratios of medians. What is called directly is the same model, one thread, in a process of its own that does nothing
else. The interpreters of the workers are those of `make setup` by default; a row whose interpreter is missing is left
out, and so are those of caller frameworks that this environment does not have. The second row needs processes started with
GRADWIRE_LANE=zmq, and so is measured by a run of this program of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import gradwire as gw

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from echo import ping_pong
from roundtrip import growth, machine, median_s

HERE = pathlib.Path(__file__).resolve().parent
ROUNDS = 5
CALLS = 1000
X = np.random.default_rng(1).standard_normal((256, 64), np.float32)
MIB64 = 64 << 20


class Row(NamedTuple):
    """One figure: its two sides in microseconds, where it has such, and the ratio."""

    name: str
    limit: float
    value: float
    sides: tuple[float, float] | None = None
    unit: str = ""

    @property
    def is_missed(self) -> bool:
        return self.value > self.limit


def compare(
    name: str, limit: float, act: Callable[[], object], other: Callable[[], object], calls: int = CALLS
) -> Row:
    """Alternate rounds of two actions that take place in this process or wait for another one."""
    for warm_up in (act, other):
        median_s(warm_up, max(3, calls // 5))
    rounds = [(median_s(act, calls), median_s(other, calls)) for _ in range(ROUNDS)]
    sides = tuple(statistics.median(side) * 1e6 for side in zip(*rounds, strict=True))
    return Row(name, limit, statistics.median(a / b for a, b in rounds), (sides[0], sides[1]))


# ---- What is called directly, in a process of its own ------------------------------------------------------------------------

DIRECT = """
import os, statistics, sys, time
os.environ.update(OMP_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="3", XLA_FLAGS="--xla_cpu_multi_thread_eigen=false")
sys.path.insert(0, sys.argv[1])
import numpy as np
import limits_targets
x = np.random.default_rng(1).standard_normal((256, 64), np.float32)
framework = sys.argv[2]
if framework == "torch":
    import torch
    torch.set_num_threads(1)
    net, given = limits_targets.torch_mlp(), torch.from_numpy(x)
    def forward():
        with torch.no_grad():
            return net(given)
    def both():
        leaf = given.detach().requires_grad_()
        return torch.autograd.grad(net(leaf).sum(), leaf)
elif framework == "jax":
    import jax
    run, given = jax.jit(limits_targets.jax_mlp), jax.numpy.asarray(x)
    pull = jax.jit(jax.value_and_grad(lambda x: limits_targets.jax_mlp(x).sum()))
    forward, both = lambda: run(given).block_until_ready(), lambda: jax.block_until_ready(pull(given))
else:
    import tensorflow as tf
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    given = tf.constant(x)
    signature = tf.TensorSpec(x.shape, tf.float32)
    run = tf.function(limits_targets.tensorflow_mlp).get_concrete_function(signature)
    def value_and_grad(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(limits_targets.tensorflow_mlp(x))
        return y, tape.gradient(y, x)
    pull = tf.function(value_and_grad).get_concrete_function(signature)
    forward, both = lambda: run(given).numpy(), lambda: [y.numpy() for y in pull(given)]
acts = {"forward": forward, "both": both}
for act in acts.values():
    for _ in range(200):
        act()
print("ready", flush=True)
for line in sys.stdin:
    name, calls = line.split()
    times = []
    for _ in range(int(calls)):
        start = time.perf_counter()
        acts[name]()
        times.append(time.perf_counter() - start)
    print(statistics.median(times), flush=True)
"""


class Direct:
    """Asks for medians of direct calls."""

    def __init__(self, python: str, framework: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", DIRECT, str(HERE), framework],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the direct calls could not be made: {self._process.args!r:.200}")
        return line

    def median_s(self, name: str, calls: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name} {calls}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


def beside(name: str, limit: float, act: Callable[[], object], direct: Direct, what: str, calls: int) -> Row:
    """As `compare`, where the other side is another process's."""
    median_s(act, max(50, calls // 5))
    rounds = [(median_s(act, calls), direct.median_s(what, calls)) for _ in range(ROUNDS)]
    sides = tuple(statistics.median(side) * 1e6 for side in zip(*rounds, strict=True))
    return Row(name, limit, statistics.median(a / b for a, b in rounds), (sides[0], sides[1]))


# ---- Rows --------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def numpy_worker() -> Iterator[gw.Worker]:
    with gw.connect() as bridge:
        yield bridge.worker("numpy", path=[HERE], threads=1)


def empty_call(limit: float, name: str) -> Row:
    with numpy_worker() as worker, ping_pong() as once:
        remote, x = worker.function("limits_targets:nothing"), np.zeros(1, np.float32)
        return compare(name, limit, lambda: remote(x), once, 2000)


def empty_calls(options: argparse.Namespace) -> Iterator[Row]:
    if os.environ.get("GRADWIRE_LANE") == "zmq":
        yield empty_call(1.4, "empty call ÷ raw ping-pong, GRADWIRE_LANE=zmq")
        return
    yield empty_call(0.6, "empty call ÷ raw ping-pong")
    command = [sys.executable, __file__, "--only", "empty call", "--json", os.devnull, "--rows"]
    environment = {**os.environ, "GRADWIRE_LANE": "zmq"}
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    for raw in json.loads(said):
        yield Row(**{**raw, "sides": tuple(raw["sides"])})


def torch_rows(options: argparse.Namespace) -> Iterator[Row]:
    if not pathlib.Path(options.torch).exists():
        return
    direct = Direct(options.torch, "torch")
    with gw.connect() as bridge:
        worker = bridge.worker("torch", python=options.torch, path=[HERE], threads=1)
        net = worker.module("limits_targets:torch_mlp")
        yield beside("MLP forward, numpy caller ÷ direct", 1.2, lambda: net(X), direct, "forward", CALLS)
        if _has("torch"):
            yield beside(
                "MLP forward, torch caller ÷ direct", 1.2, _torch_caller(net), direct, "forward", CALLS
            )
        if _has("jax"):
            forward, both = _jax_caller(net)
            yield beside("MLP forward, jax.jit caller ÷ direct", 1.4, forward, direct, "forward", CALLS)
            yield beside("MLP jit(value_and_grad) ÷ direct", 1.5, both, direct, "both", CALLS)
    direct.close()


def _torch_caller(net: gw.Remote) -> Callable[[], object]:
    import torch

    torch.set_num_threads(1)
    x = torch.from_numpy(X.copy())

    def forward() -> object:
        with torch.no_grad():
            return net(x)

    return forward


def _jax_caller(net: gw.Remote) -> tuple[Callable[[], object], Callable[[], object]]:
    import jax

    x = jax.numpy.asarray(X)
    run, pull = jax.jit(net), jax.jit(jax.value_and_grad(lambda x: net(x).sum()))
    return lambda: run(x).block_until_ready(), lambda: jax.block_until_ready(pull(x))


def other_rows(options: argparse.Namespace) -> Iterator[Row]:
    """The same with JAX and TensorFlow workers: forward by numpy, forward and pullback by vjp."""
    for framework in ("jax", "tensorflow"):
        python = getattr(options, framework)
        if not pathlib.Path(python).exists():
            continue
        direct = Direct(python, framework)
        with gw.connect() as bridge:
            worker = bridge.worker(framework, python=python, path=[HERE], threads=1)
            remote = worker.function(f"limits_targets:{framework}_mlp")
            name = f"MLP forward, {framework} worker ÷ direct"
            yield beside(name, 1.3, lambda f=remote: f(X), direct, "forward", CALLS)
            if _has("jax"):
                _, both = _jax_caller(remote)
                name = f"MLP jit(value_and_grad), {framework} worker ÷ direct"
                yield beside(name, 1.3, both, direct, "both", CALLS // 2)
        direct.close()


def large_rows(options: argparse.Namespace) -> Iterator[Row]:
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[HERE], threads=1)
        other = bridge.worker("numpy", name="other", path=[HERE], threads=1)
        swap, x = worker.function("targets:swap_64_mib"), np.ones(MIB64, np.uint8)
        yield compare("64 MiB there and back ÷ two memcpys", 1.25, lambda: swap(x), _two_copies(x), 9)
        first, ones = worker.function("limits_targets:first"), other.function("limits_targets:ones")
        name = "one element of 64 MiB of another worker ÷ of 1 KiB"
        large, little = ones(MIB64), ones(1024)
        yield compare(name, 1.3, lambda: first(large), lambda: first(little), 300)
        large, little = bridge.empty((MIB64,), np.uint8), bridge.empty((1024,), np.uint8)
        large[...] = little[...] = 1
        name = "one element of 64 MiB of bridge.empty ÷ of 1 KiB"
        yield compare(name, 1.3, lambda: first(large), lambda: first(little), 300)

        leaves = worker.function("limits_targets:leaves")
        many, one = [np.ones(100, np.float32) for _ in range(200)], [np.ones(20_000, np.float32)]
        yield compare(
            "200 leaves ÷ one of as many bytes", 4.0, lambda: leaves(many), lambda: leaves(one), 200
        )
        nothing, small = worker.function("limits_targets:nothing"), np.zeros(1, np.float32)
        yield pipelined(nothing, small)
        yield idle(bridge, options.idle)
        yield from flat(worker, options.calls)


def _two_copies(x: np.ndarray) -> Callable[[], object]:
    there, back = np.empty_like(x), np.empty_like(x)

    def act() -> None:
        np.copyto(there, x)
        np.copyto(back, there)

    return act


def pipelined(remote: gw.Remote, x: np.ndarray) -> Row:
    def together() -> None:
        for future in [remote.submit(x) for _ in range(1000)]:
            future.result()

    def in_turn() -> None:
        for _ in range(1000):
            remote(x)

    return compare("1,000 submitted calls ÷ 1,000 in turn", 0.5, together, in_turn, 3)


def idle(bridge: gw.Bridge, seconds: float) -> Row:
    """Processor time of this process, its broker and its workers while nothing happens, scaled to a minute."""
    gc.collect()
    time.sleep(1.0)
    pids = [os.getpid(), *_descendants(os.getpid())]
    before = sum(map(_processor_s, pids))
    time.sleep(seconds)
    used = (sum(map(_processor_s, pids)) - before) * 60 / seconds
    return Row("processor time of an idle bridge over 60 s", 0.1, used, unit=" s")


def _processor_s(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> list[int]:
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [*children, *(p for child in children for p in _descendants(child))]


def flat(worker: gw.Worker, calls: int) -> Iterator[Row]:
    """What so many calls of each kind leave behind: descriptors, threads and mappings, and memory in MiB."""
    remote = worker.function("limits_targets:nothing")
    for nbytes in (4, 64 << 10, 1 << 20):
        x = np.zeros(nbytes // 4, np.float32)
        left = growth(lambda x=x: remote(x), worker, calls)
        for who, figures in left.items():
            name = f"{calls} calls of {nbytes} bytes, {who}"
            things = max(figures["descriptors"], figures["threads"], figures["mappings"] - 4)
            yield Row(f"{name}: descriptors, threads, mappings", 0, things, unit=" more")
            yield Row(f"{name}: memory", 4, figures["resident_kib"] / 1024, unit=" MiB more")


PAIR = """
import sys, threading, time
import numpy as np
sys.path.insert(0, sys.argv[1])
import gradwire as gw
with gw.connect() as bridge:
    remote = bridge.worker("numpy", path=[sys.argv[1]], threads=1).function("limits_targets:nothing")
    x = np.zeros(1, np.float32)
    for _ in range(500):
        remote(x)
    print("ready", flush=True)
    for line in sys.stdin:
        end, calls = time.perf_counter() + float(line), 0
        while time.perf_counter() < end:
            remote(x)
            calls += 1
        print(calls, flush=True)
"""


def pairs_row(options: argparse.Namespace) -> Iterator[Row]:
    """Four pairs of client and worker beside one pair. The figure is one pair's calls over all four's together."""
    pairs = [
        subprocess.Popen(
            [sys.executable, "-c", PAIR, str(HERE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for pair in pairs:
        assert pair.stdout is not None and pair.stdout.readline() == "ready\n"

    def calls_of(asked: list[Any]) -> int:
        for pair in asked:
            pair.stdin.write("1.0\n")
            pair.stdin.flush()
        return sum(int(pair.stdout.readline()) for pair in asked)

    rounds = [(calls_of(pairs[:1]), calls_of(pairs)) for _ in range(ROUNDS)]
    for pair in pairs:
        assert pair.stdin is not None and pair.stdout is not None
        pair.stdin.close()
        pair.wait(20)
        pair.stdout.close()
    ratio = statistics.median(alone / together for alone, together in rounds)
    yield Row("calls per second of one pair ÷ of four pairs together", 1.0, ratio)


def _has(framework: str) -> bool:
    return importlib.util.find_spec(framework) is not None


QUESTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "empty call": empty_calls,
    "torch worker": torch_rows,
    "other workers": other_rows,
    "large, many, submit, idle, flat": large_rows,
    "pairs": pairs_row,
}


def shown(row: Row) -> str:
    sides = f"{row.sides[0]:9.1f} ÷ {row.sides[1]:9.1f} µs" if row.sides else " " * 24
    verdict = "MISSED" if row.is_missed else "ok"
    return f"{row.name:62} {sides}  {row.value:7.2f}{row.unit} (limit {row.limit}) {verdict}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"questions that contain this: {', '.join(QUESTIONS)}")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("build/limits.json"))
    parser.add_argument("--rows", action="store_true", help="print the rows as JSON and nothing else")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds to be idle")
    parser.add_argument(
        "--calls", type=int, default=10_000, help="calls of each kind that must leave nothing"
    )
    for framework in ("torch", "jax", "tensorflow"):
        parser.add_argument(f"--{framework}", default=str(HERE.parent / f".envs/{framework}/bin/python"))
    return parser.parse_args()


def main() -> int:
    options = arguments()
    rows = []
    for name, ask in QUESTIONS.items():
        if options.only in name:
            for row in ask(options):
                rows.append(row)
                if not options.rows:
                    print(shown(row), flush=True)
    if options.rows:
        print(json.dumps([row._asdict() for row in rows]))
        return 0
    if options.json != pathlib.Path(os.devnull):
        options.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": machine(), "load": os.getloadavg()[0], "rows": [row._asdict() for row in rows]}
        options.json.write_text(json.dumps(found, indent=1))
    missed = [row.name for row in rows if row.is_missed]
    print(f"{len(rows) - len(missed)} of {len(rows)} limits are kept")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
