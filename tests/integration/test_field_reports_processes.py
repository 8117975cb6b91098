"""Many threads, event loops, interrupts, limits and notebooks, with real processes (R54, R55, R57, R58, R60, R62, R64, R67–R69).

R50, R52 and R63 are in test_fallbacks.py, R68 between workers in test_restarts.py, R51, R53, R55, R56, R58, R60, R61 and R62 of
single workers in test_lives.py and lives/, R57 at every door in tests/fuzz, R59 and R65 in lives/ and test_field_reports_tensors.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pathlib
import resource
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
from gradwire_wire.machine import read_memory

pytestmark = pytest.mark.integration

TARGETS = pathlib.Path(__file__).parent / "targets"
X = np.arange(4.0)


@pytest.fixture(scope="module")
def bridge() -> Iterator[gw.Bridge]:
    with gw.connect() as bridge:
        yield bridge


@pytest.fixture(scope="module")
def worker(bridge: gw.Bridge) -> gw.Worker:
    return bridge.worker("numpy", path=[TARGETS], threads=1)


@pytest.fixture
def remote(worker: gw.Worker) -> Callable[[str], gw.Remote]:
    return lambda name: worker.function(f"fragile:{name}")


# ---- Threads (R54, R67) ------------------------------------------------------------------------------------------------


def test_r54_8_threads_500_mixed_calls_on_one_proxy(remote: Callable[[str], gw.Remote]) -> None:
    double, dot = remote("double"), remote("dot")

    def work(thread: int) -> None:
        for i in range(500):
            x = np.full([3, 700, 20_000][i % 3 if i % 50 == 0 else i % 2], thread * 1000.0 + i)
            if i % 3:
                assert (double(x) == 2 * x).all()
            else:
                y, pullback = dot.vjp(x, x + 1)
                a, b = pullback(np.float64(2.0))
                assert y == x @ (x + 1) and (a == 2 * (x + 1)).all() and (b == 2 * x).all()

    with ThreadPoolExecutor(8) as pool:
        for call in [pool.submit(work, thread) for thread in range(8)]:
            call.result(100)


def tiny_calls(double: gw.Remote, threads: int, calls: int) -> None:
    """Each reply is its own call's, and there are exactly as many."""
    replies: list[list[float]] = [[] for _ in range(threads)]

    def work(thread: int) -> None:
        for i in range(calls):
            replies[thread].append(float(double(np.float64(thread * calls + i))))

    with ThreadPoolExecutor(threads) as pool:
        for call in [pool.submit(work, thread) for thread in range(threads)]:
            call.result(1000)
    assert replies == [[2.0 * (t * calls + i) for i in range(calls)] for t in range(threads)]


def test_r54_16_threads_8_000_tiny_calls_in_all(remote: Callable[[str], gw.Remote]) -> None:
    tiny_calls(remote("double"), 16, 500)


@pytest.mark.skipif("GRADWIRE_SOAK_S" not in os.environ, reason="minutes: GRADWIRE_SOAK_S=... (make soak)")
@pytest.mark.timeout(1200)
def test_r54_16_threads_20_000_tiny_calls_each(remote: Callable[[str], gw.Remote]) -> None:
    tiny_calls(remote("double"), 16, 20_000)


def test_r54_a_jitted_function_in_two_threads(remote: Callable[[str], gw.Remote]) -> None:
    import jax
    import jax.numpy as jnp

    double = remote("double")
    compiled = jax.jit(lambda x: jnp.sin(double(x)).sum())

    def work(thread: int) -> None:
        for i in range(100):
            x = jnp.full(50, float(thread + i), jnp.float32)
            assert np.allclose(compiled(x), 50 * np.sin(2.0 * (thread + i)), atol=1e-3)

    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(work, thread) for thread in range(2)]:
            call.result(60)


def test_r67_user_code_runs_on_the_main_thread(worker: gw.Worker, remote: Callable[[str], gw.Remote]) -> None:
    assert (remote("on_main_thread")(X + 1) == X + 1).all()
    assert remote("on_main_thread").submit(X + 1).result(60)[0] == 1
    _, pullback = remote("main_dot").vjp(X)
    assert (pullback(np.float64(1.0))[0] == 1).all(), "the pullback, too"


