"""`Bridge.trace`: what the file says happened, happened, and without a trace nothing is different."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire import recording
from gradwire.connection import Connection
from tests.doubles.patience import soon

pytestmark = pytest.mark.integration

TARGETS = """
import os, signal, time
import numpy as np
def double(x): return x * 2
def slow(x): time.sleep(0.05); return x
def fail(x): raise ValueError("bad 42")
def until(begun, over):
    open(begun, "w").close()
    while not os.path.exists(over): time.sleep(0.01)
def die(x): os.kill(os.getpid(), signal.SIGKILL)
def square(x): return x * x
square.vjp = lambda x: (x * x, lambda out_bar: (2 * x * out_bar,))
def counter():
    count = 0
    def step(x):
        nonlocal count
        count += 1
        return x * 0 + count
    return step
def recorders():
    import gc
    from gradwire_workers.desk import Desk
    (desk,) = [x for x in gc.get_objects() if isinstance(x, Desk)]
    told = desk.recorder, desk.answers.recorder, desk.users_code.interrupts.recorder
    return [None if x is None else type(x).__name__ for x in told]
"""
X = np.arange(6, dtype=np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    (folder / "traced.py").write_text(TARGETS)
    return folder


@pytest.fixture(scope="module")
def bridge() -> Iterator[gw.Bridge]:
    with gw.connect() as bridge:
        yield bridge


@pytest.fixture(scope="module")
def worker(bridge: gw.Bridge, folder: Path) -> gw.Worker:
    return bridge.worker("numpy", path=[folder])


@pytest.fixture(scope="module")
def other(bridge: gw.Bridge, folder: Path) -> gw.Worker:
    return bridge.worker("numpy", path=[folder], name="other")


class File:
    """A trace that was written, checked for what every trace must be."""

    def __init__(self, path: Path) -> None:
        self.document = json.loads(path.read_text())
        self.events: list[dict[str, Any]] = self.document["traceEvents"]
        self.spans = [e for e in self.events if e["ph"] == "X"]
        check_structure(self.events)
        check_nesting(self.spans)
        check_arrows(self.events, self.spans)

    def named(self, name: str, pid: int | None = None) -> list[dict[str, Any]]:
        found = [e for e in self.spans if e["name"] == name and pid in (None, e["pid"])]
        return sorted(found, key=lambda e: e["ts"])

    @property
    def processes(self) -> dict[str, int]:
        return {e["args"]["name"]: e["pid"] for e in self.events if e["name"] == "process_name"}


def check_structure(events: list[dict[str, Any]]) -> None:
    """As the Trace Event Format demands of the phases in use."""
    for event in events:
        assert isinstance(event["name"], str) and type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
            continue
        assert event["ph"] in "Xbesf" and event["ts"] >= 0 and event["cat"]
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ph"] == "X" or "id" in event
    opened = [(e["cat"], e["id"], e["name"]) for e in events if e["ph"] == "b"]
    assert sorted(opened) == sorted((e["cat"], e["id"], e["name"]) for e in events if e["ph"] == "e")
    assert len(set(opened)) == len(opened)


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """Spans of a thread lie within each other or apart."""
    by_thread = defaultdict(list)
    for span in spans:
        by_thread[span["pid"], span["tid"]].append(span)
    for of_thread in by_thread.values():
        open_until: list[float] = []
        for span in sorted(of_thread, key=lambda e: (e["ts"], -e["dur"])):
            begin, end = span["ts"], span["ts"] + span["dur"]
            while open_until and open_until[-1] <= begin + 0.001:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.001, span
            open_until.append(end)


def check_arrows(events: list[dict[str, Any]], spans: list[dict[str, Any]]) -> None:
    """An arrow's two ends have its number, lie on spans, and time does not run backwards along it."""
    ends: dict[int, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = event
    for number, both in ends.items():
        assert set(both) == {"s", "f"} and both["f"]["bp"] == "e", number
        assert both["s"]["ts"] <= both["f"]["ts"], number
        for event in both.values():
            assert any(
                (s["pid"], s["tid"]) == (event["pid"], event["tid"])
                and s["ts"] <= event["ts"] + 0.001
                and event["ts"] <= s["ts"] + s["dur"] + 0.001
                for s in spans
            ), event


@pytest.fixture
def traced(bridge: gw.Bridge, tmp_path: Path) -> Callable[..., File]:
    def traced(act: Callable[[], object], **options: Any) -> File:
        with bridge.trace(tmp_path / "t.json", **options):
            act()
        return File(tmp_path / "t.json")

    return traced


def test_the_checks_of_a_trace_can_fail() -> None:
    span = {"ph": "X", "name": "a", "cat": "c", "pid": 1, "tid": 1, "ts": 0.0, "dur": 2.0}
    with pytest.raises(AssertionError):
        check_structure([{**span, "dur": -1.0}])
    with pytest.raises(AssertionError):
        check_nesting([span, {**span, "ts": 1.0, "dur": 2.0}])
    with pytest.raises(AssertionError):
        check_arrows([{**span, "ph": "s", "id": 1}], [span])


def test_a_call_is_spans_of_both_processes(worker: gw.Worker, traced: Any) -> None:
    f = worker.function("traced.py:double")
    file = traced(lambda: [f(X) for _ in range(3)])
    here, there = os.getpid(), worker.pid
    assert file.processes == {"caller": here, "worker numpy": there}
    for name in ("lend", "send", "wait", "take"):
        assert len(file.named(name, here)) == 3, name
    for name in ("take", "compute", "reply"):
        assert len(file.named(name, there)) == 3, name
    assert len(file.named("numpy/traced.py:double", there)) == 3
    ways = [e["name"] for e in file.events if e["ph"] == "b"]
    assert sorted(ways) == ["to caller"] * 3 + ["to worker"] * 3
    invoked = file.named("invoke")[0]["args"]
    assert (invoked["bytes there"], invoked["bytes back"]) == (X.nbytes, X.nbytes)
    assert invoked["function"] == "the function" and invoked["by"] in ("page", "lane", "ZeroMQ")


def test_a_call_s_steps_follow_each_other_across_the_processes(worker: gw.Worker, traced: Any) -> None:
    f = worker.function("traced.py:slow")
    file = traced(lambda: f(X))
    here, there = os.getpid(), worker.pid
    steps = [
        *(file.named(name, here)[0] for name in ("lend", "send")),
        *(file.named(name, there)[0] for name in ("take", "compute", "reply")),
        file.named("take", here)[0],
    ]
    begins = [step["ts"] for step in steps]
    assert begins == sorted(begins)
    (compute,) = file.named("compute", there)
    (wait,) = file.named("wait", here)
    assert compute["dur"] >= 50_000
    assert compute["ts"] + compute["dur"] <= wait["ts"] + wait["dur"]


def test_the_parts_of_a_call_are_all_of_it(bridge: gw.Bridge, worker: gw.Worker) -> None:
    from gradwire.trace_events import parts_of

    f = worker.function("traced.py:slow")
    f(X)
    recorded = recording.Recording(bridge)
    recorded.start()
    begun = time.monotonic_ns()
    f(X)
    elapsed = time.monotonic_ns() - begun
    found = recorded.stop()
    (noted,) = found.messages
    assert noted.invocation is not None and noted.invocation.face is not None
    face = noted.invocation.face
    parts = parts_of(noted, found.far[noted.incarnation][noted.call_id], face)
    assert parts is not None and min(parts.values()) >= 0
    assert sum(parts.values()) == face.left - face.entered <= elapsed
    assert parts["compute"] >= 50e6


def test_two_threads_and_two_workers(worker: gw.Worker, other: gw.Worker, traced: Any) -> None:
    fs = [w.function("traced.py:slow") for w in (worker, other)]
    together = threading.Barrier(4, timeout=30)

    def act() -> None:
        def calls(f: gw.Remote) -> None:
            together.wait()
            for _ in range(3):
                f(X)

        threads = [threading.Thread(target=calls, args=(f,), name=f"t{i}") for i, f in enumerate(fs * 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    file = traced(act)
    waits = file.named("wait", os.getpid())
    assert len(waits) == 12 and len({w["tid"] for w in waits}) == 4
    for pid in (worker.pid, other.pid):
        computed = file.named("compute", pid)
        assert len(computed) == 6
        for before, after in itertools.pairwise(computed):  # one thread: never two at once
            assert before["ts"] + before["dur"] <= after["ts"]


def test_derivatives_are_named(worker: gw.Worker, traced: Any) -> None:
    f = worker.function("traced.py:square")

    def act() -> None:
        y, pullback = f.vjp(X)
        pullback(y)

    said = [
        e["args"] for e in traced(act).spans if "function" in e.get("args", {}) and e["pid"] == os.getpid()
    ]
    assert [a["function"] for a in said] == ["the function", "pullback of the function"]
    assert said[0]["keeps"] and said[1]["token"] > 0


def test_of_a_backward_only_what_is_sent_is_looked_at(worker: gw.Worker, traced: Any) -> None:
    torch = pytest.importorskip("torch")
    f, x = worker.function("traced.py:square"), torch.ones(8, requires_grad=True)
    said = [
        e["args"] for e in traced(lambda: f(x).sum().backward()).spans if "bytes there" in e.get("args", {})
    ]
    assert [(a["function"], a["bytes there"]) for a in said] == [
        ("the function", 32),
        ("pullback of the function", 32),  # the cotangent; the primal is kept there
    ]
    assert torch.equal(x.grad, 2 * x.detach())


def test_from_a_compiled_program(worker: gw.Worker, traced: Any) -> None:
    jax = pytest.importorskip("jax")
    f = worker.function("traced.py:double").options(out_spec=gw.ShapeDtype(X.shape, "float32"))
    program = jax.jit(lambda x: f(x) + 1)
    np.testing.assert_array_equal(program(X), X * 2 + 1)
    file = traced(lambda: [program(X).block_until_ready() for _ in range(4)])
    assert len(file.named("compute", worker.pid)) == 4
    assert len(file.named("numpy/traced.py:double", os.getpid())) == 4


def test_an_error_is_in_the_trace_and_nothing_else_changes(worker: gw.Worker, traced: Any) -> None:
    f = worker.function("traced.py:fail")

    def act() -> None:
        with pytest.raises(ValueError, match="bad 42"):
            f(X)

    file = traced(act)
    (said,) = [
        e["args"]["error"] for e in file.spans if "error" in e.get("args", {}) and e["pid"] == os.getpid()
    ]
    assert "Error" in said
    assert len(file.named("compute", worker.pid)) == 1


def test_an_error_of_the_program_leaves_a_trace(bridge: gw.Bridge, worker: gw.Worker, tmp_path: Path) -> None:
    f = worker.function("traced.py:double")
    with pytest.raises(KeyError), bridge.trace(tmp_path / "t.json"):
        f(X)
        raise KeyError("mine")
    assert len(File(tmp_path / "t.json").named("compute")) == 1


def test_a_worker_that_dies_takes_only_its_own_spans(
    bridge: gw.Bridge, worker: gw.Worker, folder: Path, tmp_path: Path
) -> None:
    mortal = bridge.worker("numpy", path=[folder], name="mortal")
    die, double = mortal.function("traced.py:die"), worker.function("traced.py:double")
    with bridge.trace(tmp_path / "t.json") as trace:
        double(X)
        with pytest.raises(gw.WorkerDiedError):
            die(X)
        double(X)
    file = File(tmp_path / "t.json")
    assert len(file.named("compute", worker.pid)) == 2 and not file.named("compute", mortal.pid)
    assert "WorkerDiedError" in trace.lost["mortal"] == file.document["otherData"]["lost"]["mortal"]
    assert any(e.get("args", {}).get("error") == "WorkerDiedError" for e in file.spans)
    mortal.close()


def test_a_worker_started_or_restarted_meanwhile_is_traced(
    bridge: gw.Bridge, folder: Path, tmp_path: Path
) -> None:
    with bridge.trace(tmp_path / "t.json"):
        late = bridge.worker("numpy", path=[folder], name="late")
        f = late.function("traced.py:double")
        f(X)
        first = late.pid
        late.restart()
        f(X)
    file = File(tmp_path / "t.json")
    here = os.getpid()
    assert len(file.named("compute", late.pid)) == 2 and len(file.named("load", late.pid)) == 1
    # its first incarnation is gone, with what it had recorded
    assert not file.named("compute", first)
    assert len(file.named("load", here)) == len(file.named("invoke", here)) == 2
    late.close()


def test_memory_is_bounded_and_what_is_missing_is_said(
    bridge: gw.Bridge, worker: gw.Worker, tmp_path: Path
) -> None:
    f = worker.function("traced.py:double")
    with bridge.trace(tmp_path / "t.json", capacity=5) as trace:
        for _ in range(12):
            f(X)
    file = File(tmp_path / "t.json")
    assert trace.calls == len(file.named("compute", worker.pid)) == len(file.named("wait")) == 5
    assert trace.dropped["this process"] == trace.dropped["numpy"] == 7
    assert file.document["otherData"]["dropped"] == trace.dropped


def test_off_means_off(bridge: gw.Bridge, worker: gw.Worker, tmp_path: Path) -> None:
    """Outside of a trace everything is what it is in a program that never traced."""
    recorders = worker.function("traced.py:recorders")

    def who_is_told() -> list[Any]:
        return [None if bridge._link.recorder is None else "Recording", *recorders()]

    assert who_is_told() == [None] * 4
    with bridge.trace(tmp_path / "t.json"):
        assert who_is_told() == ["Recording", *["Recorder"] * 3]
    assert who_is_told() == [None] * 4


def test_one_trace_of_a_bridge_at_a_time_and_another_bridge_s_is_its_own(
    bridge: gw.Bridge, worker: gw.Worker, folder: Path, tmp_path: Path
) -> None:
    f = worker.function("traced.py:double")
    with gw.connect() as second, bridge.trace(tmp_path / "a.json"):
        with (
            pytest.raises(gw.UsageError, match="one trace of a bridge at a time"),
            bridge.trace(tmp_path / "c.json"),
        ):
            pass
        g = second.worker("numpy", path=[folder]).function("traced.py:double")
        with second.trace(tmp_path / "b.json"):
            f(X), g(X)
        f(X)
    assert len(File(tmp_path / "a.json").named("compute")) == 2
    assert len(File(tmp_path / "b.json").named("compute")) == 1


@pytest.mark.parametrize("capacity", [0, -1, 2**21, 1.5])
def test_bad_capacity(bridge: gw.Bridge, tmp_path: Path, capacity: Any) -> None:
    with (
        pytest.raises(gw.UsageError, match="keeps from 1 to"),
        bridge.trace(tmp_path / "t.json", capacity=capacity),
    ):
        pass


def test_a_file_that_cannot_be_written_is_known_at_once(bridge: gw.Bridge, tmp_path: Path) -> None:
    with pytest.raises(gw.UsageError, match="cannot be written"), bridge.trace(tmp_path / "none" / "t.json"):
        pass
    with bridge.trace(tmp_path / "t.json"):  # and nothing was begun
        pass


FORKS = """
import os, sys
import numpy as np
import gradwire as gw
with gw.connect() as bridge:
    f = bridge.worker("numpy", path=[sys.argv[1]]).function("traced.py:double")
    trace = bridge.trace(sys.argv[2])
    with trace:
        f(np.zeros(3))
        pid = os.fork()
        if not pid:
            trace.__exit__(None, None, None)
            os._exit(os.stat(sys.argv[2]).st_size)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        f(np.zeros(3))
"""


def test_a_forked_child_leaves_the_trace_to_its_parent(folder: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKS, folder, tmp_path / "t.json"], check=True, timeout=60)
    assert len(File(tmp_path / "t.json").named("compute")) == 2


def test_many_threads_while_traces_begin_and_end(
    bridge: gw.Bridge, worker: gw.Worker, tmp_path: Path
) -> None:
    f, over, wrong = worker.function("traced.py:double"), threading.Event(), []

    def calls() -> None:
        while not over.is_set():
            try:
                np.testing.assert_array_equal(f(X), X * 2)
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for i in range(15):
            with bridge.trace(tmp_path / f"{i}.json"):
                f(X)
            File(tmp_path / f"{i}.json")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("lane", ["page", "zmq"])
def test_submitted_calls_keep_their_order_while_traces_begin_and_end(
    bridge: gw.Bridge, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    monkeypatch.setenv("GRADWIRE_LANE", lane)
    worker = bridge.worker("numpy", path=[folder], name=f"by {lane}")
    step, futures = worker.module("traced.py:counter"), []
    x = np.zeros(1)
    for i in range(3):
        futures += [step.submit(x) for _ in range(50)]
        with bridge.trace(tmp_path / f"{i}.json") as trace:
            futures += [step.submit(x) for _ in range(50)]
            counted = [float(future.result(60)[0]) for future in futures]
        assert trace.calls == 50
    assert counted == list(range(1, 301))
    worker.close()


def test_calls_that_wait_when_a_trace_begins_are_made_before_later_ones(
    worker: gw.Worker, bridge: gw.Bridge, tmp_path: Path
) -> None:
    """More than may be under way at once, from an event loop, which waits for no room."""
    step, x = worker.module("traced.py:counter"), np.zeros(1)

    async def calls() -> list[float]:
        made = [asyncio.ensure_future(step.aio(x)) for _ in range(300)]
        await asyncio.sleep(0)  # all of them have begun
        with bridge.trace(tmp_path / "t.json"):
            made += [asyncio.ensure_future(step.aio(x)) for _ in range(20)]
            return [float(result[0]) for result in await asyncio.gather(*made)]

    assert asyncio.run(calls()) == list(range(1, 321))
    assert len(File(tmp_path / "t.json").named("compute")) >= 20


def test_a_trace_that_is_interrupted_as_it_begins_has_not_begun(
    bridge: gw.Bridge, worker: gw.Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt), bridge.trace(tmp_path / "t.json"):
            pass
    with bridge.trace(tmp_path / "t.json"):
        worker.function("traced.py:double")(X)
    assert len(File(tmp_path / "t.json").named("invoke")) == 1


def test_no_worker_records_for_a_trace_that_was_interrupted(
    bridge: gw.Bridge, worker: gw.Worker, other: gw.Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it began, when some worker had begun; and as it ended, when some worker had not been asked yet."""
    ask = Connection.ask
    for fine in (0, 1, 2, 3):
        asked = itertools.count()

        def interrupted(*args: Any, fine: int = fine, asked: Iterator[int] = asked) -> Any:
            found = ask(*args)
            if next(asked) == fine:
                raise KeyboardInterrupt
            return found

        with monkeypatch.context() as patched:
            patched.setattr(Connection, "ask", interrupted)
            with pytest.raises(KeyboardInterrupt), bridge.trace(tmp_path / "t.json"):
                pass
        assert next(asked) > fine
        for each in (worker, other):
            each.function("traced.py:double")(X)  # behind what nobody has waited for
            assert each.function("traced.py:recorders")() == [None] * 3


def test_a_busy_worker_does_not_record_later_for_a_trace_that_was_interrupted(
    bridge: gw.Bridge, worker: gw.Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What begins and what ends it wait for the worker on two lines, and nobody says which it finds first."""
    f, until, ask = worker.function("traced.py:double"), worker.function("traced.py:until"), Connection.ask

    def interrupted(connection: Connection, make: Any, timeout_s: float) -> Any:
        try:
            return ask(connection, make, 0.0)
        finally:
            if timeout_s:
                raise KeyboardInterrupt

    for i in range(4):
        begun, over = tmp_path / f"begun {i}", tmp_path / f"over {i}"
        held = until.submit(str(begun), str(over))
        assert soon(begun.exists)
        with monkeypatch.context() as patched:
            patched.setattr(Connection, "ask", interrupted)
            with pytest.raises(KeyboardInterrupt), bridge.trace(tmp_path / "t.json"):
                pass
        over.touch()
        held.result(60)
        assert [f(X).sum() for _ in range(3)] == [X.sum() * 2] * 3
        assert worker.function("traced.py:recorders")() == [None] * 3


def test_a_handler_of_signals_may_call_while_a_trace_begins(
    bridge: gw.Bridge, worker: gw.Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, ask, results = worker.function("traced.py:double"), Connection.ask, []

    def interrupted(*args: Any) -> Any:
        if not results:
            signal.raise_signal(signal.SIGUSR1)
        return ask(*args)

    def handler(*_: Any) -> None:
        results.append(None)
        results[0] = f(X)

    before = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(Connection, "ask", interrupted)
    try:
        with bridge.trace(tmp_path / "t.json"):
            f(X)
    finally:
        signal.signal(signal.SIGUSR1, before)
    np.testing.assert_array_equal(results, [X * 2])
    assert len(File(tmp_path / "t.json").named("invoke")) == 2
