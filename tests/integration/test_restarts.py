"""Workers that are started again, by policy or by hand, and what that does to calls, modules and pullbacks."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradwire as gw

TARGETS = pathlib.Path(__file__).parent / "targets"
X = np.arange(3.0)


@pytest.fixture(scope="module")
def bridge() -> Iterator[gw.Bridge]:
    with gw.connect() as bridge:
        yield bridge


@pytest.fixture
def make(bridge: gw.Bridge) -> Iterator[Callable[..., gw.Worker]]:
    """A worker of its own: make(restart="...")."""
    made: list[gw.Worker] = []

    def start(**settings: Any) -> gw.Worker:
        made.append(bridge.worker("numpy", path=[TARGETS], threads=1, **settings))
        return made[-1]

    yield start
    for worker in made:
        worker.close()


def kill(worker: gw.Worker, number: int = signal.SIGKILL) -> None:
    """And wait until this process knows."""
    os.kill(worker.pid, number)
    deadline = time.monotonic() + 60
    while worker.alive:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_next_call_starts_it_and_the_call_in_flight_is_told(make: Callable[..., gw.Worker]) -> None:
    worker = make(restart="on-failure")
    leave, double = worker.function("fragile:leave"), worker.function("fragile:double")
    first = worker.pid
    with pytest.raises(
        gw.WorkerDiedError, match=r"next call starts it again.*restart='on-failure'"
    ) as caught:
        leave(X, 7)
    assert (caught.value.exit_code, caught.value.retry_safe) == (7, False)
    np.testing.assert_array_equal(double(X), X * 2)
    assert worker.pid != first
    kill(worker)
    np.testing.assert_array_equal(double(X), X * 2)  # nothing was under way: nothing to tell of a function


def test_on_failure_leaves_an_end_by_itself_alone(make: Callable[..., gw.Worker]) -> None:
    worker = make(restart="on-failure")
    leave = worker.function("fragile:leave")
    for _ in range(2):
        with pytest.raises(gw.WorkerDiedError, match=r"worker\.restart\(\)"):
            leave(X, 0)
    always = make(restart="always")
    with pytest.raises(gw.WorkerDiedError):
        always.function("fragile:leave")(X, 0)
    np.testing.assert_array_equal(always.function("fragile:double")(X), X * 2)


def test_one_that_lives_but_cannot_be_reached_is_ended_before_another_takes_its_place(
    make: Callable[..., gw.Worker],
) -> None:
    worker = make(restart="on-failure", name="deaf")
    deafen, double, first = worker.function("fragile:deafen"), worker.function("fragile:double"), worker.pid
    with contextlib.suppress(gw.WorkerDiedError):  # its answer may come first
        deafen(X)
    while worker.alive:
        time.sleep(0.01)
    os.kill(first, 0)
    np.testing.assert_array_equal(double(X), 2 * X)
    assert worker.pid != first and not pathlib.Path(f"/proc/{first}").exists()


def test_one_that_lives_but_cannot_be_reached_is_told_from_a_dead_one(make: Callable[..., gw.Worker]) -> None:
    worker = make(name="deaf for ever")
    deafen, double = worker.function("fragile:deafen"), worker.function("fragile:double")
    with contextlib.suppress(gw.WorkerDiedError):
        deafen(X)
    while worker.alive:
        time.sleep(0.01)
    with pytest.raises(gw.WorkerDiedError, match=r"no end of its process.*worker\.restart\(\)"):
        double(X)
    worker.restart()
    np.testing.assert_array_equal(double(X), 2 * X)


def test_an_end_that_cannot_be_shown_is_a_failure_all_the_same(make: Callable[..., gw.Worker]) -> None:
    worker = make(restart="on-failure")
    double = worker.function("fragile:double")
    with pytest.raises(gw.WorkerDiedError, match=r"exit code 1[^0-9](.|\n)*cannot be shown"):
        worker.function("fragile:break_len")(X)
    np.testing.assert_array_equal(double(X), 2 * X)


def test_a_call_is_never_repeated_unless_the_user_says_so(
    make: Callable[..., gw.Worker], tmp_path: pathlib.Path
) -> None:
    worker = make(restart="on-failure")
    die_once = worker.function("fragile:die_once")
    with pytest.raises(gw.WorkerDiedError):
        die_once(X, str(tmp_path / "plain"))
    assert (tmp_path / "plain").read_text() == "x"
    np.testing.assert_array_equal(die_once.options(retry=True)(X, str(tmp_path / "retried")), X)
    assert (tmp_path / "retried").read_text() == "xx"
    big = np.ones(1 << 20)
    assert (die_once.options(retry=True)(big, str(tmp_path / "big")) == 1).all()


def test_a_retry_is_made_once(make: Callable[..., gw.Worker]) -> None:
    worker = make(restart="always")
    with pytest.raises(gw.WorkerDiedError) as caught:
        worker.function("fragile:leave").options(retry=True)(X, 3)
    assert caught.value.exit_code == 3


def test_what_cannot_be_retried_is_refused(make: Callable[..., gw.Worker]) -> None:
    with pytest.raises(gw.UsageError, match="state"):
        make(restart="always").module("fragile:Counter").options(retry=True)
    with pytest.raises(gw.UsageError, match="restart="):
        make().function("fragile:double").options(retry=True)
    with pytest.raises(gw.UsageError, match="on-failure"):
        make(restart="perhaps")


def test_a_module_is_as_new_and_that_is_told_once(make: Callable[..., gw.Worker]) -> None:
    worker = make(restart="always")
    counter = worker.module("fragile:Counter")
    for expected in (1, 2, 3):
        assert (counter(X) == expected).all()
    kill(worker)
    with pytest.raises(gw.WorkerDiedError, match="load_state_dict") as caught:
        counter(X)
    assert caught.value.retry_safe
    assert (counter(X) == 1).all()
    worker.restart(discard_state=True)
    assert (counter(X) == 1).all(), "who says so knows"
    worker.restart()
    with pytest.raises(gw.WorkerDiedError, match="was restarted"):
        counter(X)
    assert (counter(X) == 1).all()
    kill(worker)
    with pytest.raises(gw.WorkerDiedError, match="died between calls"):
        counter(X)
    assert (counter(X) == 1).all()


def test_state_in_the_worker_of_modules_that_the_caller_trains_is_never_lost_silently(
    bridge: gw.Bridge, torch_python: pathlib.Path
) -> None:
    """BatchNorm's statistics would be new beside parameters that were trained; what has nothing to lose goes on.

    And each is loaded again in the mode it was in.
    """
    import torch

    worker = bridge.worker("torch", python=torch_python, threads=1, restart="on-failure")
    remotes = [worker.module("torch.nn:BatchNorm1d", 2) for _ in range(3)]
    moved, idle = (gw.torch.Module(remote) for remote in remotes[:2])
    explicit = gw.torch.Module(remotes[2], buffers="explicit")
    linear, owned = (
        gw.torch.Module(worker.module("torch.nn:Linear", 2, 2)),
        worker.module("torch.nn:Linear", 2, 2),
    )
    owned.requires_grad_(False, "bias")
    evaluated, trained = (worker.module("torch.nn:BatchNorm1d", 2).train(mode) for mode in (False, True))
    x = torch.randn(8, 2)
    expected = evaluated(x)
    for net in (moved, linear, explicit, owned):
        net(x).sum().backward()
    state, y = moved.state_dict(), moved.eval()(x)
    owned.optimizer("torch.optim:SGD", lr=0.1).step()

    worker.restart()
    with pytest.raises(gw.WorkerDiedError, match=r"was restarted.*BatchNorm's statistics.*load_state_dict"):
        moved(x)
    assert not torch.allclose(moved(x), y), "told once, and new"
    idle(x), linear(x), explicit(x)
    assert trained.training is True and evaluated.training is False
    with pytest.raises(gw.WorkerDiedError, match="lost"):
        owned.state_dict()
    owned(x).sum().backward()
    assert owned.grads()["bias"] is None and owned.grads()["weight"] is not None, "frozen as before"

    moved.train()(x)
    kill(worker)
    with pytest.raises(RuntimeError, match=r"running_mean.*shape"):
        moved.load_state_dict({**state, "running_mean": torch.zeros(3)})
    with pytest.raises(gw.WorkerDiedError, match="died between calls"):
        moved(x)
    moved(x)
    torch.testing.assert_close(evaluated(x), expected)
    assert trained.training is True and evaluated.training is False
    kill(worker)
    moved.load_state_dict(state)
    torch.testing.assert_close(moved.eval()(x), y)
    worker.close()


def test_a_pullback_of_a_former_life_is_lost_or_recomputed(make: Callable[..., gw.Worker]) -> None:
    worker = make(restart="always")
    dot = worker.function("fragile:dot")
    _, pullback = dot.vjp(X, X)
    kill(worker)
    with pytest.raises(gw.ResidualLostError, match="recompute"):
        pullback(np.float64(1.0))
    _, pullback = dot.options(residuals="recompute").vjp(X, X)
    kill(worker)
    np.testing.assert_array_equal(pullback(np.float64(1.0))[0], X)


def test_calls_during_a_restart_wait_for_the_new_process(make: Callable[..., gw.Worker]) -> None:
    worker = make()
    nap = worker.function("fragile:nap")
    done = threading.Event()
    errors: list[BaseException] = []
    answers: list[Any] = []

    def call_again_and_again() -> None:
        while not done.is_set():
            try:
                answers.append(nap(X, 0.01))
            except gw.GradwireError as error:
                errors.append(error)

    def wait_for_more_than(n: int) -> None:
        before, deadline = len(answers), time.monotonic() + 60
        while len(answers) <= before + n:
            assert time.monotonic() < deadline, errors
            time.sleep(0.01)

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call_again_and_again) for _ in range(4)]
        try:
            for _ in range(3):
                wait_for_more_than(5)
                worker.restart()
            wait_for_more_than(5)
        finally:
            done.set()
        for call in calls:
            call.result(60)
    for error in errors:  # only of calls that were under way
        assert isinstance(error, gw.WorkerDiedError) and error.was_running, error
        assert "was restarted while it worked on this call" in str(error)


@pytest.mark.parametrize(("end", "error"), [("restart", gw.WorkerDiedError), ("close", gw.ClosedError)])
def test_r69_loading_ends_with_its_process(
    make: Callable[..., gw.Worker], tmp_path: pathlib.Path, end: str, error: type
) -> None:
    """It has no deadline, for a factory may fetch its weights; but whoever ends the worker ends it at once."""
    begun = tmp_path / "begun"
    worker = make(env={"BEGUN": str(begun)})
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(worker.function, "fragile_slow:double")
        while not begun.exists():
            assert not loading.done()
            time.sleep(0.01)
        getattr(worker, end)()
        with pytest.raises(error, match="while it worked on this call"):
            loading.result(60)


@pytest.mark.parametrize("had_state", [True, False])
def test_a_call_that_a_restart_has_overtaken_is_made_anew_unless_state_was_lost(
    make: Callable[..., gw.Worker], monkeypatch: pytest.MonkeyPatch, had_state: bool
) -> None:
    """It had found the old process, and was not sent yet: nobody has told the caller what went with that."""
    worker = make()
    net = worker.module("fragile:Counter")
    if had_state:
        net(X)
    handle, old = net.handle, net.handle._loaded
    ready, found = handle._ready, [old]
    monkeypatch.setattr(handle, "_ready", lambda: found.pop() if found else ready())
    worker.restart()
    if had_state:
        with pytest.raises(gw.WorkerDiedError, match="is as new from its factory"):
            net(X)
    net(X)
    assert not found and handle._loaded is not old


def test_a_worker_that_dies_at_its_start_is_given_up(
    make: Callable[..., gw.Worker], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter is a script that works once."""
    monkeypatch.setattr("gradwire.restarts.FIRST_DELAY_S", 0.01)
    note, python = tmp_path / "note", tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ -e {note} ]; then echo "broken now" >&2; exit 9; fi\ntouch {note}\nexec {sys.executable} "$@"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    worker = make(restart="always", python=python)
    double = worker.function("fragile:double")
    kill(worker)
    for attempt in range(5):
        with pytest.raises(gw.WorkerStartError, match="broken now") as caught:
            double(X)
        assert ("given up" in str(caught.value)) == (attempt == 4), attempt
    monkeypatch.setattr("gradwire.restarts.LONGEST_DELAY_S", 600.0)
    monkeypatch.setattr("gradwire.restarts.FIRST_DELAY_S", 600.0)  # nothing is waited for any more
    with pytest.raises(gw.WorkerStartError, match=r"given up; worker\.restart\(\) tries it once more"):
        double(X)
    note.unlink()
    worker.restart()
    np.testing.assert_array_equal(double(X), X * 2)


