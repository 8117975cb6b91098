"""R04: workers share the processors; a pool's size follows the number of workers until its worker is used, then it stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw

pytestmark = pytest.mark.integration

TARGETS = """
def torch_pool():
    import torch
    return torch.get_num_threads()

def tensorflow_pool():
    import tensorflow as tf
    tf.matmul(tf.ones((300, 300)), tf.ones((300, 300)))
    return tf.config.threading.get_intra_op_parallelism_threads()

def jax_pool():
    import os, jax
    jax.jit(lambda x: x @ x)(jax.numpy.ones((300, 300))).block_until_ready()
    return int(os.environ["NPROC"])

def numpy_pool():
    import numpy as np
    from gradwire_workers.numpy import blas
    np.ones((300, 300)) @ np.ones((300, 300))
    return blas.size()

def double(x):
    return x + x
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    (folder / "pools.py").write_text(TARGETS)
    return folder


@pytest.fixture
def bridge() -> Iterator[gw.Bridge]:
    with gw.connect() as bridge:
        yield bridge


@pytest.fixture
def two_cores() -> Iterator[int]:
    """This thread may use two; the broker and the workers that are started meanwhile inherit that."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("this machine has one processor: there is nothing to share")
    os.sched_setaffinity(0, sorted(before)[:2])
    yield 2
    os.sched_setaffinity(0, before)


def until(condition: Callable[[], bool]) -> None:
    """A worker that is idle changes its pool at once, and says so then."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


FRAMEWORKS = ("torch", "tensorflow", "jax", "numpy")


def test_r04_three_workers_on_two_cores(two_cores: int, bridge: gw.Bridge, folder: Path) -> None:
    """As a program has them: started one after the other, then used. The first ones, too, have their third."""
    workers = []
    for n in range(1, 4):
        workers.append(bridge.worker("numpy", path=[folder]))
        share = max(1, two_cores // n)
        until(lambda share=share: [worker.info["threads"] for worker in workers] == [share] * len(workers))
    assert [worker.function("pools:numpy_pool")() for worker in workers] == [1, 1, 1]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_r04_every_framework_follows_until_it_is_used(
    two_cores: int, bridge: gw.Bridge, folder: Path, framework: str, request: pytest.FixtureRequest
) -> None:
    python: Any = None if framework == "numpy" else request.getfixturevalue(f"{framework}_python")
    first = bridge.worker(framework, python=python, path=[folder])
    assert first.info["threads"] == 2
    second = bridge.worker("numpy")
    until(lambda: (first.info["threads"], second.info["threads"]) == (1, 1))
    double = first.function("pools:double").options(compile=False)
    np.testing.assert_array_equal(double(np.ones(3, np.float32)), 2 * np.ones(3))
    assert first.function(f"pools:{framework}_pool").options(compile=False)() == 1
    second.close()
    bridge.worker("numpy", name="another").close()
    assert first.info["threads"] == 1
    assert first.function(f"pools:{framework}_pool").options(compile=False)() == 1


def test_r04_a_pool_in_use_keeps_its_size(two_cores: int, bridge: gw.Bridge, folder: Path) -> None:
    """Another size would change the last bits of its sums from one call to the next."""
    first = bridge.worker("numpy", path=[folder])
    pool = first.function("pools:numpy_pool")
    assert pool() == 2
    second, third = bridge.worker("numpy"), bridge.worker("numpy")
    assert [worker.info["threads"] for worker in (first, second, third)] == [2, 1, 1]
    assert pool() == 2


@pytest.mark.parametrize("chosen", [{"threads": 2}, {"env": {"OPENBLAS_NUM_THREADS": "2"}}])
def test_r04_what_the_user_chose_stays(
    two_cores: int, bridge: gw.Bridge, folder: Path, chosen: dict[str, Any]
) -> None:
    first = bridge.worker("numpy", path=[folder], **chosen)
    bridge.worker("numpy")
    assert first.function("pools:numpy_pool")() == 2
    assert first.info["threads"] == 2