def test_r68_a_background_thread_ticks_while_the_caller_waits(
    remote: Callable[[str], gw.Remote], tmp_path: pathlib.Path
) -> None:
    """The call ends when that thread has had its turns, which it has not while the GIL is held."""

    def tick() -> None:
        for _ in range(20):
            time.sleep(0.01)
        (tmp_path / "ticked").touch()

    thread = threading.Thread(target=tick)
    thread.start()
    assert (remote("until_there").options(timeout=60.0)(X, str(tmp_path / "ticked")) == X).all()
    thread.join()


def test_a_client_that_reads_nothing_stops_nobody(
    worker: gw.Worker, remote: Callable[[str], gw.Remote]
) -> None:
    """A program that sends 200 calls for 1 MB each, and stops without reading a reply."""
    code = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import fragile
from gradwire_wire import messages, sockets
from gradwire_wire.structures import positional
facts = eval(sys.argv[2])
double = fragile.remote_of(facts, "fragile:double")
connection = double.handle._ready()
dealer = sockets.connect_dealer(facts[3], connection._client_id + b"0000")
x = np.ones(1 << 17)
from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import BY_NAME
for i in range(200):
    headers = connection.exchange.lend([Carrier(x, BY_NAME["float64"])], [])
    call = messages.Call(1000 + i, double.handle._remote, positional(1), [], 0, 0, 0, None, 0, None, headers, [], [])
    try:
        sockets.send_nowait(dealer, [messages.pack(call)])
    except sockets.Unreachable:
        break
print("sent", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    facts = repr(list(worker._connection.facts[:6]))
    double = remote("double")
    before = resident_kb(worker.pid)
    idle = subprocess.Popen([sys.executable, "-c", code, str(TARGETS), facts], stdout=subprocess.PIPE)
    try:
        assert idle.stdout is not None and idle.stdout.readline() == b"sent\n"
        for i in range(200):
            assert (double.options(timeout=60.0)(X + i) == 2 * (X + i)).all()
        assert resident_kb(worker.pid) - before < 600_000, "no more than what it was asked for"
    finally:
        idle.kill()
        idle.wait()
        idle.stdout.close()  # type: ignore[union-attr]
    deadline = time.monotonic() + 60
    while resident_kb(worker.pid) - before > 300_000:  # what it had on loan is free again
        double(X)
        assert time.monotonic() < deadline, (before, resident_kb(worker.pid))
        time.sleep(0.1)


def resident_kb(pid: int) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


# ---- Event loops (R64) -------------------------------------------------------------------------------------------------


def test_r64_a_ticker_ticks_while_a_call_is_awaited(
    remote: Callable[[str], gw.Remote], tmp_path: pathlib.Path
) -> None:
    """The call ends when the ticker has had its turns."""

    async def main() -> None:
        async def tick() -> None:
            for _ in range(20):
                await asyncio.sleep(0.01)
            (tmp_path / "ticked").touch()

        ticker = asyncio.create_task(tick())
        call = remote("until_there").options(timeout=60.0).aio(X, str(tmp_path / "ticked"))
        assert (await call == X).all()
        await ticker

    asyncio.run(main())


def test_r64_a_call_that_waits_in_a_running_loop(remote: Callable[[str], gw.Remote]) -> None:
    async def main() -> None:
        assert (remote("double")(X) == 2 * X).all()
        assert (await asyncio.to_thread(remote("double"), X) == 2 * X).all()
        results = await asyncio.gather(*(remote("double").aio(X + i) for i in range(20)))
        assert all((y == 2 * (X + i)).all() for i, y in enumerate(results))

    asyncio.run(main())


def test_r64_two_loops_in_two_threads(remote: Callable[[str], gw.Remote]) -> None:
    async def main(start: int) -> None:
        for i in range(start, start + 100):
            assert (await remote("double").aio(X + i) == 2 * (X + i)).all()

    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(asyncio.run, main(start)) for start in (0, 1000)]:
            call.result(60)


def test_r64_cancelling_leaves_the_connection_usable(
    remote: Callable[[str], gw.Remote], tmp_path: pathlib.Path
) -> None:
    async def main() -> None:
        for i in range(5):
            end = tmp_path / f"end {i}"
            call = asyncio.create_task(remote("until_there").options(timeout=60.0).aio(X, str(end)))
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            end.touch()
            assert (await remote("double").aio(X) == 2 * X).all()
        end = tmp_path / "end of the last"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(remote("until_there").options(timeout=60.0).aio(X, str(end)), 0.1)
        end.touch()
        assert (remote("double")(X) == 2 * X).all()

    asyncio.run(main())


# ---- Deadlines and deaths (R55, R69) -----------------------------------------------------------------------------------


