"""Shared brokers and files of workers: several programs, one set of workers, and who leaves when whom is killed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire import shared_worker
from gradwire.commands import main
from gradwire_wire.rendezvous import find_cards, read_card

TARGETS = """
import atexit, os, sys, time, weakref
import numpy as np

def double(x):
    return 2 * x

def shout(x, word):
    print(word)
    return x

def threads():
    return int(os.environ["OMP_NUM_THREADS"])

def sleep(seconds):
    time.sleep(seconds)

def stay(begun, end):
    open(begun, "w").close()
    while not os.path.exists(end):
        time.sleep(0.01)

def leave(code):
    os._exit(code)

def at_exit(path):
    atexit.register(lambda: open(path, "w").close())

counters = weakref.WeakSet()

def there():
    return len(counters)

class Counter:
    def __init__(self, start=0):
        self.n = start
        self.me = [self]
        counters.add(self)
    def __call__(self, x):
        self.n += 1
        return x + self.n

def broken():
    raise RuntimeError("no weights here")
"""

FILE = """
name = "{name}"
[workers.first]
framework = "numpy"
[workers.first.modules.counter]
target = "shared_ops.py:Counter"
kwargs = {{ start = 100 }}
[workers.first.functions]
double = "shared_ops.py:double"
[workers.second]
framework = "numpy"
restart = "on-failure"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shared")
    (made / "shared_ops.py").write_text(TARGETS)
    np.save(made / "x.npy", np.arange(4.0))
    return made


def written(folder: Path, name: str, text: str = FILE) -> str:
    path = folder / f"{name}.toml"
    path.write_text(text.format(name=name))
    return str(path)


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value


def is_there(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


class Up:
    """A shared broker that was started by the command, and its end."""

    def __init__(self, folder: Path, name: str, text: str = FILE) -> None:
        self.name = name
        self.file = written(folder, name, text)
        done = self.run("up", self.file)
        assert done.returncode == 0, done.stderr
        self.address = done.stdout.strip()

    @staticmethod
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gradwire", *arguments]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)

    @property
    def pid(self) -> int:
        return read_card(Path(self.address.removeprefix("ipc://")).parent).pid

    def workers(self) -> dict[str, dict[str, Any]]:
        listed = json.loads(self.run("ps", "--broker", self.name, "--json").stdout)
        return {worker["name"]: worker for worker in listed}

    def down(self) -> None:
        if any(card.name == self.name for card in find_cards(os.environ)):
            assert main(["stop", "--all", "--broker", self.name]) == 0


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[Up]:
    """One for all tests that leave it as it was."""
    made = Up(folder, "tests-shared")
    yield made
    made.down()


# ---- Files, in a private broker ------------------------------------------------------------------------------------


def test_connect_by_a_file_starts_its_workers_and_loads(folder: Path) -> None:
    with gw.connect(written(folder, "private")) as bridge:
        first, second = bridge["first"], bridge["second"]
        assert [worker.name for worker in bridge.workers()] == ["first", "second"]
        assert first.pid != second.pid and first.alive and second.alive
        np.testing.assert_array_equal(first.function("double")(np.ones(2)), [2, 2])
        counter = first.module("counter")
        assert (counter(0), first.module("counter")(0)) == (101, 102), "one object, whoever names it"
        assert second.function("shared_ops.py:double")(3) == 6, "targets are looked for beside the file"
        with pytest.raises(gw.UnknownTargetError, match="'counter' is neither"):
            second.module("counter")
        with pytest.raises(gw.UsageError, match="takes no arguments"):
            first.module("counter", 3)
        assert not [card for card in find_cards(os.environ) if card.name == "private"], "nobody else finds it"


def test_r04_workers_of_a_file_divide_the_processors(folder: Path) -> None:
    three = "".join(f'[workers.w{i}]\nframework = "numpy"\n' for i in range(3)) + "threads = 7\n"
    with gw.connect(written(folder, "three", three)) as bridge:
        share = max(1, len(os.sched_getaffinity(0)) // 3)
        assert [w.function("shared_ops.py:threads")() for w in bridge.workers()] == [share, share, 7]


def test_r65_a_file_whose_load_fails_starts_nothing(folder: Path) -> None:
    text = '[workers.w]\nframework = "numpy"\nmodules.net = "shared_ops.py:broken"\n'
    path = written(folder, "broken", text + '[workers.v]\nframework = "numpy"\n')
    with pytest.raises(gw.WorkerStartError) as caught:
        gw.connect(path)
    message = str(caught.value)
    assert "loading 'net' (shared_ops.py:broken) failed: RuntimeError: no weights here" in message
    assert 'raise RuntimeError("no weights here")' in message, "the user's own line"
    done = Up.run("up", path)
    assert done.returncode == 1 and "no weights here" in done.stderr and not done.stdout
    assert "Traceback (most recent call last)" in done.stderr, "the worker's own, inside the message"
    assert done.stderr.startswith("gradwire up: worker 'w' (numpy) did not start: loading 'net'")
    assert "broken" not in [card.name for card in find_cards(os.environ)]


def test_r65_a_target_that_is_not_there_is_named(folder: Path) -> None:
    path = written(folder, "typo", '[workers.w]\nframework = "numpy"\nfunctions.f = "shared_ops.py:dubble"\n')
    with pytest.raises(gw.WorkerStartError, match="did you mean 'double'"):
        gw.connect(path)


# ---- Several programs ----------------------------------------------------------------------------------------------

PROGRAM = """
import sys, numpy as np, gradwire as gw
with gw.connect(sys.argv[1]) as bridge:
    counter = bridge["first"].module("counter")
    print(*[counter(0) for _ in range(20)])
"""


def test_several_programs_share_the_workers_and_their_state(up: Up) -> None:
    before = up.workers()
    programs = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, target], stdout=subprocess.PIPE, text=True)
        for target in (up.address, up.name, str(Path(up.address.removeprefix("ipc://")).parent))
    ]
    answers = [program.communicate(timeout=60)[0].split() for program in programs]
    assert [program.returncode for program in programs] == [0, 0, 0]
    counts = [int(count) for answer in answers for count in answer]
    assert len(counts) == 60
    assert sorted(counts) == list(range(min(counts), min(counts) + 60)), "one counter, each call once"
    after = up.workers()
    assert {n: w["pid"] for n, w in before.items()} == {n: w["pid"] for n, w in after.items()}
    # (A worker that has not answered at once is listed as busy, with the calls that it told of before.)
    until(lambda: up.workers()["first"]["calls"] == before["first"]["calls"] + 60)


