"""Everyone leaves when their owner goes, whatever is killed, and whatever they are doing (R51, R53, R56, R61).

What would hold them up sleeps longer than pytest lets a test take, so no clock decides.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# What the worker is doing when the kill comes.
LOADS = {
    "idle": {},
    "holding the GIL in C": {"serving": "import ctypes; ctypes.PyDLL(None).sleep(600)"},
    "in C without the GIL": {"serving": "import time; time.sleep(600)"},
    "with a child": {"serving": "import subprocess; subprocess.Popen(['sleep', '600'])"},
    "with a forked child": {"serving": "import os, time\nif not os.fork(): time.sleep(600); os._exit(0)"},
    "ignoring signals": {
        "serving": "import signal\nfor s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)"
    },
}

PROGRAM = """
link = standin.link()
facts = standin.worker(link, **{load!r})
{before}
time.sleep(0.2)
print(link._broker._process.pid, facts.pid, flush=True)
time.sleep(600)
"""
FORK = "child = os.fork()\nif not child: time.sleep(600); os._exit(0)"


def kill(victims: str, pids: dict[str, int]) -> None:
    for victim in victims.split("+"):
        with contextlib.suppress(ProcessLookupError):  # others may have ended it by now
            os.kill(pids[victim], signal.SIGKILL)


KILLS = [(victims, load) for victims in ("program", "broker+program") for load in LOADS]
KILLS += [(victims, "idle") for victims in ("worker+program", "program+broker+worker")]


@pytest.mark.parametrize(("victims", "load"), KILLS)
def test_r51_nothing_is_left_after_a_kill(
    program: Callable[..., Any], sweep_for_the_killed: Callable[[], None], victims: str, load: str
) -> None:
    one = program(PROGRAM.format(load=LOADS[load], before=""))
    broker, worker = map(int, one.line().split())
    pids = {"program": one.process.pid, "broker": broker, "worker": worker}
    kill(victims, pids)
    # With program and broker gone, nobody is there to end what the worker had started.
    alone = "broker" in victims and "child" in load
    assert not one.wait_gone(only=pids.values() if alone else None)
    if "broker" in victims:
        sweep_for_the_killed()


@pytest.mark.parametrize("load", LOADS)
def test_r51_a_killed_broker_leaves_the_program_alone(
    program: Callable[..., Any], until: Any, load: str
) -> None:
    one = program(PROGRAM.format(load=LOADS[load], before=""))
    broker, _ = map(int, one.line().split())
    opened = []
    for fd in Path(f"/proc/{broker}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            opened.append(os.readlink(fd))
    root = os.environ["XDG_RUNTIME_DIR"]
    (folder,) = [path for path in opened if path.startswith(root) and os.path.isdir(path)]
    os.kill(broker, signal.SIGKILL)
    assert not one.wait_gone(but=(one.process.pid,))
    until(lambda: not os.path.exists(folder))  # which is the program's doing
    assert one.process.poll() is None


@pytest.mark.parametrize("victims", ["program", "broker+program", "worker+program"])
def test_r51_a_forked_child_of_the_program_keeps_nothing_alive(
    program: Callable[..., Any], sweep_for_the_killed: Callable[[], None], victims: str
) -> None:
    one = program(PROGRAM.format(load={}, before=FORK))
    broker, worker = map(int, one.line().split())
    kill(victims, {"program": one.process.pid, "broker": broker, "worker": worker})
    (child,) = set(one.left()) - {broker, worker, one.process.pid}
    assert not one.wait_gone(but=(child,))
    assert list(one.left()) == [child]
    if "broker" in victims:
        sweep_for_the_killed()


@pytest.mark.parametrize("victims", ["program", "broker", "program+broker"])
def test_r56_killed_while_a_worker_imports_its_framework(
    program: Callable[..., Any], sweep_for_the_killed: Callable[[], None], victims: str, until: Any
) -> None:
    one = program("""
        link = standin.link()
        print(link._broker._process.pid, flush=True)
        standin.worker(link, importing="import ctypes; ctypes.PyDLL(None).sleep(600)")
        """)
    broker = int(one.line())
    (worker,) = until(lambda: one.pids("gradwire worker"))
    until(
        lambda: (
            "libffi" in Path(f"/proc/{worker}/maps").read_text()
            or "_ctypes" in Path(f"/proc/{worker}/maps").read_text()
        )
    )
    kill(victims, {"program": one.process.pid, "broker": broker})
    assert not one.wait_gone()
    if victims == "program+broker":
        sweep_for_the_killed()


def test_killed_while_the_broker_starts(program: Callable[..., Any], until: Any) -> None:
    for after_s in (0.0, 0.02, 0.05, 0.1):
        one = program("print('on', flush=True); link = standin.link(); standin.worker(link); time.sleep(600)")
        one.line()
        time.sleep(after_s)
        one.process.kill()
        assert not one.wait_gone()


def all_stand_still(pid: int) -> bool:
    """Whether every thread of the process is stopped."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # one has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def test_r51_what_was_left_by_all_killed_is_swept(program: Callable[..., Any], until: Any) -> None:
    import select
    import shutil
    import tempfile

    root = Path(tempfile.mkdtemp(prefix="gws-", dir="/tmp"))
    try:
        env = {"XDG_RUNTIME_DIR": str(root)}
        one = program(PROGRAM.format(load={}, before=""), env=env)
        broker, worker = map(int, one.line().split())
        pids = {"program": one.process.pid, "broker": broker, "worker": worker}
        ends = [os.pidfd_open(pid) for pid in (broker, worker)]
        for pid in (one.process.pid, broker):  # neither tidies up in the time between the two kills
            os.kill(pid, signal.SIGSTOP)
            until(lambda pid=pid: all_stand_still(pid))
        kill("broker+program+worker", pids)
        assert not one.wait_gone()
        for end in ends:  # with their last threads, which have the folder locked
            assert select.select([end], [], [], 60.0)[0]
            os.close(end)
        (left,) = root.iterdir()
        other = program(
            "link = standin.link(); print(*os.listdir(os.environ['XDG_RUNTIME_DIR'])); link.close()", env=env
        )
        code, output, _ = other.end()
        assert (code, len(output.split()), left.name in output) == (0, 1, False)
        assert list(root.iterdir()) == []
    finally:
        shutil.rmtree(root)


