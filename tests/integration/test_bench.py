"""`gradwire bench` as a user runs it, with a numpy worker and little time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.benchmark.report import machine, tables

pytestmark = pytest.mark.integration


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "gradwire",
        "bench",
        "--framework",
        "numpy",
        "--seconds",
        "0.02",
        *arguments,
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)


def test_a_target_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def total(x, n):\n    return (x * n).sum(axis=1).astype("float32")\n')
    shapes = ["--shape", "8x4", "--shape", ":int32"]
    done = bench(
        tmp_path, "--target", "mine.py:total", *shapes, "--callers", "numpy,jax.jit", "--json", "b.json"
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "b.json").read_text())
    assert results["works"] == ["mine.py:total"] and set(results["callers"]) == {"numpy", "jax.jit"}
    for caller, figures in results["callers"].items():
        assert "error" not in figures, figures
        work = figures["works"]["mine.py:total"]
        assert 0 < work["p50_us"] <= work["p95_us"] <= work["p99_us"], caller
        parts = work["parts_us"]
        assert list(parts) == ["convert", "copy", "wake", "queue", "compute", "return"]
        assert min(parts.values()) >= 0 and parts["compute"] > 0, caller
        assert list(figures["sizes"]) == results["sizes"]
    assert results["direct"]["mine.py:total"]["p50_us"] > 0
    assert results["pipe"]["works"]["mine.py:total"]["p50_us"] > 0 and "error" not in results["pipe"]
    assert results["machine"]["processors"] >= 1 and results["machine"]["packages"]["numpy"]
    assert "jax.jit caller" in done.stdout and "pickle over a pipe" in done.stdout


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_r62_it_ends_at_once_and_with_all_it_started(tmp_path: Path, number: signal.Signals) -> None:
    mark = f"GRADWIRE_BENCH_TEST={uuid.uuid4().hex}"
    command = [sys.executable, "-m", "gradwire", "bench", "--framework", "numpy", "--callers", "numpy"]
    one = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **dict([mark.split("=")])},
    )
    until(lambda: len(marked(mark)) == 4)  # itself, the caller that measures, its broker and its worker
    (os.killpg if number == signal.SIGINT else os.kill)(one.pid, number)
    said = one.communicate(timeout=60)[1]
    assert one.returncode == (130 if number == signal.SIGINT else -number) and "Traceback" not in said
    until(lambda: not marked(mark))


def marked(mark: str) -> list[str]:
    """The processes that have this in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder.name)
    return found


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_target_that_is_not_there_is_a_sentence_and_one_that_fails_has_its_traceback(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text("def fails(x):\n    raise ValueError('bad 42')\n")
    for target, says in (("mine.py:nobody", "mine.py has no 'nobody'"), ("mine.py:fails", "bad 42")):
        done = bench(tmp_path, "--target", target, "--shape", "3")
        assert done.returncode == 1 and says in done.stderr and not done.stdout, done.stderr
        sentence, _, traceback = done.stderr.partition("\n\n")
        assert says in sentence and "Traceback" not in sentence, done.stderr
        if target == "mine.py:fails":
            assert traceback.startswith("Traceback") and 'mine.py", line 2, in fails' in traceback, (
                done.stderr
            )
            assert "gradwire" not in traceback, "of the target's own frames only"
        else:
            assert not traceback, done.stderr


def test_a_caller_that_the_target_fails_is_told_of_below_the_tables() -> None:
    """With its remote traceback, beside those that were measured."""
    figures = {"worker": {}, "works": {}, "sizes": {}, "direct": {}}
    failed = {
        "error": "RemoteValueError: bad 42",
        "traceback": "Traceback (most recent call last):\n  in fails\n",
    }
    results = {"machine": machine(), "worker": {}, "works": [], "sizes": [], "direct": {}, "pipe": {}}
    said = tables({**results, "callers": {"numpy": figures, "jax": failed}})
    assert (
        "Not measured:\n  jax: RemoteValueError: bad 42\n\n  Traceback (most recent call last):\n    in fails"
        in said
    )