def test_arrays_of_every_size_cross_and_closing_leaves_the_workers(up: Up) -> None:
    with gw.connect(up.address) as bridge:
        assert [worker.name for worker in bridge.workers()] == ["first", "second"]
        worker = bridge["second"]
        assert bridge["second"] is worker
        for n in (0, 3, 5000, 1 << 20):
            x = np.arange(n, dtype=np.float32)
            np.testing.assert_array_equal(worker.function("shared_ops.py:double")(x), 2 * x)
        pid = worker.pid
        worker.close()
        with pytest.raises(gw.ClosedError):
            worker.function("shared_ops.py:double")
        assert bridge["second"].pid == pid, "attached to anew"
    with gw.connect(up.address) as bridge:
        assert bridge["second"].pid == pid
        with pytest.raises(gw.UsageError, match="no worker 'third'; there are first, second"):
            bridge["third"]


def test_a_worker_started_by_a_client_ends_with_it(up: Up) -> None:
    code = f"import gradwire as gw; b = gw.connect({up.address!r}); print(b.worker('numpy', name='guest').pid, flush=True); input()"
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None and program.stdin is not None
    pid = int(program.stdout.readline())
    with gw.connect(up.address) as bridge:
        assert bridge["guest"].pid == pid, "others may use it meanwhile"
        program.kill()
        until(lambda: not is_there(pid))
        assert is_there(bridge["first"].pid)
        own = bridge.worker("numpy", name="guest-2").pid
        assert is_there(own)
    until(lambda: not is_there(own))
    program.communicate()


def test_a_worker_that_outlives_its_client_in_a_new_process_ends_with_who_started_it_again(
    up: Up, folder: Path
) -> None:
    with gw.connect(up.address) as bridge:
        with gw.connect(up.address) as starter:
            old = starter.worker("numpy", name="heir", path=[folder], restart="always").pid
            double = bridge["heir"].function("shared_ops.py:double")
            assert double(2) == 4
        until(lambda: not is_there(old))
        until(lambda: not bridge["heir"].alive)
        assert double(3) == 6, "by its policy"
        heir = bridge["heir"].pid
        assert is_there(heir)
    until(lambda: not is_there(heir))


