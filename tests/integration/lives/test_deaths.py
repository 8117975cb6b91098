"""How deaths are noticed and told, and how workers are ended and interrupted (R55, R62, the broker's own death)."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradwire.worker_records import Death
from gradwire_wire.errors import ClosedError, ConnectError, WorkerStartError

# What would be waited for, were it waited for, takes longer than pytest lets a test take; what is waited for is a backstop.
SLEEP = "import time; time.sleep(600)"
BACKSTOP_S = 60.0


def runs(pid: int) -> bool:
    """Whether the process lives and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def number_in(path: Path) -> int:
    """What another process writes there, once it has."""
    deadline = time.monotonic() + BACKSTOP_S
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())


# ---- Told ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("serving", "exit_code", "name", "words"),
    [
        ("print('last words'); raise SystemExit(7)", 7, None, "last words"),
        ("import os; os.write(2, b'last words'); os._exit(0)", 0, None, "last words"),
        ("import os; os.kill(os.getpid(), 9)", None, "SIGKILL", ""),
        ("import ctypes; ctypes.string_at(0)", None, "SIGSEGV", "most recent call first"),
        ("raise RuntimeError('lost')", 1, None, "RuntimeError: lost"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)", None, "SIG37", ""),
    ],
)
def test_r55_a_death_is_told(
    link: Any, worker: Callable[..., Any], serving: str, exit_code: int | None, name: str | None, words: str
) -> None:
    death = link.death_of(worker(serving=serving).incarnation, BACKSTOP_S)
    assert (death.exit_code, death.signal) == (exit_code, name)
    assert words in death.output
    assert "gradwire worker numpy" in death.command


def test_r55_a_kill_is_told_in_every_life(link: Any, worker: Callable[..., Any]) -> None:
    for _ in range(3):
        facts = worker()
        os.kill(facts.pid, signal.SIGKILL)
        command = link.death_of(facts.incarnation, BACKSTOP_S).command
        assert link.death_of(facts.incarnation) == Death(None, "SIGKILL", "", command)


def test_nothing_is_known_of_the_living_and_the_wait_is_bounded(
    link: Any, worker: Callable[..., Any]
) -> None:
    facts = worker()
    assert link.death_of(facts.incarnation) is None
    assert link.death_of(facts.incarnation, 0.2) is None
    assert link.death_of(b"unheard of", 0.2) is None


def test_all_who_wait_wake(link: Any, worker: Callable[..., Any]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    facts = worker()
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(link.death_of, facts.incarnation, BACKSTOP_S) for _ in range(5)]
        time.sleep(0.1)
        os.kill(facts.pid, signal.SIGKILL)
        assert [one.result().signal for one in waiting] == ["SIGKILL"] * 5


def test_the_last_lines_are_bounded(link: Any, worker: Callable[..., Any]) -> None:
    death = link.death_of(
        worker(serving="for i in range(100000): print(i)\nraise SystemExit(1)").incarnation, BACKSTOP_S
    )
    lines = death.output.splitlines()
    assert lines[-1] == "99999"
    assert len(lines) <= 101
    assert "characters before this are not shown" in lines[0]


# ---- What a worker had started -------------------------------------------------------------------------------------

GRANDCHILD = """
import subprocess
child = subprocess.Popen(["sh", "-c", "{before}exec sleep 600"], start_new_session={apart})
open({note!r}, "w").write(str(child.pid))
print("leaving", flush=True)
import os; os._exit(4)
"""


@pytest.mark.parametrize("before", ["", "trap '' TERM; "], ids=["", "that ignores SIGTERM"])
def test_a_grandchild_in_the_group_is_ended(
    before: str, link: Any, worker: Callable[..., Any], tmp_path: Path, until: Any
) -> None:
    facts = worker(serving=GRANDCHILD.format(apart=False, before=before, note=str(tmp_path / "pid")))
    assert link.death_of(facts.incarnation, BACKSTOP_S).exit_code == 4
    until(lambda: not runs(number_in(tmp_path / "pid")))


