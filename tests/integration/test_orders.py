"""What a worker is asked to be, with real workers: names and variables."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import gradwire as gw

pytestmark = pytest.mark.integration


def test_what_cannot_be_had_is_a_usage_error_and_takes_no_name(shared_bridge: gw.Bridge) -> None:
    count = len(shared_bridge.workers())
    with pytest.raises(gw.UsageError, match="there are torch, tensorflow, jax, numpy"):
        shared_bridge.worker("mxnet")
    for _ in range(2):
        with pytest.raises(gw.UsageError, match="1 or more"):
            shared_bridge.worker("numpy", name="refused", threads=0)
    assert len(shared_bridge.workers()) == count


def test_a_name_is_given_once_also_to_threads_that_ask_at_once(shared_bridge: gw.Bridge) -> None:
    def ask(_: int) -> gw.Worker | str:
        try:
            return shared_bridge.worker("numpy", name="only")
        except gw.UsageError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(ask, range(3)))
        unnamed = list(pool.map(lambda _: shared_bridge.worker("numpy"), range(2)))
    refused = [answer for answer in answers if isinstance(answer, str)]
    assert refused == ["there is a worker 'only' already; give another name="] * 2
    assert len({worker.name for worker in unnamed}) == 2
    for worker in (*unnamed, *(answer for answer in answers if isinstance(answer, gw.Worker))):
        worker.close()


def test_none_removes_a_variable(shared_bridge: gw.Bridge, tmp_path: Path) -> None:
    (tmp_path / "variables.py").write_text("import os\ndef get(name):\n    return os.environ.get(name)\n")
    os.environ["GRADWIRE_TEST_LEFT"], os.environ["GRADWIRE_TEST_REMOVED"] = "left", "removed"
    try:
        env = {"GRADWIRE_TEST_REMOVED": None, "GRADWIRE_TEST_NUMBER": "3"}
        worker = shared_bridge.worker("numpy", name="variables", env=env, path=[tmp_path])
        get = worker.function("variables:get")
        names = ("GRADWIRE_TEST_LEFT", "GRADWIRE_TEST_REMOVED", "GRADWIRE_TEST_NUMBER")
        assert [get(name) for name in names] == ["left", None, "3"]
        worker.close()
    finally:
        del os.environ["GRADWIRE_TEST_LEFT"], os.environ["GRADWIRE_TEST_REMOVED"]