def test_r69_a_timeout_per_proxy_and_per_call(remote: Callable[[str], gw.Remote]) -> None:
    nap = remote("nap").options(timeout=0.3)
    for call in (nap, nap.submit):
        with pytest.raises(TimeoutError) as caught:
            result = call(X, 600.0)
            result.result(60)
        assert isinstance(caught.value, gw.DeadlineError) and not caught.value.retry_safe
    assert (nap.options(timeout=60.0)(X, 0.0) == X).all()
    assert (remote("nap")(X, 0.5) == X).all(), "only that proxy has the timeout"


@pytest.mark.parametrize("lane", ["page", "zmq"])
def test_r69_no_timer_of_the_program_keeps_a_deadline_or_a_death_from_it(lane: str) -> None:
    """Some profilers have one that rings every 10 ms. Each signal began a wait anew, which then had no end."""
    code = """
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
try: nap.options(timeout=0.3)(x, 600.0)
except gw.DeadlineError: print("late")
threading.Timer(0.3, os.kill, (worker.pid, signal.SIGKILL)).start()
try: nap(x, 600.0)
except gw.WorkerDiedError: print("dead")
"""
    with running(code, GRADWIRE_LANE=lane) as one:
        output, errors = one.communicate(timeout=60)
    assert output == "late\ndead\n", output + errors


def test_r69_a_signal_that_was_lost_is_sent_again(remote: Callable[[str], gw.Remote]) -> None:
    with pytest.raises(gw.DeadlineError):
        remote("nap_after_deafness").options(timeout=0.3)(X)
    assert (remote("double").options(timeout=60.0)(X) == 2 * X).all(), (
        "the worker is free long before the minute is over"
    )


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import sys; sys.exit('no')"])
def test_r55_sys_exit_in_user_code_ends_the_call_and_not_the_worker(worker: gw.Worker, code: str) -> None:
    with pytest.raises(gw.RemoteError, match="SystemExit"):
        worker.function("builtins:exec")(code)
    assert worker.alive


def test_r55_out_of_memory_is_an_error_or_a_death_that_says_so(bridge: gw.Bridge) -> None:
    one = bridge.worker("numpy", path=[TARGETS], threads=1)
    eat = one.function("fragile:eat")
    with pytest.raises(gw.RemoteError, match="Unable to allocate"):
        eat(X, 3 << 30, 2 << 30)  # RLIMIT_AS
    assert (one.function("fragile:double")(X) == 2 * X).all()
    one.close()


def test_r55_a_death_is_seen_though_a_forked_child_holds_the_tether(
    bridge: gw.Bridge, tmp_path: pathlib.Path
) -> None:
    one = bridge.worker("numpy", path=[TARGETS], threads=1)
    big, note = np.arange(50_000.0), tmp_path / "note"
    same = one.function("fragile:same")
    kept = same(big)
    one.function("fragile:fork_apart")(X, str(note))
    leave = one.function("fragile:leave")
    waiting = [leave.submit(X, 7), same.submit(X)]
    try:
        with pytest.raises(gw.WorkerDiedError, match="exit code 7"):
            leave(X, 7)
        for call in waiting:
            with pytest.raises(gw.WorkerDiedError, match="exit code 7"):
                call.result(60)
        assert not one.alive
        one.restart()
        assert (same(big) == big).all() and (kept == big).all()
        one.close()
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("pass", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('no')", 1),
        ("1 / 0", 1),
    ],
)
def test_a_child_that_user_code_forks_never_becomes_a_second_worker(
    worker: gw.Worker, remote: Callable[[str], gw.Remote], how: str, code: int
) -> None:
    """It would answer the call of its parent, and the next ones."""
    assert remote("fork_and").options(timeout=60.0)(X, how) == code
    for i in range(10):
        assert (remote("double")(X + i) == 2 * (X + i)).all()
    assert worker.alive


@pytest.mark.parametrize("how", ["SIG_IGN", "SIG_DFL"])
def test_r69_user_code_that_takes_the_signal_away_does_not_keep_it(
    remote: Callable[[str], gw.Remote], how: str
) -> None:
    remote("ignore_interrupts")(X, how)
    with pytest.raises(gw.DeadlineError):
        remote("nap").options(timeout=0.2)(X, 600.0)
    assert (remote("double")(X) == 2 * X).all()