# ---- The program ends on its own -----------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["idle", "holding the GIL in C"])
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('at top level')", 1, "ValueError: at top level"),
        ("os._exit(4)", 4, ""),
        ("os.kill(facts.pid, 9); sys.exit(5)", 5, ""),
        ("os.kill(link._broker._process.pid, 9); sys.exit(6)", 6, ""),
        ("os.kill(link._broker._process.pid, signal.SIGSTOP); sys.exit(7)", 7, ""),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_r53_it_ends_at_once_with_its_own_exit_code(
    program: Callable[..., Any], end: str, code: int, words: str, load: str
) -> None:
    one = program(
        f"link = standin.link()\nfacts = standin.worker(link, **{LOADS[load]!r})\nprint('up', flush=True)\n{end}"
    )
    one.line()
    ended, _, errors = one.end()
    assert ended == code
    assert words in errors
    assert errors.count("Traceback") == (1 if words else 0), errors
    assert not one.wait_gone()


def test_r53_several_links_end_together(program: Callable[..., Any]) -> None:
    one = program(
        """
        links = [standin.link() for _ in range(4)]
        for link in links: standin.worker(link, serving="import time; time.sleep(600)")
        print("up", flush=True)
        """
    )
    one.line()
    assert one.end()[0] == 0
    assert not one.wait_gone()


def test_a_program_that_becomes_another_leaves_its_broker(program: Callable[..., Any]) -> None:
    """After exec the pid lives on, and so does nobody who would use the broker."""
    one = program("""
        link = standin.link()
        facts = standin.worker(link)
        print("up", flush=True)
        os.execv("/bin/sleep", ["sleep", "600"])
        """)
    one.line()
    assert not one.wait_gone(but=(one.process.pid,))
    assert one.process.poll() is None


def test_r56_a_bridge_opened_in_a_thread_that_ends(program: Callable[..., Any]) -> None:
    one = program("""
        import threading
        made = []
        def open_it():
            made.append(standin.link())
            made.append(standin.worker(made[0]))
        thread = threading.Thread(target=open_it)
        thread.start(); thread.join()
        link, facts = made
        print(link.death_of(facts.incarnation, 0.5), os.path.exists(f"/proc/{facts.pid}"), standin.worker(link).name)
        """)
    assert one.end()[1] == "None True numpy-2\n"


def test_r61_three_at_once_do_not_meet(program: Callable[..., Any]) -> None:
    code = "link = standin.link(); facts = standin.worker(link); print(link._broker.folder, facts.incarnation.hex()); time.sleep(1)"
    ended = [one.end() for one in [program(code) for _ in range(3)]]
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    assert len({output.split()[0] for _, output, _ in ended}) == 3


# ---- Nothing to do -------------------------------------------------------------------------------------------------


def test_idle_processes_use_no_processor(program: Callable[..., Any]) -> None:
    """Once they have come to rest: who looks for something again and again does so for ever."""
    one = program("""
        link = standin.link()
        facts = standin.worker(link)
        link.every_second(lambda: None)
        def ticks(pid):
            fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])
        pids = (os.getpid(), link._broker._process.pid, facts.pid)
        for _ in range(10):
            before = [ticks(pid) for pid in pids]
            time.sleep(3)
            used = [ticks(pid) - was for pid, was in zip(pids, before)]
            if max(used) <= 1: break
        print(*used)
        """)
    used = [int(n) for n in one.end()[1].split()]
    assert max(used) <= 1, used  # of 300 ticks


def test_nothing_grows_over_many_lives(program: Callable[..., Any]) -> None:
    one = program("""
        import threading
        def held(pid):
            return len(os.listdir(f"/proc/{pid}/fd"))
        link = standin.link()
        broker = link._broker._process.pid
        def life():
            facts = standin.worker(link)
            link.stop_worker(facts.incarnation)
        def all_of_it():
            return held(os.getpid()), held(broker), threading.active_count(), len(os.listdir(link._broker.folder))
        for _ in range(3): life()
        before = all_of_it()
        for _ in range(12): life()
        for _ in range(3000):  # ZeroMQ's threads, and the broker, may be at what is left of the last one
            after = all_of_it()
            if after[3] == 1 and all(now <= was for now, was in zip(after, before)): break
            time.sleep(0.01)
        print(after[3] == 1 and all(now <= was for now, was in zip(after, before)), before, after)
        """)
    assert one.end()[1].startswith("True ")