def test_closing_while_a_restart_waits_is_bounded(
    make: Callable[..., gw.Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LONGEST_DELAY_S", "FIRST_DELAY_S", "HEALTHY_S"):
        monkeypatch.setattr(f"gradwire.restarts.{name}", 600.0)
    worker = make(restart="always")
    double = worker.function("fragile:double")
    for _ in range(2):
        double(X)
        kill(worker)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(double, X)
        time.sleep(0.3)
        worker.close()
        with pytest.raises(gw.ClosedError):
            call.result(60)


# ---- One that calls another (R68) ----------------------------------------------------------------------------------------


def station(worker: gw.Worker, way: str = "plainly") -> list[Any]:
    return [list(worker._connection.facts[:6]), way]


WAYS = ["plainly", "in a thread", "submitted", "asyncio"]


@pytest.fixture(scope="module")
def three(bridge: gw.Bridge) -> list[gw.Worker]:
    return [bridge.worker("numpy", path=[TARGETS], threads=1, name=name) for name in "abc"]


@pytest.mark.parametrize("way", WAYS)
def test_r68_a_worker_that_calls_another(three: list[gw.Worker], way: str) -> None:
    a, b, c = three
    result = a.function("fragile:relay")(X, [station(b, way), station(c, way)])
    np.testing.assert_array_equal(result, X * 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_r68_a_call_that_comes_back_is_refused_at_once(three: list[gw.Worker], way: str, length: int) -> None:
    """A → A, A → B → A, A → B → C → A."""
    a, b, c = three
    stations = [station(w, way) for w in (b, c)[: length - 1]] + [station(a, way)]
    relay = a.function("fragile:relay")
    with pytest.raises(gw.UsageError, match="A → B → A"):
        relay.options(timeout=60.0)(X, stations)
    np.testing.assert_array_equal(relay(X, [station(b), station(c)]), X * 2)


RING = """
import gradwire as gw

proxies = {}

def pass_on(x, stations):
    "x doubled by the last of the stations, each a worker of the shared broker that this one runs under."
    if not stations:
        return x * 2
    here, *rest = stations
    if here not in proxies:
        proxies[here] = gw.connect("tests-ring")[here].function("ring.py:pass_on")
    return proxies[here](x, rest)
"""


def test_r68_workers_of_a_shared_broker_call_each_other(tmp_path: pathlib.Path) -> None:
    """By what users have: `gradwire.connect` in the worker's own code."""
    (tmp_path / "ring.py").write_text(RING)
    lines = ['name = "tests-ring"', *(f'[workers.{name}]\nframework = "numpy"' for name in "abc")]
    (tmp_path / "ring.toml").write_text("\n".join(lines))

    def command(*arguments: str) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "gradwire", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    address = command("up", str(tmp_path / "ring.toml"))
    try:
        with gw.connect(address) as bridge:
            pass_on = bridge["a"].function("ring.py:pass_on").options(timeout=60.0)
            big = np.arange(50_000.0)
            np.testing.assert_array_equal(pass_on(big, ["b", "c"]), big * 2)
            for way in (["a"], ["b", "a"], ["b", "c", "a"], ["b", "c", "b"]):
                with pytest.raises(gw.UsageError, match="A → B → A"):
                    pass_on(big, way)
            np.testing.assert_array_equal(pass_on(big, ["c", "b"]), big * 2)
    finally:
        command("stop", "--all", "--broker", "tests-ring")