@pytest.mark.parametrize("how", ["SIG_DFL", "default_int_handler"])
def test_r69_the_deadline_of_a_call_that_waits_interrupts_no_other(
    remote: Callable[[str], gw.Remote], how: str, tmp_path: pathlib.Path
) -> None:
    """Whatever the code of the one that runs does with the signal."""
    stays, double = remote("stay_with"), remote("double")
    running = stays.submit(X, how, str(tmp_path / "begun"), str(tmp_path / "end"))
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    with pytest.raises(gw.DeadlineError):
        double.options(timeout=0.2)(X)
    time.sleep(1.5)  # the signal is sent again every second
    (tmp_path / "end").touch()
    assert (running.result(60) == X).all() and (double(X) == 2 * X).all()


@pytest.mark.parametrize("base", ["TimeoutError", "BaseException"])
def test_a_handler_that_user_code_left_raises_between_calls(
    bridge: gw.Bridge, tmp_path: pathlib.Path, base: str
) -> None:
    """An exception is shown, and the worker lives on; what ends its loop ends the process, whatever threads there are."""
    worker = bridge.worker("numpy", name="alarmed", path=[TARGETS], restart="on-failure")
    double, pid, note = worker.function("fragile:double"), worker.pid, tmp_path / "rang"
    worker.function("fragile:leave_alarm")(X, str(note), base)
    deadline = time.monotonic() + 60
    while not note.exists() or (base == "BaseException" and worker.alive):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert (double(X) == 2 * X).all() and (worker.pid == pid) is (base == "TimeoutError")
    worker.close()


# ---- Ctrl-C (R62) ------------------------------------------------------------------------------------------------------

HEAD = f"""
import os, signal, sys, threading, time
import numpy as np
import gradwire as gw
x = np.arange(4.0)
bridge = gw.connect()
worker = bridge.worker("numpy", path=[{str(TARGETS)!r}], threads=1)
double, nap = worker.function("fragile:double"), worker.function("fragile:nap")
double(x)
"""


@contextlib.contextmanager
def running(code: str, head: str = HEAD, **env: str) -> Iterator[subprocess.Popen[str]]:
    one = subprocess.Popen(
        [sys.executable, "-c", head + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **env},
    )
    try:
        yield one
    finally:
        one.kill()
        one.communicate(timeout=60)


def rest_of(one: subprocess.Popen[str]) -> tuple[str, str]:
    """What it goes on to say, to its end; ``communicate`` does not see what ``readline`` has read ahead."""
    assert one.stdout is not None and one.stderr is not None
    said = one.stdout.read(), one.stderr.read()
    one.wait(60)
    return said


