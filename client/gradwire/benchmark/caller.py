"""One caller family, measured in a process of its own: frameworks do not always get along in one.

    python -m gradwire.benchmark.caller CALLER < plan.json

The last line of stdout is the figures as JSON, or ``{"error": a sentence, "traceback": the target's, if it raised}``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import gradwire as gw
from gradwire.benchmark.measure import arrays, percentiles_us
from gradwire.benchmark.plan import MEASURE, Plan, Work, identity_of
from gradwire.families import is_leaf
from gradwire.notes import FaceCall, Recorded
from gradwire.recording import Recording
from gradwire.trace_events import parts_of
from gradwire_wire import process
from gradwire_wire.structures import fill, flatten

__all__ = ["main", "measured"]

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
TRACED_CALLS = 300
PARTS = ("convert", "copy", "wake", "queue", "compute", "return")


def _converters() -> dict[str, Callable[[Any], Any]]:
    return {
        "numpy": lambda x: x,
        "torch": gw.to_torch,
        "jax": gw.to_jax,
        "jax.jit": gw.to_jax,
        "tensorflow": gw.to_tf,
    }


def call_of(caller: str, remote: gw.Remote, operands: Sequence[np.ndarray]) -> Callable[[], Any]:
    """A call as this caller makes it; it returns when the result is there."""
    xs = [_converters()[caller](x) for x in operands]
    if not caller.startswith("jax"):
        return lambda: remote(*xs)
    jax = sys.modules["jax"]  # `to_jax` has loaded it
    if caller == "jax":
        return lambda: jax.block_until_ready(remote(*xs))
    known = remote.options(out_spec=_spec_of(remote(*operands)))
    program = jax.jit(known)
    return lambda: jax.block_until_ready(program(*xs))


def _spec_of(result: Any) -> Any:
    """The result tree with shapes and dtypes: a numpy function does not tell them without running."""
    structure, leaves = flatten(result, is_leaf)
    return fill(structure, [gw.ShapeDtype(tuple(x.shape), x.dtype.name) for x in leaves])


def measured(caller: str, plan: Plan) -> dict[str, Any]:
    """The figures of one caller."""
    with gw.connect() as bridge:
        worker = bridge.worker(
            plan.framework, python=plan.python, threads=plan.threads, path=list(plan.path), env=QUIET
        )
        works = {work.name: _work(bridge, worker, caller, work, plan.seconds) for work in plan.works}
        sizes = dict(_sizes(worker, caller, plan))
        direct = {work.name: _direct(worker, plan, work) for work in plan.works} if caller == "numpy" else {}
        return {"worker": worker.info, "works": works, "sizes": sizes, "direct": direct}


def _load(worker: gw.Worker, work: Work) -> gw.Remote:
    return worker.module(work.target) if work.kind == "module" else worker.function(work.target)


def _work(bridge: gw.Bridge, worker: gw.Worker, caller: str, work: Work, seconds: float) -> dict[str, Any]:
    call = call_of(caller, _load(worker, work), arrays(work.inputs))
    figures: dict[str, Any] = percentiles_us(call, seconds)
    return {**figures, **_parts(bridge, call)}


def _parts(bridge: gw.Bridge, call: Callable[[], Any]) -> dict[str, Any]:
    """Medians of what a call's time is spent on, and how the calls went, from a recording of some."""
    recording = Recording(bridge)
    recording.start()
    spans: list[FaceCall] = []
    try:
        for _ in range(TRACED_CALLS):
            span = FaceCall()
            call()
            span.left = time.monotonic_ns()
            spans.append(span)
    finally:
        recorded = recording.stop()
    found = list(_split(recorded, spans))
    if not found:
        return {"parts_us": {}, "by": ""}
    parts = {name: statistics.median(p[name] for p in found) / 1e3 for name in PARTS}
    last = recorded.messages[-1]
    return {"parts_us": parts, "by": last.by, "sent_as": last.sent_as}


def _split(recorded: Recorded, spans: Sequence[FaceCall]) -> Iterator[dict[str, int]]:
    """The parts of each span that is one message."""
    notes = iter(recorded.messages)
    noted = next(notes, None)
    for span in spans:
        inside = []
        while noted is not None and noted.began < span.left:
            if noted.began >= span.entered:
                inside.append(noted)
            noted = next(notes, None)
        if len(inside) == 1:
            far = recorded.far.get(inside[0].incarnation, {}).get(inside[0].call_id)
            parts = parts_of(inside[0], far, span)
            if parts is not None:
                yield parts


def _sizes(worker: gw.Worker, caller: str, plan: Plan) -> Iterator[tuple[str, dict[str, float]]]:
    for nbytes in plan.sizes:
        work = identity_of(plan.framework, nbytes)
        call = call_of(caller, _load(worker, work), arrays(work.inputs))
        yield str(nbytes), percentiles_us(call, plan.seconds / 3)


def _direct(worker: gw.Worker, plan: Plan, work: Work) -> dict[str, float]:
    """The target called in the worker, by nobody from outside."""
    measure = worker.function(f"{MEASURE}:direct")
    if plan.framework != "numpy":
        measure = measure.options(compile=False)
    inputs = [[list(shape), dtype] for shape, dtype in work.inputs]
    figures: dict[str, float] = measure(plan.framework, work.target, work.kind, inputs, plan.seconds)
    return figures


def main() -> int:
    """Measure the caller that is named, by the plan on stdin. It ends with who asked for it, and says nothing then."""
    process.die_with_parent()
    plan = Plan.of(json.load(sys.stdin))
    try:
        figures = measured(sys.argv[1], plan)
    except Exception as error:  # whatever it is, it is this caller's answer
        figures = {"error": _sentence(error), "traceback": getattr(error, "traceback", "")}
    except KeyboardInterrupt:  # of the whole group, whose first process says so
        return 130
    print(json.dumps(figures))
    return 0


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


if __name__ == "__main__":
    sys.exit(main())