NAMED_MEMORY = """
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
open({note!r}, "w").write(memory._name + " ")
"""


@pytest.mark.parametrize("victim", ["worker", "broker"])
def test_r51_named_memory_of_user_code_is_freed_by_its_tracker(
    victim: str, link: Any, worker: Callable[..., Any], tmp_path: Path, until: Any
) -> None:
    """Python's tracker is a grandchild: killed at once, it would leave what the killed worker's code had in /dev/shm."""
    note = tmp_path / "name"
    facts = worker(serving=NAMED_MEMORY.format(note=str(note)) + SLEEP)
    until(lambda: note.exists() and note.read_text().endswith(" "))
    memory = Path(f"/dev/shm{note.read_text().strip()}")
    assert memory.exists()
    os.kill(facts.pid if victim == "worker" else link._broker._process.pid, signal.SIGKILL)
    assert link.death_of(facts.incarnation, BACKSTOP_S).signal == "SIGKILL"
    until(lambda: not memory.exists())


def test_a_grandchild_that_holds_the_output_holds_up_nothing(
    link: Any, worker: Callable[..., Any], tmp_path: Path
) -> None:
    facts = worker(serving=GRANDCHILD.format(apart=True, before="", note=str(tmp_path / "pid")))
    death = link.death_of(facts.incarnation, BACKSTOP_S)
    assert (death.exit_code, death.output) == (4, "leaving")
    os.kill(number_in(tmp_path / "pid"), signal.SIGKILL)


# ---- Ended on request ----------------------------------------------------------------------------------------------


ENDS = {
    "": (0, None),  # asked
    SLEEP: (None, "SIGTERM"),  # terminated
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP: (None, "SIGKILL"),
    "import ctypes; ctypes.PyDLL(None).sleep(600)": (None, "SIGTERM"),  # C code that holds the GIL
    "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)": (None, "SIGKILL"),
    "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()": (None, "SIGTERM"),
}


def test_stop_asks_terminates_kills(link: Any, worker: Callable[..., Any]) -> None:
    """All at once: each step has its time, however long the next may take on a busy machine."""
    from concurrent.futures import ThreadPoolExecutor

    lives = [worker(serving=serving) for serving in ENDS]
    time.sleep(0.1)
    with ThreadPoolExecutor(len(lives)) as pool:
        list(pool.map(lambda facts: link.stop_worker(facts.incarnation, 10.0), lives))
    assert [link.death_of(facts.incarnation)[:2] for facts in lives] == list(ENDS.values())
    assert not any(runs(facts.pid) for facts in lives)
    link.stop_worker(lives[0].incarnation, 1.0)


def test_stop_of_the_unknown_and_after_the_end(link: Any) -> None:
    link.stop_worker(b"unheard of")
    link.close()
    link.close()
    link.stop_worker(b"unheard of")


def test_a_workers_exit_handlers_run_when_it_is_asked(
    link: Any, worker: Callable[..., Any], tmp_path: Path
) -> None:
    note = tmp_path / "note"
    facts = worker(serving=f"import atexit; atexit.register(lambda: open({str(note)!r}, 'w').write('done'))")
    link.stop_worker(facts.incarnation)
    assert note.read_text() == "done"


