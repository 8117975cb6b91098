"""R30 and R36: remote calls inside compiled JAX programs, on few cores, from threads, and when they fail."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

import gradwire as gw

TARGETS = pathlib.Path(__file__).parent / "targets"

PROGRAM = textwrap.dedent(
    """
    import os, sys, threading
    if {cores} == 1:
        os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
    import jax, jax.numpy as jnp, numpy as np, gradwire as gw
    with gw.connect() as bridge:
        double = bridge.worker("numpy", path=[{targets!r}], threads=1).function("in_numpy:double")
        once = jax.jit(lambda x: double(x + 1) * 3)  # work on both sides of the call, and little
        for n in (10, 100_000, 10_000_000):
            x = jnp.linspace(0.0, 1.0, n)
            for _ in range(3 if n > 1e6 else 200):
                y = once(x)
            np.testing.assert_allclose(y, (np.asarray(x) + 1) * 6, rtol=1e-6)
        x = jnp.linspace(0.0, 1.0, 1000)
        scan = jax.jit(lambda x: jax.lax.scan(lambda c, _: (double(c) / 2, c.sum()), x, None, length=200))
        np.testing.assert_allclose(scan(x)[0], x, rtol=1e-5)
        loop = jax.jit(lambda x: jax.lax.while_loop(lambda s: s[0] < 200, lambda s: (s[0] + 1, double(s[1]) / 2), (0, x)))
        np.testing.assert_allclose(loop(x)[1], x, rtol=1e-5)
        grad = jax.jit(jax.grad(lambda x: (double(x) ** 2).sum()))
        wrong = []
        def many(k):
            for i in range(200):
                x = jnp.full(2000, float(k * 1000 + i))
                if not np.allclose(grad(x), 8 * np.asarray(x)):
                    wrong.append((k, i))
        threads = [threading.Thread(target=many, args=(k,)) for k in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not wrong, wrong[:3]
    print("done")
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_r30_no_deadlock_in_callbacks(cores: int, xla_way: str) -> None:
    program = PROGRAM.format(cores=cores, targets=str(TARGETS))
    run = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=110
    )
    assert run.returncode == 0 and run.stdout.strip() == "done", run.stderr[-3000:]


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow", "numpy"])
def test_r36_errors_under_jit(
    worker_of: Callable[[str], gw.Worker], shared_bridge: gw.Bridge, framework: str, xla_way: str
) -> None:
    import jax

    bad = worker_of(framework).function("any_framework:bad").options(out_spec=gw.ShapeDtype((3,), "float32"))
    good = (
        worker_of(framework).function("any_framework:double").options(out_spec=gw.ShapeDtype((3,), "float32"))
    )
    x = jax.numpy.ones(3)
    for attempt in range(2):
        with pytest.raises(ValueError, match="bad 42"):
            bad(x)
        with pytest.raises(Exception, match="bad 42") as caught:
            jax.jit(bad)(x).block_until_ready()
        assert "any_framework.py" in str(caught.value), attempt
        last = shared_bridge.last_error()
        assert isinstance(last, gw.RemoteError) and "any_framework.py" in last.traceback
        assert (jax.jit(good)(x) == 2).all()
