"""``gradwire bench``: what the boundary costs on this machine, by its parts, for each framework that may call."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gradwire.benchmark import picture
from gradwire.benchmark.beside import piped
from gradwire.benchmark.plan import CALLERS, Plan, Work, default_works, parsed_shape, there
from gradwire.benchmark.report import machine, tables, why_not
from gradwire.commands.miswritten import Miswritten, count, positive
from gradwire_wire.errors import GradwireError, UsageError

__all__ = ["add_parser", "run"]

LIMIT_S = 900.0
FRAMEWORKS = ("torch", "jax", "tensorflow", "numpy")


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "bench",
        help="what a call costs on this machine, by its parts, and beside other ways",
        description="Measures calls from every framework installed here to a worker: of TARGET, or of an identity and a "
        "small perceptron. The time of a call is split into converting, copying, waking the worker, queueing, computing and "
        "returning; beside it stand the same function called in the worker itself, and pickle over a pipe.",
    )
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, help="of the worker (default: the first that is installed here)"
    )
    parser.add_argument("--python", metavar="P", help="the worker's interpreter (path or version)")
    parser.add_argument(
        "--threads", type=count, metavar="N", help="of the worker's framework (default: its share)"
    )
    parser.add_argument("--target", metavar="FILE:ATTR", help="what to call, also pkg.mod:attr")
    parser.add_argument(
        "--module", action="store_true", help="TARGET is a factory: make it, and call what it gives"
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="256x64[:float32]",
        help="of each argument of TARGET, in order",
    )
    parser.add_argument("--callers", metavar="A,B", help=f"only these of {', '.join(CALLERS)}")
    parser.add_argument("--seconds", type=positive, default=1.0, metavar="S", help="for each figure (1)")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write everything there as JSON; without FILE, or as -, to stdout, without the table",
    )
    parser.add_argument("--plot", metavar="PREFIX", help="write PREFIX.png and PREFIX.svg: time over size")


def run(arguments: argparse.Namespace) -> int:
    """Measure; print the table, write what was asked for."""
    if arguments.plot:
        picture.check()
    for place in filter(None, (arguments.plot, arguments.json)):
        if not Path(place).parent.is_dir():  # known now, and not after minutes of measuring
            raise UsageError(f"{place} cannot be written: there is no folder {Path(place).parent}")
    results = measured(_plan(arguments), _callers(arguments.callers))
    text = json.dumps(results, indent=1)
    if arguments.json and arguments.json != "-":
        Path(arguments.json).write_text(text + "\n")
    print(text if arguments.json == "-" else tables(results))
    if arguments.plot:
        for path in picture.draw(results, arguments.plot):
            print(path, file=sys.stderr)
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    framework = arguments.framework or _framework(arguments.python)
    if arguments.target:
        if not arguments.shape:
            raise Miswritten(
                "--target needs the shape of each of its arguments: --shape 256x64 --shape 10:int64"
            )
        inputs = tuple(map(_shape, arguments.shape))
        kind = "module" if arguments.module else "function"
        works: tuple[Work, ...] = (Work(arguments.target, arguments.target, kind, inputs),)
    elif arguments.shape or arguments.module:
        raise Miswritten("--shape and --module are about a --target")
    else:
        works = default_works(framework)
    return Plan(framework, arguments.python, arguments.threads, (os.getcwd(),), works, arguments.seconds)


def _shape(text: str) -> tuple[tuple[int, ...], str]:
    try:
        return parsed_shape(text)
    except UsageError as error:
        raise Miswritten(str(error)) from None


def _framework(python: str | None) -> str:
    if python is not None:
        raise Miswritten("--python needs --framework: which framework is to be measured in that environment?")
    installed = {CALLERS[caller] for caller in there()}
    return next(name for name in FRAMEWORKS if name in installed)


def _callers(chosen: str | None) -> list[str]:
    available = there()
    if chosen is None:
        return available
    wanted = [name.strip() for name in chosen.split(",")]
    for name in wanted:
        if name not in CALLERS:
            raise Miswritten(f"--callers {name}: there are {', '.join(CALLERS)}")
        if name not in available:
            raise UsageError(
                f"--callers {name}: {CALLERS[name]} is not installed in this environment ({sys.executable})"
            )
    return wanted


def measured(plan: Plan, callers: list[str]) -> dict[str, Any]:
    """Everything: each caller in a process of its own, one after the other. UsageError where none can be measured."""
    found = {}
    for caller in dict.fromkeys(
        ["numpy", *callers]
    ):  # it also tells what the worker is, and what it does by itself
        print(f"measuring: {caller} caller", file=sys.stderr, flush=True)
        figures = found[caller] = _by_process(caller, plan)
        if caller == "numpy" and "error" in figures:
            raise GradwireError(f"nothing can be measured: {why_not(figures)}")
    print("measuring: pickle over a pipe", file=sys.stderr, flush=True)
    first = found["numpy"]
    return {
        "machine": machine(),
        "worker": first["worker"],
        "works": [work.name for work in plan.works],
        "sizes": [str(n) for n in plan.sizes],
        "callers": {name: found[name] for name in callers},
        "direct": first["direct"],
        "pipe": piped(plan, first["worker"]["executable"]),
    }


def _by_process(caller: str, plan: Plan) -> dict[str, Any]:
    command = [sys.executable, "-m", "gradwire.benchmark.caller", caller]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(dataclasses.asdict(plan)),
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT_S:.0f} s"}
    try:
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures
    except (IndexError, json.JSONDecodeError):
        return {"error": f"its process ended with exit code {done.returncode}"}