LONG_CALLS = {  # each has made the file BEGUN once it runs
    "eager": "worker.function('fragile:tell_and_nap')(x, os.environ['BEGUN'], 600.0)",
    "pullback": "worker.function('fragile:slow_dot').vjp(x, x)[1](np.float64(1.0))",
    "loading": "worker.function('fragile_slow:double')",
    "a factory": "worker.module('fragile:slow_factory')",
    "awaited": "import asyncio; asyncio.run(worker.function('fragile:until_ended').aio(x))",
    "a restart of the worker": "open(os.environ['BEGUN'], 'w').close()\n    while True: worker.restart()",
}


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("to", ["caller", "group"])
@pytest.mark.parametrize("call", LONG_CALLS)
def test_r62_every_kind_of_wait_ends_at_once(call: str, to: str, tmp_path: pathlib.Path) -> None:
    begun = tmp_path / "begun"
    code = f"""
try:
    {LONG_CALLS[call]}
except KeyboardInterrupt:
    print("interrupted", flush=True)
    open(os.environ["BEGUN"] + " and ended", "w").close()
if {call.startswith("a restart")}:
    try: double(x)
    except gw.WorkerStartError as error: assert "worker.restart()" in str(error), error
    worker.restart()
print((double(x) == 2 * x).all(), (nap(x, 0.0) == x).all(), flush=True)
"""
    with running(code, BEGUN=str(begun)) as one:
        while not begun.exists():
            assert one.poll() is None, one.communicate(timeout=60)
            time.sleep(0.02)
        time.sleep(0.1)  # and waits for it; or is in the middle of a restart
        assert one.stdout is not None
        (os.killpg if to == "group" else os.kill)(one.pid, signal.SIGINT)
        assert one.stdout.readline() == "interrupted\n", one.communicate(timeout=60)[1]
        output, errors = rest_of(one)
        assert output == "True True\n", errors


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_r62_in_a_compiled_program(tmp_path: pathlib.Path) -> None:
    """XLA gives Python no chance until the callback returns, so the call itself ends, and the program with its error."""
    begun = tmp_path / "begun"
    code = f"""
import jax
spec = gw.ShapeDtype((3,), "float32")
long = worker.function("fragile:tell_and_nap").options(out_spec=spec)
compiled = jax.jit(lambda x: long(x, {str(begun)!r}, 600.0) + 1)
try: compiled(jax.numpy.ones(3)).block_until_ready()
except KeyboardInterrupt: print("interrupted", flush=True)
except Exception as error: print("failed", type(error).__name__, flush=True)
print((double(x) == 2 * x).all(), flush=True)
"""
    with running(code) as one:
        assert one.stdout is not None
        while not begun.exists():
            assert one.poll() is None, one.communicate(timeout=60)
            time.sleep(0.02)
        os.kill(one.pid, signal.SIGINT)
        ended = one.stdout.readline()
        assert ended.split()[0] in ("interrupted", "failed"), ended
        output, errors = rest_of(one)
        assert output == "True\n", errors


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_r62_interrupts_at_any_moment_lose_no_loan_and_mix_no_reply() -> None:
    """300 of them, in the middle of calls that lend and are lent 80 kB; some calls come through."""
    code = """
import gc, random
def interrupt():
    while not done: time.sleep(random.uniform(0.001, 0.01)); os.kill(os.getpid(), signal.SIGINT)
def ring(number, frame):  # nothing is to be interrupted between one call and the handling of the last one's end
    while frame is not None and frame.f_code is not calls.__code__: frame = frame.f_back
    if frame is not None: raise KeyboardInterrupt
def calls():
    global answered
    while met < 300 or answered < 100:
        at = big + answered
        y = double(at)
        if not (y == 2 * at).all():
            print("WRONG", flush=True); os._exit(1)
        answered += 1
done, met, answered = False, 0, 0
big = np.arange(10_000.0)
signal.signal(signal.SIGINT, ring)
threading.Thread(target=interrupt, daemon=True).start()
while met < 300 or answered < 100:
    try: calls()
    except KeyboardInterrupt: met += 1
    except BaseException as error: print("WRONG", repr(error), flush=True); os._exit(1)
done = True
from gradwire.lines import _in_flight
deadline = time.monotonic() + 60
while (left := worker.stats()["lent"] + 100 * len(_in_flight)) > 3 and time.monotonic() < deadline:
    double(big); time.sleep(0.1); gc.collect()
print(left)
"""
    with running(code) as one:
        output, errors = one.communicate(timeout=110)
    assert output.strip().isdigit() and int(output) <= 3, output + errors


def test_r62_interrupts_while_calls_are_submitted_repeat_none_and_lose_none() -> None:
    """The worker counts: each number once, in order; and each future that was returned has its own result."""
    code = """
import gc, itertools, random
note, noted = worker.function("submitted:note"), worker.function("submitted:noted")
noted(x); note.submit(np.zeros(1)).result(); noted(x)
raised = itertools.cycle([KeyboardInterrupt, TimeoutError, ZeroDivisionError])
armed = False
def ring(*_):  # not while the one before is handled
    global armed
    if armed: armed = False; raise next(raised)("interrupted")
signal.signal(signal.SIGUSR1, ring)
over, met = threading.Event(), 0
def shoot():
    while not over.wait(0.001 + 0.004 * random.random()): os.kill(os.getpid(), signal.SIGUSR1)
threading.Thread(target=shoot, daemon=True).start()
futures, numbers, number = [], itertools.count(), 0
while number < 5000 or met < 100:
    try:
        while True:
            armed = True  # (again, where the one before is in a future)
            number = next(numbers)
            call = note.submit(np.full(1 + number % 3 * 2000, float(number)))
            futures.append((number, call))
            if number % 64 == 0: call.result(60)
            if number >= 5000 and met >= 100: armed = False; break  # (from here on none is raised)
    except (KeyboardInterrupt, ZeroDivisionError): met += 1
    except TimeoutError as error:
        assert str(error) == "interrupted", repr(error)
        met += 1
signal.signal(signal.SIGUSR1, signal.SIG_IGN); over.set()
for number, call in futures:
    try: assert call.result(60)[0] == number
    except (KeyboardInterrupt, TimeoutError, ZeroDivisionError) as error: assert str(error) == "interrupted", repr(error)
made = noted(x).tolist()
assert sorted(set(made)) == made, "one was made twice, or out of turn"
del call
futures.clear()
deadline = time.monotonic() + 60
while worker.stats()["lent"] >= 50:
    assert time.monotonic() < deadline, worker.stats()
    gc.collect(); double(np.ones(2000)); time.sleep(0.1)
print(met >= 100 and len(made) > 1000)
"""
    with running(code) as one:
        output, errors = one.communicate(timeout=110)
    assert output == "True\n", output + errors


