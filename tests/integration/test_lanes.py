"""Calls by lane and by ZeroMQ give the same; frames too long for a lane's packet find their way."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import gradwire as gw
from gradwire import inquiry
from gradwire.lines import lanes_wanted, pages_wanted
from gradwire_wire.lane import MAX_PACKET

TARGETS = pathlib.Path(__file__).parent / "targets"


@pytest.fixture(scope="module", params=["page", "socket", "zmq"])
def worker(request: pytest.FixtureRequest) -> Iterator[gw.Worker]:
    with pytest.MonkeyPatch.context() as patch, gw.connect() as bridge:
        patch.setenv("GRADWIRE_LANE", request.param)
        assert lanes_wanted() is (request.param != "zmq") and pages_wanted() <= (request.param == "page")
        yield bridge.worker("numpy", path=[TARGETS])


@pytest.mark.parametrize("count", [1, 10, 200])
def test_many_small_tensors(worker: gw.Worker, count: int) -> None:
    """A reply or a call of 200 tensors of 4,000 bytes is longer than a packet."""
    assert MAX_PACKET < 200 * 4000
    x = np.arange(1000, dtype=np.float32)
    many, total = worker.function("any_framework:many"), worker.function("any_framework:total")
    for _ in range(3):
        results = many(x, count)
        for i, y in enumerate(results):
            np.testing.assert_array_equal(y, x + i)
        np.testing.assert_array_equal(total(results), sum(results))


def test_an_error_longer_than_a_packet(worker: gw.Worker) -> None:
    with pytest.raises(KeyError) as caught:
        worker.function("in_numpy:fail_at_length")("x" * 100_000)
    assert "x" * 90_000 in str(caught.value)


def test_a_late_reply_is_nobodys(worker: gw.Worker) -> None:
    many, nap = worker.function("any_framework:many"), worker.function("in_numpy:nap_in_c")
    late = 0
    for i in range(
        30
    ):  # where this process was held up the reply may be there before the deadline is looked at
        try:
            nap.options(timeout=0.05)(0.3)
        except gw.DeadlineError:
            late += 1
        x = np.full(50_000, i, np.float32)
        for j, y in enumerate(many(x, 3)):
            np.testing.assert_array_equal(y, x + j)
        if late == 3:
            return
    pytest.fail("no call was late")


def test_a_call_that_was_lost_ends_with_an_error(worker: gw.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no call that takes long is taken for one, though its worker is asked again and again."""
    monkeypatch.setattr(inquiry, "AFTER", 1)
    monkeypatch.setattr(inquiry, "ENOUGH", 3)
    double, nap = worker.function("any_framework:double"), worker.function("in_numpy:nap_in_c")
    for n in (3, 50_000):
        for _ in range(n % 3 + 3):  # (long ones first, then planned and short ones)
            double(np.ones(n))
        worker.function("in_numpy:lose_the_next_call")()
        with pytest.raises(gw.ProtocolError, match="lost on its way"):
            double(np.ones(n))
        np.testing.assert_array_equal(double(np.ones(n)), np.full(n, 2.0))
    with ThreadPoolExecutor(2) as threads:
        for _ in threads.map(nap, [0.25] * 4):
            np.testing.assert_array_equal(double(np.ones(3)), np.full(3, 2.0))


def test_no_line_is_lost(worker: gw.Worker) -> None:
    """Abandoned lines come back: their number does not grow."""
    nap, files = worker.function("in_numpy:nap_in_c"), worker.function("in_numpy:count_open_files")
    before, abandoned = None, 0
    while (
        abandoned < 5
    ):  # where this process was held up the reply may be there before the deadline is looked at
        try:
            nap.options(timeout=0.05)(0.15)
        except gw.DeadlineError:
            abandoned += 1
        files()
        before = before or files()
    assert files() <= before + 1
