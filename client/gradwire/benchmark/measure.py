"""The target called directly, in the worker's own process; and a server that calls it for whoever is at a pipe's other end.

Runs in the worker's environment: Python 3.9 and numpy, beside the framework. As a script::

    python measure.py DESCRIPTOR FRAMEWORK TARGET KIND    (KIND: function, or module)
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from typing import Any, Callable, Sequence

import numpy as np

LEAST, MOST = 7, 5000
_SCALARS = (type(None), bool, int, float, complex, str, bytes)


def percentiles_us(act: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Microseconds of one call: p50, p95, p99, and how many were made in about so many seconds; after a warm-up."""
    start = time.perf_counter()
    for _ in range(3):
        act()
    each = max((time.perf_counter() - start) / 3, 1e-7)
    calls = int(min(MOST, max(LEAST, seconds / each)))
    for _ in range(calls // 10):
        act()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    p50, p95, p99 = (float(x) * 1e6 for x in np.percentile(times, [50, 95, 99]))
    return {"p50_us": p50, "p95_us": p95, "p99_us": p99, "calls": float(calls)}


def direct(
    framework: str, target: str, kind: str, inputs: Sequence[Sequence[Any]], seconds: float
) -> dict[str, float]:
    """`percentiles_us` of the target, called where it is. inputs: [shape, dtype] of each argument."""
    own = _framework(framework)
    call, operands = own.compiled(found(target, kind)), own.tensors(arrays(inputs))
    return percentiles_us(lambda: call(*operands), seconds)


def arrays(inputs: Sequence[Sequence[Any]]) -> list[np.ndarray]:
    """Numbers to call with: the same for everybody."""
    rng = np.random.default_rng(1)
    return [(rng.random(shape) * 2).astype(dtype) for shape, dtype in inputs]


def found(target: str, kind: str) -> Callable[..., Any]:
    """What a target names, made if it is a module's factory."""
    place, _, attribute = target.rpartition(":")
    thing: Any = _from_file(place) if place.endswith(".py") else importlib.import_module(place)
    for name in attribute.split("."):
        thing = getattr(thing, name)
    return thing() if kind == "module" and (isinstance(thing, type) or hasattr(thing, "__code__")) else thing


def _framework(name: str) -> Any:
    return _from_file(os.path.join(os.path.dirname(os.path.abspath(__file__)), "far_end", f"{name}.py"))


def _from_file(path: str) -> Any:
    name = "gradwire_bench_" + os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(descriptor: int, framework: str, target: str, kind: str) -> None:
    """Answer arrays with arrays until the other end is closed. What comes is pickled, by our own parent."""
    from multiprocessing.connection import Connection

    end: Any = Connection(descriptor)
    own = _framework(framework)  # before the user's folder is looked at: a torch.py in it is not torch
    sys.path.insert(0, os.getcwd())
    call = own.compiled(found(target, kind))
    end.send("ready")
    while True:
        try:
            operands = end.recv()
        except EOFError:
            return
        end.send(_plain(call(*own.tensors(operands)), own.to_array))


def _plain(result: Any, to_array: Callable[[Any], np.ndarray]) -> Any:
    """A result tree in arrays and Python's own types, which both ends can unpickle."""
    if isinstance(result, dict):
        return {key: _plain(x, to_array) for key, x in result.items()}
    if isinstance(result, (tuple, list)):
        return [_plain(x, to_array) for x in result]
    return result if isinstance(result, _SCALARS) else to_array(result)


if __name__ == "__main__":
    del sys.path[0]  # the modules in this folder are nobody's but ours
    serve(int(sys.argv[1]), *sys.argv[2:5])