def test_r62_a_handler_of_signals_that_has_interrupted_an_import_may_call(tmp_path: pathlib.Path) -> None:
    """What its own call needs, or a framework, may be half loaded: it is done, or refused with a sentence."""
    (tmp_path / "torch.py").write_text("import not_there\n")
    code = f"""
inside, met, refused = False, [], []
acts = dict(
    array=lambda: double(np.ones(3)), number=lambda: double(1.0),
    submitted=lambda: double.submit(np.ones(3)).result(60), chained=lambda: double.submit(double.submit(0.5)).result(60),
)
def handle(*_):
    global inside
    if inside: return
    inside = True
    for name, act in acts.items():
        met.append(name)
        try: assert (np.asarray(act()) == 2.0).all(), name
        except gw.UsageError as error:
            assert "handler of signals" in str(error) and "has interrupted its loading" in str(error), error
            refused.append(name)
    inside = False
class Finder:
    def find_spec(*_): os.kill(os.getpid(), signal.SIGUSR1)
sys.meta_path.insert(0, Finder())
sys.path.insert(0, {str(tmp_path)!r})
signal.signal(signal.SIGUSR1, handle)
first = double.submit(np.ones(3))
assert (first.result(60) == 2.0).all() and len(met) > 20 and {{"submitted", "chained"}} <= set(refused), (met, refused)
met.clear(), refused.clear()
try: import torch
except ImportError as error: assert error.name == "not_there", error
assert met and not refused, refused
del sys.meta_path[0]
import concurrent.futures
assert isinstance(first, concurrent.futures.Future) and all((np.asarray(act()) == 2.0).all() for act in acts.values())
print("fine")
"""
    with running(code) as one:
        output, errors = one.communicate(timeout=60)
    assert output == "fine\n", errors


@pytest.mark.parametrize("load", ["double(big)", "double.submit(big).result(60)", "worker.restart()"])
def test_r62_a_handler_of_signals_may_call_and_close(load: str) -> None:
    """At any moment: what it does is done, or refused with a sentence; it never waits for what it has interrupted."""
    code = f"""
import random
big = np.arange(20_000.0)
acts = [lambda: double(x), lambda: double(big), lambda: bridge.stats(), lambda: double.submit(x).result(60)]
{"acts.pop()  # what another thread does waits for the restart, and so for this one" if "restart" in load else ""}
inside, met, refused = False, 0, 0
def handle(*_):
    global inside, met, refused
    if inside: return
    inside = True
    try: acts[met % len(acts)]()
    except gw.WorkerDiedError: pass  # it was just being restarted
    except gw.UsageError as error:
        assert "handler of signals" in str(error), error
        refused += 1
    finally: inside, met = False, met + 1
signal.signal(signal.SIGUSR1, handle)
over = threading.Event()
def shoot():
    while not over.wait(0.005 * random.random()): os.kill(os.getpid(), signal.SIGUSR1)
threading.Thread(target=shoot, daemon=True).start()
deadline = time.monotonic() + 0.7
while time.monotonic() < deadline or met <= 10 or refused >= met: {load}
over.set(); time.sleep(0.05)
assert (double(big) == 2 * big).all()
def leave(*_): bridge.close(); sys.exit(7)
signal.signal(signal.SIGUSR1, leave)
threading.Timer(0.3 * random.random(), os.kill, [os.getpid(), signal.SIGUSR1]).start()
while True: {load}
"""
    with running(code) as one:
        _, errors = one.communicate(timeout=100)
    assert one.returncode == 7, errors


def test_r62_what_a_handler_raises_in_a_finalizer_is_raised_by_the_next_call() -> None:
    """Python itself would print it and go on."""
    code = """
from gradwire_wire.segments import ForeignSegment
was = ForeignSegment.is_changed
def rung(*_):
    ForeignSegment.is_changed = was
    raise SystemExit(7)
for call in (double, double.submit, double.vjp):
    y = double(np.arange(200_000.0))
    ForeignSegment.is_changed = rung
    del y
    try: call(x)
    except SystemExit: pass
    else: assert False, call
    assert (double(x) == 2 * x).all()
assert worker.stats()["lent"] <= 1
"""
    with running(code) as one:
        _, errors = one.communicate(timeout=60)
    assert (one.returncode, errors) == (0, ""), errors