def test_what_a_client_has_loaded_goes_with_it_and_what_the_file_loads_stays(up: Up) -> None:
    with gw.connect(up.address) as bridge:
        there = bridge["first"].function("shared_ops.py:there")
        before = there()
        with gw.connect(up.address) as other:
            own, shared = other["first"].module("shared_ops.py:Counter"), other["first"].module("counter")
            counted = shared(0)
            assert own(0) == 1 and there() == before + 1
            del shared
        until(lambda: there() == before)
        assert bridge["first"].module("counter")(0) == counted + 1


def test_r60_output_goes_to_the_clients_that_use_the_worker(up: Up) -> None:
    # `capsys` loses what another thread writes while it is read.
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        gw.connect(up.address) as bridge,
        gw.connect(up.address) as other,
    ):
        shout = bridge["second"].function("shared_ops.py:shout")
        assert other["first"].alive
        shout(1, "heard by one")
        until(lambda: "[second] heard by one" in said.getvalue())
        other["second"]
        shout(1, "heard by two")
        until(lambda: said.getvalue().count("[second] heard by two") == 2)


def test_r62_clients_do_not_interrupt_each_other(up: Up) -> None:
    with gw.connect(up.address) as bridge, gw.connect(up.address) as other:
        slow = bridge["first"].function("shared_ops.py:sleep").options(timeout=0.3)
        double = other["first"].function("double")
        with pytest.raises(gw.DeadlineError):
            slow(30)
        assert double(2) == 4