def test_r62_interrupt_reaches_the_main_thread(link: Any, worker: Callable[..., Any], tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"""
import os, signal, time
from gradwire_wire.process import INTERRUPT
signal.signal(INTERRUPT, signal.default_int_handler)
try:
    open({str(note)!r}, "w").write(str(os.getpid()))
    time.sleep(600)
except KeyboardInterrupt:
    raise SystemExit(5)
"""
    facts = worker(serving=code)
    assert number_in(note) == facts.pid
    link.interrupt(facts.incarnation)
    assert link.death_of(facts.incarnation, BACKSTOP_S).exit_code == 5
    link.interrupt(facts.incarnation)
    link.interrupt(b"unheard of")


# ---- The link ------------------------------------------------------------------------------------------------------


def test_a_closed_link_says_so_and_ends_its_workers(link: Any, worker: Callable[..., Any]) -> None:
    pids = [worker().pid, worker(serving=SLEEP).pid, link._broker._process.pid]
    link.close()
    assert not any(map(runs, pids))
    assert not link._channel.thread.is_alive
    with pytest.raises(ClosedError):
        worker()


def test_extra_descriptors_are_watched_until_they_are_not(link: Any, until: Any) -> None:
    reader, writer = os.pipe()
    got: list[bytes] = []
    link.watch(reader, lambda: got.append(os.read(reader, 100)))
    os.write(writer, b"one")
    until(lambda: got == [b"one"])
    link.unwatch(reader)
    os.write(writer, b"two")
    time.sleep(0.1)
    assert got == [b"one"]
    os.close(reader)
    os.close(writer)


def test_a_callback_that_raises_ends_only_itself(link: Any, worker: Callable[..., Any], until: Any) -> None:
    reader, writer = os.pipe()
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise ValueError("of the callback")

    with contextlib.redirect_stderr(io.StringIO()) as said:
        link.watch(reader, fail)
        os.write(writer, b"one")
        until(lambda: calls)
        time.sleep(0.2)
        assert len(calls) == 1
        assert worker().pid
        until(lambda: "of the callback" in said.getvalue())
    link.unwatch(reader)
    os.close(reader)
    os.close(writer)


def test_ticks_come_every_second(link: Any, until: Any) -> None:
    ticks: list[float] = []
    start = time.monotonic()
    link.every_second(lambda: ticks.append(time.monotonic() - start))
    until(lambda: len(ticks) >= 2)
    assert all(n <= at + 1 for n, at in enumerate(ticks, 1)), ticks


def test_unwatch_from_the_links_own_thread_does_not_wait(
    link: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.link_thread.JOIN_S", 600.0)
    reader, writer = os.pipe()
    done: list[bool] = []

    def once() -> None:
        link.unwatch(reader)
        done.append(True)

    link.watch(reader, once)
    os.write(writer, b"one")
    until(lambda: done)
    os.close(reader)
    os.close(writer)


# ---- The broker's death --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
def test_a_killed_broker_takes_everything_along(
    link: Any, worker: Callable[..., Any], until: Any, tmp_path: Path, apart: bool
) -> None:
    code = GRANDCHILD.format(apart=apart, before="", note=str(tmp_path / "pid")).replace(
        "import os; os._exit(4)", SLEEP
    )
    facts = worker(serving=code)
    grandchild = number_in(tmp_path / "pid")
    folder = link._broker.folder
    os.kill(link._broker._process.pid, signal.SIGKILL)
    death = link.death_of(facts.incarnation, BACKSTOP_S)
    assert (death.signal, link.broker_alive) == ("SIGKILL", False)
    until(lambda: not runs(facts.pid) and not runs(grandchild) and not folder.exists())
    with pytest.raises(ConnectError, match="the broker ended"):
        worker()
    link.stop_worker(facts.incarnation)
    link.interrupt(facts.incarnation)


def test_a_start_under_way_ends_with_the_broker(
    link: Any, worker: Callable[..., Any], tmp_path: Path
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    note = tmp_path / "pid"
    importing = f"import os; open({str(note)!r}, 'w').write(str(os.getpid())); " + SLEEP
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(worker, importing=importing)
        number_in(note)
        os.kill(link._broker._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerStartError, match="the broker ended"):
            start.result(BACKSTOP_S)


def test_a_terminated_broker_ends_in_order(link: Any, worker: Callable[..., Any], until: Any) -> None:
    facts = worker()
    folder = link._broker.folder
    os.kill(link._broker._process.pid, signal.SIGTERM)
    assert link.death_of(facts.incarnation, BACKSTOP_S)[:2] == (0, None)
    until(lambda: not folder.exists() and not link.broker_alive)