def test_r62_an_alarm_of_the_users_ends_a_call_as_ctrl_c_does() -> None:
    """Its handler raises what it likes: the program sees that, and the worker's call ends as well."""
    code = """
class Mine(Exception): pass
for raised in (TimeoutError, ConnectionError, Mine):
    def ring(*_): raise raised("alarm")
    signal.signal(signal.SIGALRM, ring)
    for call in (lambda: nap(x, 600.0), lambda: nap.options(timeout=600)(x, 600.0)):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try: call()
        except raised as error: assert str(error) == "alarm", error
        assert (double(x) == 2 * x).all()
print("fine")
"""
    with running(code) as one:
        output, errors = one.communicate(timeout=60)
    assert output == "fine\n", output + errors


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_r62_a_second_one_at_exit_leaves_nothing() -> None:
    with running("print('up', flush=True)\nnap(x, 600.0)") as one:
        assert one.stdout is not None
        one.stdout.readline()
        broker = [
            int(p) for p in pathlib.Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split()
        ]
        time.sleep(0.5)
        os.killpg(one.pid, signal.SIGINT)
        time.sleep(0.02)
        os.killpg(one.pid, signal.SIGINT)
        one.communicate(timeout=60)
        assert one.returncode in (1, 130, -signal.SIGINT)
        deadline = time.monotonic() + 60
        while any(os.path.exists(f"/proc/{pid}") for pid in broker):
            assert time.monotonic() < deadline
            time.sleep(0.05)


# ---- Memory and descriptors --------------------------------------------------------------------------------------------


def test_a_thousand_submitted_calls_do_not_copy_a_thousand_arguments() -> None:
    """They wait here, by reference: shared memory holds those of the few that are under way."""
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[TARGETS], threads=1)
        total = worker.function("fragile:total")
        x = np.ones(1 << 17)
        futures = [total.submit(x, i) for i in range(1000)]
        highest = 0
        while not all(future.done() for future in futures):
            highest = max(highest, bridge._memory.arena.resident_bytes)
            time.sleep(0.002)
        assert highest < 40 << 20
        assert [future.result() for future in futures] == [(1 << 17) + i for i in range(1000)]


def test_ulimit_256_and_a_thousand_results_kept() -> None:
    head = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n" + HEAD
    code = """
kept = [double(np.full(5000, float(i))) for i in range(1000)]
more = [worker.function("fragile:double")(np.full(600_000, float(i))) for i in range(40)]
assert all((y == 2 * i).all() for i, y in enumerate(kept)) and all((y == 2 * i).all() for i, y in enumerate(more))
print("fine", len(os.listdir("/proc/self/fd")) < 200)
"""
    with running(code, head) as one:
        output, errors = one.communicate(timeout=100)
    assert output == "fine True\n", output + errors


def test_a_client_without_descriptors_is_told_so_and_goes_on() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
held = []
try:
    while True: held.append(os.dup(0))
except OSError: pass
errors = set()
for n in (3, 1000, 3_000_000):  # the last needs a segment of its own on each side
    try: assert (double(np.ones(n)) == 2).all()
    except gw.GradwireError as error: errors.add(type(error).__name__)
print(sorted(errors))
for fd in held: os.close(fd)
print((double(np.ones(3_000_000)) == 2).all(), worker.alive)
"""
    with running(code) as one:
        output, errors = one.communicate(timeout=60)
    assert output == "['MemoryExhaustedError']\nTrue True\n", output + errors


def test_no_call_waits_for_a_line_that_cannot_be_opened() -> None:
    """ZeroMQ's own thread opens connections, and without a descriptor goes on trying."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = []
try:
    while True: held.append(os.dup(0))
except OSError: pass
def call(k):
    together.wait()
    try: ended.append(float(nap(np.full(70_000, float(k)), 0.05)[0]))
    except gw.MemoryExhaustedError: ended.append(0.0)
seen = set()
for free in range(9):
    ended, together = [], threading.Barrier(2)
    pair = [threading.Thread(target=call, args=(k,)) for k in (1, 2)]
    for thread in pair: thread.start()
    for thread in pair: thread.join()
    assert len(ended) == 2, ended
    seen.update(ended)
    os.close(held.pop())