def test_who_comes_during_a_long_call_waits_for_its_turn(
    up: Up, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As those do who are there already. It is told what it waits for, and what to do; the call ends once it is."""
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        gw.connect(up.address) as bridge,
        gw.connect(up.address) as late,
        ThreadPoolExecutor(1) as pool,
    ):
        stay = bridge["first"].function("shared_ops.py:stay")
        long = stay.submit(str(tmp_path / "begun"), str(tmp_path / "end"))
        until((tmp_path / "begun").exists)
        monkeypatch.setattr(shared_worker, "HANDSHAKE_S", 0.3)
        there = pool.submit(lambda: late["first"])
        try:
            until(lambda: "'first' is in somebody's call, or is stopped" in said.getvalue())
        finally:
            (tmp_path / "end").touch()
        assert there.result(60).function("double")(2) == 4
        long.result(60)


# ---- Who leaves ----------------------------------------------------------------------------------------------------


def test_r55_a_dead_worker_is_started_again_once_for_all(folder: Path) -> None:
    up = Up(folder, "tests-restart")
    try:
        with gw.connect(up.address) as one, gw.connect(up.address) as two:
            doubles = [bridge["second"].function("shared_ops.py:double") for bridge in (one, two)]
            old = one["second"].pid
            with pytest.raises(gw.WorkerDiedError, match="exit code 3"):
                one["second"].function("shared_ops.py:leave")(3)
            assert [double(4) for double in doubles] == [8, 8], "by its policy, and the other one follows"
            assert one["second"].pid == two["second"].pid != old
            os.kill(one["first"].pid, signal.SIGKILL)
            until(lambda: not one["first"].alive)
            until(lambda: up.workers()["first"]["doing"] == "signal SIGKILL")
            one["first"].restart()
            assert two["first"].module("counter")(0) == 101, "loaded again, as new"
    finally:
        up.down()


def test_r55_who_comes_after_a_death_finds_the_worker_as_its_policy_says(folder: Path) -> None:
    """Programs that come and go: nobody of those who have seen it die is there any more."""
    up = Up(folder, "tests-comers")

    def leave(name: str, code: int) -> None:
        with gw.connect(up.address) as bridge, pytest.raises(gw.WorkerDiedError):
            bridge[name].function("shared_ops.py:leave")(code)

    try:
        leave("second", 3)
        done = up.run("call", "shared_ops.py:double", "--arg", "4", "--worker", "second", "--broker", up.name)
        assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr
        leave("second", 3)
        with ThreadPoolExecutor(4) as threads, contextlib.ExitStack() as open_bridges:
            bridges = [open_bridges.enter_context(gw.connect(up.address)) for _ in range(4)]
            assert len({w.pid for w in threads.map(lambda bridge: bridge["second"], bridges)}) == 1
        for name, code, policy in (("second", 0, "on-failure"), ("first", 3, "never")):
            leave(name, code)
            with gw.connect(up.address) as bridge, pytest.raises(gw.WorkerDiedError, match=policy):
                bridge[name]
    finally:
        up.down()


def test_r51_after_kill_9_of_the_broker_nothing_is_left(folder: Path, tmp_path: Path) -> None:
    up = Up(folder, "tests-killed")
    runtime = Path(up.address.removeprefix("ipc://")).parent
    pids = [worker["pid"] for worker in up.workers().values()]
    bridge = gw.connect(up.name)
    double = bridge["first"].function("double")
    assert double(1) == 2
    waiting: list[Exception] = []
    begun = tmp_path / "begun"

    def wait() -> None:
        try:
            bridge["second"].function("shared_ops.py:stay")(str(begun), "/nowhere")
        except gw.GradwireError as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(begun.exists)
    os.kill(up.pid, signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()
    again = f"gradwire up {up.file}"
    assert isinstance(waiting[0], gw.WorkerDiedError) and again in str(waiting[0])
    until(lambda: not any(map(is_there, pids)))
    with pytest.raises(gw.WorkerDiedError, match="gradwire up"):
        double(1)
    with pytest.raises(gw.ConnectError, match="gradwire up"):
        bridge.worker("numpy")
    bridge.close()
    with pytest.raises(gw.ConnectError, match=r"has ended|no runtime folder|no shared broker"):
        gw.connect(up.address)
    with pytest.raises(gw.ConnectError, match="gradwire up FILE"):
        gw.connect("tests-killed")
    with gw.connect():
        assert not runtime.exists(), "swept at the latest by the next broker's start"


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_foreground_ends_in_order(folder: Path, number: signal.Signals) -> None:
    """By Ctrl-C, by a service manager, or with its terminal: the exit functions of its workers run."""
    path = written(folder, "tests-foreground")
    command = [sys.executable, "-m", "gradwire", "up", path, "--foreground"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    address = program.stdout.readline().strip()
    with gw.connect(address) as bridge:
        pid = bridge["first"].pid
        bridge["first"].function("shared_ops.py:shout")(1, "shown there")
        bridge["first"].function("shared_ops.py:at_exit")(str(folder / number.name))
    program.send_signal(number)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 0 and "[first] shown there" in errors and "Traceback" not in errors
    assert not is_there(pid) and not Path(address.removeprefix("ipc://")).parent.exists()
    assert (folder / number.name).exists()


def test_r56_a_start_that_is_killed_leaves_nothing(folder: Path) -> None:
    text = '[workers.first]\nframework = "numpy"\nfunctions.f = "shared_slow.py:f"\n'
    (folder / "shared_slow.py").write_text("import time\ntime.sleep(600)\n")
    path = written(folder, "tests-half", text)
    program = subprocess.Popen([sys.executable, "-m", "gradwire", "up", path], stderr=subprocess.DEVNULL)
    card = until(lambda: [card for card in find_cards(os.environ) if card.name == "tests-half"])[0]
    program.kill()
    program.wait()
    until(lambda: not is_there(card.pid) and not Path(card.folder).exists())


# ---- The folder ----------------------------------------------------------------------------------------------------


def test_the_token_is_where_only_this_user_can_read_it(up: Up) -> None:
    runtime = Path(up.address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert stat.S_IMODE((runtime / "broker.json").stat().st_mode) == 0o600
    token = read_card(runtime).token
    pids = [worker["pid"] for worker in up.workers().values() if worker["state"] != "ended"]
    for pid in [up.pid, *pids]:
        assert token not in Path(f"/proc/{pid}/cmdline").read_text()
        assert token not in Path(f"/proc/{pid}/environ").read_text()


def test_a_second_broker_of_that_name_is_refused(up: Up) -> None:
    done = Up.run("up", up.file)
    assert done.returncode == 1 and "runs already" in done.stderr and "gradwire stop --all" in done.stderr
