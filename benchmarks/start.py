"""What starting costs, as differences and ratios within one run; exits 1 where a limit is missed.

    python benchmarks/start.py [--json FILE] [--rounds N] [--only import | ready]

- `import gradwire` beside importing numpy, zmq and msgpack, each in a fresh interpreter, which measures it itself; and, as
  a bridge is imported when the first one is opened, both together (no limit: so that nothing is hidden there);
- `bridge.worker(…)` until it is ready, beside what its interpreter takes to import the framework and nothing else,
  for every environment under .envs.

Rounds of both sides alternate; the figure is the median of the rounds' ratios (or differences).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import gradwire as gw

ENVIRONMENTS = pathlib.Path(__file__).resolve().parents[1] / ".envs"
FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow")
IMPORTS = {"import gradwire": "gradwire", "import gradwire, first bridge": "gradwire, gradwire.bridge"}
MOST_IMPORT_RATIO = 1.3
MOST_READY_S = 0.2  # beyond the framework's import

TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def import_s(python: str, modules: str) -> float:
    """Seconds that a fresh interpreter takes to import them, without its own start and without compiling any."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [python, "-s", "-c", TIMED.format(modules)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def pairs(act: Callable[[], float], other: Callable[[], float], rounds: int) -> list[tuple[float, float]]:
    """Alternating measurements of both, after one of each that does not count (files come from the disk then)."""
    act(), other()
    return [(act(), other()) for _ in range(rounds)]


def importing(modules: str, rounds: int) -> dict[str, float]:
    """What they take beside gradwire's three dependencies."""
    found = pairs(
        lambda: import_s(sys.executable, modules),
        lambda: import_s(sys.executable, "numpy, zmq, msgpack"),
        rounds,
    )
    return {
        "gradwire_s": statistics.median(a for a, _ in found),
        "dependencies_s": statistics.median(b for _, b in found),
        "ratio": statistics.median(a / b for a, b in found),
    }


def ready(bridge: gw.Bridge, framework: str, python: str, rounds: int) -> dict[str, float]:
    """A worker's start beside its framework's import."""

    def start_s() -> float:
        begin = time.perf_counter()
        worker = bridge.worker(framework, python=python, threads=1, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
        elapsed = time.perf_counter() - begin
        worker.close()
        return elapsed

    found = pairs(start_s, lambda: import_s(python, framework), rounds)
    return {
        "ready_s": statistics.median(a for a, _ in found),
        "import_s": statistics.median(b for _, b in found),
        "more_s": statistics.median(a - b for a, b in found),
    }


def main() -> int:
    """Measure, print, compare with the limits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("import", "ready"))
    arguments = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    missed = []
    if arguments.only != "ready":
        for name, modules in IMPORTS.items():
            figures[name] = found = importing(modules, arguments.rounds)
            print(
                "{}: {gradwire_s:.3f} s, numpy + zmq + msgpack {dependencies_s:.3f} s: × {ratio:.2f}".format(
                    name, **found
                )
            )
        missed += ["import gradwire"] * (figures["import gradwire"]["ratio"] > MOST_IMPORT_RATIO)
    if arguments.only != "import":
        with gw.connect() as bridge:
            for framework in FRAMEWORKS:
                python = ENVIRONMENTS / framework / "bin" / "python"
                if framework != "numpy" and not python.exists():
                    continue
                where = sys.executable if framework == "numpy" else str(python)
                figures[framework] = found = ready(bridge, framework, where, arguments.rounds)
                print(
                    "{}: ready after {ready_s:.2f} s, its import takes {import_s:.2f} s: {more_s:+.2f} s".format(
                        framework, **found
                    )
                )
                missed += [framework] * (found["more_s"] > MOST_READY_S)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    for name in missed:
        print(f"missed: {name} (limits: × {MOST_IMPORT_RATIO}, {MOST_READY_S:+} s)")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