print(sorted(seen))
"""
    with running(code, GRADWIRE_LANE="zmq") as one:
        output, errors = one.communicate(timeout=60)
    assert output == "[0.0, 1.0, 2.0]\n", output + errors


def test_a_worker_whose_code_takes_all_descriptors_lets_others_in(bridge: gw.Bridge) -> None:
    """libzmq ends a process that has none for who connects."""
    worker = bridge.worker("numpy", path=[TARGETS], threads=1)
    double, nap = worker.function("fragile:double"), worker.function("fragile:nap")
    worker.function("fragile:take_descriptors")()
    assert double.submit(np.ones(3)).result(60)[0] == 2.0  # by a lane of its own
    with ThreadPoolExecutor(3) as pool:  # by others, and by ZeroMQ
        ended = [pool.submit(nap, x, 0.05) for x in (np.ones(3), "x" * 300_000, np.ones(70_000))]
        assert [len(call.result(60)) for call in ended] == [3, 300_000, 70_000]
    worker.close()


def available_bytes() -> int:
    return read_memory().available or 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("dtype", "count"), [("float64", 275_000_000), ("int8", (1 << 31) + 10)], ids=["2.2 GB", "2**31 elements"]
)
def test_large_arrays(dtype: str, count: int) -> None:
    nbytes = count * np.dtype(dtype).itemsize
    if available_bytes() < 4 * nbytes:
        pytest.skip(f"needs {4 * nbytes >> 20} MiB of memory, {available_bytes() >> 20} are available")
    with gw.connect() as bridge:
        ends = bridge.worker("numpy", path=[TARGETS], threads=1).function("fragile:ends")
        x = np.zeros(count, dtype)
        x[0], x[-1], x[1 << 27] = 1, 2, 3
        first, last, middle, back = ends(x, 1 << 27)
        assert (first, last, middle) == (1, 2, 3) and back.shape == x.shape
        assert (back[0], back[-1], back[1 << 27]) == (1, 2, 3)
        del x, back
        gc.collect()


# ---- Security and notebooks (R57, R58, R60) ----------------------------------------------------------------------------


def test_r57_the_socket_folder_is_closed_to_others(bridge: gw.Bridge, worker: gw.Worker) -> None:
    folder = pathlib.Path(bridge._link.folder)
    about = folder.stat()
    assert stat.S_IMODE(about.st_mode) == 0o700 and about.st_uid == os.getuid()
    assert worker._connection.facts.endpoint.startswith(f"ipc://{folder}/")


def test_r57_a_pickle_is_only_bytes(
    worker: gw.Worker, remote: Callable[[str], gw.Remote], tmp_path: Any
) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/owned",)

    raw = pickle.dumps(Evil())
    assert worker.function("fragile:same")(raw) == raw
    assert not (tmp_path / "owned").exists()


NOTEBOOK = f"""
import sys
import numpy as np
import gradwire as gw
bridge = gw.connect()
worker = bridge.worker("numpy", path=[{str(TARGETS)!r}], name="model")
result = worker.function("fragile:chatter")(np.arange(3.0))
import time; time.sleep(1.0)
print(result)
"""


def test_r60_r58_in_a_notebook_the_cell_shows_what_the_worker_prints() -> None:
    jupyter_client = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    code = f"""
import sys
from jupyter_client.manager import KernelManager
manager = KernelManager()
manager._kernel_spec = None
from jupyter_client.kernelspec import KernelSpec
manager._kernel_spec = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{{connection_file}}"], language="python")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=60)
shown = {{}}
def hook(message):
    if message["msg_type"] == "stream":
        name = message["content"]["name"]
        shown[name] = shown.get(name, "") + message["content"]["text"]
for cell in ({NOTEBOOK!r}, "print(worker.function('fragile:double')(np.ones(2))); bridge.close()"):
    reply = client.execute_interactive(cell, timeout=60, output_hook=hook)
    assert reply["content"]["status"] == "ok", reply
client.stop_channels()
manager.shutdown_kernel()
print(repr(shown))
"""
    del jupyter_client
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=110
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    shown = ended.stdout.splitlines()[-1]
    assert "'stdout': '[0. 1. 2.]\\n[2. 2.]\\n'" in shown, shown
    assert "[model] by print" in shown and "[model] by descriptor" in shown, shown


def test_limits_on_descriptors_are_raised_in_broker_and_worker(bridge: gw.Bridge, worker: gw.Worker) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    assert worker.function("fragile:descriptor_limit")() >= wanted
