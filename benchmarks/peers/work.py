"""What every peer is asked to do, and how it is timed. Python 3.11 and numpy only: it runs in every environment.

The work: an array of bytes there and back, for several sizes, and the MLP 64→128→32 at batch 256 in float32, in torch on
one thread, its forward and (where the peer differentiates) its value and gradient with respect to the input. Every peer
gets the same weights and must return the same numbers, or its run is void.
"""

from __future__ import annotations

import itertools
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SIZES = {"4 B": 4, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
BATCH, WIDTHS = 256, (64, 128, 32)
SECONDS, MOST, LEAST = 1.5, 2000, 7


def payload(nbytes: int) -> np.ndarray:
    return np.arange(nbytes // 4, dtype=np.float32)


def batch() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(BATCH, WIDTHS[0])).astype(np.float32)


def weights() -> list[np.ndarray]:
    """Kernel (out, in) and bias of each layer."""
    rng, made = np.random.default_rng(2), []
    for n, m in itertools.pairwise(WIDTHS):
        made += [(rng.normal(size=(m, n)) / n**0.5).astype(np.float32), np.zeros(m, np.float32)]
    return made


def torch_mlp() -> Any:
    """The model, on one thread."""
    import torch

    torch.set_num_threads(1)
    k1, b1, k2, b2 = weights()
    net = torch.nn.Sequential(
        torch.nn.Linear(*k1.shape[::-1]), torch.nn.ReLU(), torch.nn.Linear(*k2.shape[::-1])
    )
    with torch.no_grad():
        for p, x in zip(net.parameters(), (k1, b1, k2, b2), strict=True):
            p.copy_(torch.from_numpy(x))
    return net


def expected() -> np.ndarray:
    """The forward of `batch` by numpy."""
    k1, b1, k2, b2 = weights()
    return np.maximum(batch() @ k1.T + b1, 0) @ k2.T + b2


def expected_gradient() -> np.ndarray:
    """The gradient of ``(forward ** 2).sum()`` with respect to `batch`, by numpy."""
    k1, b1, k2, b2 = weights()
    hidden = batch() @ k1.T + b1
    bar = 2 * (np.maximum(hidden, 0) @ k2.T + b2)
    return ((bar @ k2) * (hidden > 0)) @ k1


def timed(act: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of one call: median, 95th percentile; after a warm-up of a tenth."""
    start = time.perf_counter()
    for _ in range(3):
        act()
    each = (time.perf_counter() - start) / 3
    calls = int(min(MOST, max(LEAST, SECONDS / max(each, 1e-6))))
    for _ in range(calls // 10):
        act()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    p50, p95 = np.percentile(times, [50, 95]) * 1e6
    return {"p50_us": round(float(p50), 1), "p95_us": round(float(p95), 1), "calls": calls}


def echoes(
    echo: Callable[[np.ndarray], Any], to_numpy: Callable[[Any], np.ndarray] = np.asarray
) -> dict[str, Any]:
    """``echo`` of every size, checked and timed."""
    rows = {}
    for name, nbytes in SIZES.items():
        x = payload(nbytes)
        assert to_numpy(echo(x)).tobytes() == x.tobytes(), f"{name}: what came back is not what was sent"
        rows[f"echo {name}"] = timed(lambda x=x: echo(x))  # type: ignore[misc]
    return rows


def forward(call: Callable[[], Any], to_numpy: Callable[[Any], np.ndarray] = np.asarray) -> dict[str, Any]:
    """The MLP's forward, checked and timed."""
    np.testing.assert_allclose(to_numpy(call()), expected(), rtol=1e-4, atol=1e-4)
    return {"MLP forward": timed(call)}


def gradient(call: Callable[[], Any], to_numpy: Callable[[Any], np.ndarray] = np.asarray) -> dict[str, Any]:
    """The MLP's value and gradient, checked and timed. ``call`` returns the gradient."""
    np.testing.assert_allclose(to_numpy(call()), expected_gradient(), rtol=1e-3, atol=1e-3)
    return {"MLP value and gradient": timed(call)}


def report(rows: dict[str, Any], *packages: str) -> None:
    """The run as a line of JSON: the last line of stdout."""
    from importlib.metadata import version

    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    print(json.dumps({"versions": versions, "rows": rows}))
