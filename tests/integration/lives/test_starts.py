"""How brokers and workers start, and what is said where they do not (R04, R05, R06, R58, R65)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradwire.broker_link
import gradwire.private_broker
from gradwire.broker_link import BrokerLink
from gradwire.worker_records import WorkerSpec
from gradwire_wire import control, sockets
from gradwire_wire.errors import ConnectError, ForkedError, UsageError, WorkerStartError


def failure(worker: Callable[..., Any], **what: Any) -> str:
    """The message of the WorkerStartError."""
    with pytest.raises(WorkerStartError) as caught:
        worker(**what)
    return str(caught.value)


def environ_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def session_of(pid: int) -> int:
    return os.getsid(pid)


# ---- The broker ----------------------------------------------------------------------------------------------------


def test_the_broker_is_a_process_apart(link: Any) -> None:
    pid = link._broker._process.pid
    assert session_of(pid) == pid
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{pid}/fd/2").endswith("(deleted)")
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert link._broker.token.hex() not in Path(f"/proc/{pid}/cmdline").read_text()


def test_the_broker_has_loaded_no_numpy(link: Any) -> None:
    maps = Path(f"/proc/{link._broker._process.pid}/maps").read_text()
    assert "zmq" in maps
    assert "numpy" not in maps


def test_where_no_thread_can_be_started_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq would end the process where it cannot start its own."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sockets.context()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ConnectError, match=r"needs threads of its own.*pids\.max"):
        BrokerLink.start_private(60.0)
    monkeypatch.setattr(sockets, "_contexts", {})
    with pytest.raises(ConnectError, match=r"needs threads of its own.*pids\.max"):
        BrokerLink.start_private(60.0)
    assert not sockets._contexts


def test_its_folder_is_private_and_its_own(link: Any) -> None:
    folder = link._broker.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.geteuid()
    link.close()
    assert not folder.exists()


def _broken_broker(tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gradwire_broker"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(code)
    real = gradwire.private_broker.lent_packages()
    monkeypatch.setattr(
        gradwire.private_broker, "lent_packages", lambda: {**real, "gradwire_broker": str(folder)}
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise RuntimeError('no way')", "RuntimeError: no way"),
        ("import sys; print('last words'); sys.exit(3)", r"(?s)exit code: 3.*last words"),
        ("import os; os.kill(os.getpid(), 9)", "it ended"),
    ],
)
def test_a_broker_that_does_not_come_up_leaves_its_words(
    tmp_path: Path, code: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _broken_broker(tmp_path, code, monkeypatch)
    with pytest.raises(ConnectError, match=expected):
        BrokerLink.start_private(60.0)


def test_a_broker_that_takes_too_long_leaves_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def main(line):\n    import time; print('well', flush=True); time.sleep(600)"
    _broken_broker(tmp_path, code, monkeypatch)
    for timeout_s in (0.5, 4.0, 30.0):  # the first in which it came to say something
        with pytest.raises(ConnectError, match=f"not ready after {timeout_s:g} s") as caught:
            BrokerLink.start_private(timeout_s)
        if "well" in str(caught.value):
            return
    pytest.fail(str(caught.value))


def test_r52_nowhere_to_put_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _broken_broker(
        tmp_path,
        "import sys; sys.path.insert(0, 'BROKER')\n"
        "from gradwire_wire.lifeline import CouldNot, Lifeline\n"
        "def main(line): Lifeline.inherited(line).send_nowait(CouldNot('there is no folder for sockets'))",
        monkeypatch,
    )
    with pytest.raises(ConnectError, match="there is no folder for sockets"):
        BrokerLink.start_private(60.0)


@pytest.mark.parametrize("tmpdir", ["/tmp/" + "x" * 150, "/nowhere", "relative"])
def test_r52_a_useless_tmpdir(program: Callable[..., Any], tmpdir: str) -> None:
    one = program(
        "standin.worker(standin.link()); print('fine')", env={"TMPDIR": tmpdir, "XDG_RUNTIME_DIR": tmpdir}
    )
    assert one.end()[:2] == (0, "fine\n")


def test_no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ConnectError, match="does not know its interpreter"):
        BrokerLink.start_private(5.0)


def test_r57_strangers_are_refused_and_nonsense_is_survived(link: Any, worker: Callable[..., Any]) -> None:
    dealer = sockets.connect_dealer(link._broker.address, b"stranger", 60_000)
    try:
        for frames, kind in (
            ([control.pack(control.ShutDown(1.0))], "ConnectError"),
            ([control.pack(control.Attach(control.PROTOCOL, b"wrong", 1))], "ConnectError"),
            ([control.pack(control.Attach(99, link._broker.token, 1))], "VersionMismatchError"),
            ([b"\x00\xff"], "ProtocolError"),
            ([b"a", b"b"], "ProtocolError"),
        ):
            dealer.send_multipart(frames)
            answer = control.unpack(dealer.recv())
            assert (type(answer), answer.kind) == (control.Refused, kind)
        dealer.send(control.pack(control.Attach(control.PROTOCOL, link._broker.token, 1)))
        assert isinstance(control.unpack(dealer.recv()), control.Attached)
        dealer.send(control.pack(control.Attached(1, 1)))  # not for the broker to hear
    finally:
        dealer.close(0)
    assert worker().pid


# ---- What a worker is started with ---------------------------------------------------------------------------------


def test_a_worker_is_a_process_apart(worker: Callable[..., Any]) -> None:
    facts = worker()
    assert session_of(facts.pid) == facts.pid
    assert os.readlink(f"/proc/{facts.pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{facts.pid}/fd/1") == os.readlink(f"/proc/{facts.pid}/fd/2")
    command = Path(f"/proc/{facts.pid}/cmdline").read_text()
    assert "gradwire worker numpy" in command
    assert facts.token.hex() not in command
    assert len(facts.incarnation) == 16
    assert len(os.fsencode(facts.tether_path)) <= 107
    assert facts.endpoint.startswith("ipc:///")
    assert facts.info["executable"] == sys.executable
    assert facts.info["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")


def test_r05_the_callers_environment_is_cleaned(
    worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = {
        "PYTHONPATH": "/bogus",
        "PYTHONHOME": "/bogus",
        "VIRTUAL_ENV": "/bogus",
        "CONDA_PREFIX": "/bogus",
    }
    for name, value in {**callers, "LD_LIBRARY_PATH": "/bogus", "KEPT": "yes"}.items():
        monkeypatch.setenv(name, value)
    seen = worker(env={"LD_LIBRARY_PATH": "/right"}).info["environ"]
    assert not callers.keys() & seen.keys()
    assert (seen["LD_LIBRARY_PATH"], seen["KEPT"]) == ("/right", "yes")
    assert seen["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_r05_the_user_site_is_off(worker: Callable[..., Any]) -> None:
    worker(serving="import sys; assert sys.flags.no_user_site and not sys.flags.isolated")


def test_r04_threads_are_shared_out(worker: Callable[..., Any]) -> None:
    available = len(os.sched_getaffinity(0))
    for n in (1, 2, 3):
        facts = worker()
        assert facts.info["threads"] == max(1, available // n)
        assert environ_of(facts.pid)["OMP_NUM_THREADS"] == str(max(1, available // n))
    assert environ_of(worker(threads=5).pid)["MKL_NUM_THREADS"] == "5"
    by_env = worker(env={"OMP_NUM_THREADS": "6"})
    assert (by_env.info["threads"], by_env.info["environ"]["OMP_NUM_THREADS"]) == (None, "6")


def test_r04_ranks_of_one_machine_do_not_each_take_all_of_it(
    worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun tells each of them to keep to one thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    facts = worker(name="rank")
    assert (facts.info["threads"], environ_of(facts.pid)["MKL_NUM_THREADS"]) == (1, "1")
    assert worker(name="told", threads=2).info["threads"] == 2


def test_the_descriptor_limit_is_raised(program: Callable[..., Any]) -> None:
    one = program("""
        import resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        link = standin.link()
        for pid in (link._broker._process.pid, standin.worker(link).pid):
            print(resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] >= min(hard, 4096))
        """)
    assert one.end()[1] == "True\nTrue\n"


def test_inherited_signals_are_reset(program: Callable[..., Any]) -> None:
    """An ignored SIGCHLD turns exit code 7 into 0; a blocked SIGTERM would never come; an ignored SIGINT neither."""
    one = program("""
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD])
        link = standin.link()
        check = "import signal as s; assert s.getsignal(s.SIGINT) is s.default_int_handler; assert not s.pthread_sigmask(s.SIG_BLOCK, ()); assert s.getsignal(s.SIGUSR1) is s.SIG_DFL; os = __import__('os'); os._exit(7)"
        print(link.death_of(standin.worker(link, serving=check).incarnation, 60)[:2])
        """)
    assert one.end()[1] == "(7, None)\n"


def test_names_are_given_and_taken(worker: Callable[..., Any]) -> None:
    assert [worker().name, worker().name, worker(name="mine").name] == ["numpy", "numpy-2", "mine"]
    with pytest.raises(UsageError, match="there is a worker 'mine' already; give another name="):
        worker(name="mine")


# ---- Folders -------------------------------------------------------------------------------------------------------


def test_the_users_folders_join_after_the_framework(
    worker: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("numpy", "json", "socket", "zmq", "gradwire_wire", "gradwire_workers", "typing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "models.py").write_text("HERE = 1")
    monkeypatch.chdir(tmp_path)
    code = "import sys, os, models, numpy; assert sys.path[0] == os.getcwd(); numpy.zeros(3)"
    worker(importing="import numpy", serving=code)


def test_path_and_cwd_are_the_users(worker: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    code = "import sys, os; assert [os.path.basename(p) for p in (os.getcwd(), *sys.path[:2])] == ['three', 'one', 'two']"
    worker(serving=code, path=[f"{tmp_path}/one", f"{tmp_path}/two"], cwd=f"{tmp_path}/three")
    assert "no folder" in failure(worker, cwd=f"{tmp_path}/four")


# ---- Interpreters --------------------------------------------------------------------------------------------------


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """An interpreter with nothing installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=60)
    return str(tmp_path / "bare" / "bin" / "python")


def borrow(python: str, *modules: str) -> None:
    """Let an environment have some packages of this one."""
    site = next(Path(python).parents[1].glob("lib/python*/site-packages"))
    for module in modules:
        origin = Path(__import__(module).__file__).parent  # type: ignore[arg-type]
        for path in (origin, *origin.parent.glob(f"{module}.libs"), *origin.parent.glob(f"py{module}.libs")):
            (site / path.name).symlink_to(path)


def test_r65_missing_packages_are_named_with_the_command_that_installs_them(
    worker: Callable[..., Any], bare_python: str
) -> None:
    text = failure(worker, python=bare_python)
    assert (
        f"has no pyzmq and msgpack and numpy. Install with: {bare_python} -m pip install pyzmq msgpack numpy"
        in text
    )
    borrow(bare_python, "zmq", "numpy")
    text = failure(worker, python=bare_python)
    assert f"has no msgpack. Install with: {bare_python} -m pip install msgpack\n" in text
    site = next(Path(bare_python).parents[1].glob("lib/python*/site-packages"))
    (site / "msgpack.py").write_text("version = (0, 6, 2)\n")
    text = failure(worker, python=bare_python)
    assert (
        "has msgpack 0.6.2, and 1.0 or newer is needed. "
        f"Install with: {bare_python} -m pip install 'msgpack>=1.0'\n" in text
    )
    (site / "msgpack.py").unlink()
    borrow(bare_python, "msgpack")
    facts = worker(python=bare_python)
    assert facts.info["executable"] == bare_python


def test_r65_what_fails_where_nothing_can_be_printed_is_said(
    worker: Callable[..., Any], bare_python: str
) -> None:
    """As under some supervisors, and by an environment's own sitecustomize."""
    borrow(bare_python, "zmq", "numpy")
    site = next(Path(bare_python).parents[1].glob("lib/python*/site-packages"))
    (site / "sitecustomize.py").write_text("import sys\nsys.stdout = None\nsys.stderr.close()\n")
    (site / "msgpack.py").write_text("raise RuntimeError('a broken package')\n")
    assert "RuntimeError: a broken package" in failure(worker, python=bare_python)
    (site / "msgpack.py").unlink()
    borrow(bare_python, "msgpack")
    assert worker(python=bare_python).info["executable"] == bare_python


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_r65_a_missing_framework_is_named(
    worker: Callable[..., Any], link: Any, bare_python: str, framework: str
) -> None:
    borrow(bare_python, "zmq", "numpy", "msgpack")
    with pytest.raises(
        WorkerStartError, match=f"has no {framework}. Install with: {bare_python} -m pip install {framework}"
    ):
        link.start_worker(WorkerSpec(framework, python=bare_python))


def test_an_unknown_framework_is_refused(link: Any) -> None:
    with pytest.raises(UsageError, match="no framework 'desk'; there are torch, tensorflow, jax, numpy"):
        link.start_worker(WorkerSpec("desk"))


def test_r06_a_relative_path_and_a_link(
    worker: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(sys.executable).parents[1])
    assert worker(python="bin/python").info["executable"] == str(Path(sys.executable).parent / "python")


def test_r65_not_an_interpreter(worker: Callable[..., Any], tmp_path: Path) -> None:
    assert "there is no interpreter at /no/python" in failure(worker, python="/no/python")
    assert "Is that a Python interpreter?" in failure(worker, python="/bin/true")
    text = tmp_path / "text"
    text.write_text("not a program")
    text.chmod(0o755)
    assert "Exec format error: neither a program" in failure(worker, python=str(text))
    text.write_bytes(b"#!/bin/sh\r\nexec true\r\n")
    assert "as files from Windows have it" in failure(worker, python=str(text))


def test_r65_what_is_too_long_to_be_handed_over(worker: Callable[..., Any], tmp_path: Path) -> None:
    assert "its environment is too large" in failure(worker, env={"LONG": "x" * (1 << 18)})
    assert "path= and what it is to load may have" in failure(worker, path=[str(tmp_path)] * 20_000)


def test_a_script_that_stands_for_an_interpreter(worker: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    worker(python=str(script))
    script.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    assert "let it end with: exec" in failure(worker, python=str(script))


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.8"])
def test_r65_an_old_interpreter(worker: Callable[..., Any], version: str) -> None:
    from gradwire_wire.interpreters import NoInterpreter, find_interpreter

    try:
        find_interpreter(version, os.environ)
    except NoInterpreter:
        pytest.skip(f"there is no Python {version} here")
    assert f"gradwire needs Python 3.9 or newer, and this is Python {version}." in failure(
        worker, python=version
    )


# ---- Starts that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("importing", "expected"),
    [
        (
            "import sys; print('bye'); sys.exit(3)",
            r"(?s)exit code 3\) while importing numpy.*command: .*ended: exit code 3.*bye",
        ),
        ("import os; os._exit(3)", r"exit code 3\) while importing numpy"),
        ("import os; os.kill(os.getpid(), 9)", r"signal SIGKILL\) while importing numpy\. .*memory runs out"),
        (
            "import ctypes; ctypes.string_at(0)",
            r"(?s)signal SIGSEGV.*native code.*Segmentation fault.*most recent call first",
        ),
        (
            "raise ImportError('libcudnn.so.9: cannot open')",
            r"(?s)importing numpy failed: ImportError: libcudnn.so.9.*Traceback",
        ),
        (
            "import absent_part",
            r"(?s)ModuleNotFoundError.*lacks absent_part; perhaps: .* -m pip install absent_part",
        ),
        (
            "def prepare(*_):\n    raise ValueError('no such device')",
            "numpy could not be set up: ValueError: no such device",
        ),
    ],
)
def test_r65_each_failure_says_what_it_was(worker: Callable[..., Any], importing: str, expected: str) -> None:
    assert re.search(expected, failure(worker, importing=importing))


def test_r65_a_start_that_takes_too_long_says_where_it_hung(worker: Callable[..., Any]) -> None:
    hangs = "def hang():\n    import time; time.sleep(600)\nhang()"
    for start_timeout in (1.0, 8.0, 30.0):  # the first in which it came to where it hangs
        text = failure(worker, importing=hangs, start_timeout=start_timeout)
        assert f"was not ready after {start_timeout:g} s; it was " in text
        if "in hang" in text:
            break
    assert "it was importing numpy" in text and "in hang" in text
    assert (
        "ended: by gradwire, " in text and "SIGKILL" not in text
    )  # which would be somebody else's, or the kernel's


def test_r65_a_start_that_may_take_for_ever_is_not_the_end_of_the_broker(worker: Callable[..., Any]) -> None:
    """Sent as it is by whoever does not check it: a shared broker's other clients would lose their workers."""
    assert worker(start_timeout=1e300).pid != worker().pid


def test_r65_a_slow_start_says_how_far_it_is(
    worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gradwire.broker_link, "FIRST_PROGRESS_S", 0.2)
    monkeypatch.setattr(gradwire.broker_link, "NEXT_PROGRESS_S", 0.2)
    start = time.monotonic()
    worker(importing="import time; time.sleep(1.5)")
    most = int((time.monotonic() - start) / 0.2)
    shown = capsys.readouterr().err
    assert 2 <= shown.count("worker 'numpy' is still importing numpy") <= most, shown


def test_an_interrupted_wait_ends_the_worker(
    link: Any, worker: Callable[..., Any], until: Callable[..., Any], tmp_path: Path
) -> None:
    note = tmp_path / "pid"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt_once_it_imports() -> None:
        until(lambda: note.exists() and note.read_text())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    thread = threading.Thread(target=interrupt_once_it_imports)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            worker(
                importing=f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
            )
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)
    pid = int(note.read_text())
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_several_start_at_once(link: Any, standin: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        facts = list(pool.map(lambda _: standin.worker(link), range(4)))
    assert len({one.incarnation for one in facts}) == len({one.name for one in facts}) == 4


# ---- The program ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_r58_the_programs_main_is_never_run_again(program: Callable[..., Any], how: str) -> None:
    one = program("print('once')\nlink = standin.link()\nstandin.worker(link)\nlink.close()", how=how)
    assert one.end() == (0, "once\n", "")


def test_a_forked_child_owns_nothing_and_harms_nothing(program: Callable[..., Any]) -> None:
    one = program("""
        link = standin.link()
        facts = standin.worker(link)
        child = os.fork()
        if not child:
            for use in (lambda: standin.worker(link), lambda: link.death_of(facts.incarnation), lambda: link.stop_worker(facts.incarnation)):
                try: use()
                except Exception as error: print(type(error).__name__, flush=True)
            link.close()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(link.death_of(facts.incarnation), bool(standin.worker(link).pid))
        """)
    code, output, errors = one.end()
    assert (code, output) == (0, "ForkedError\n" * 3 + "None True\n"), errors
    assert ForkedError.__name__ == "ForkedError"


def test_no_descriptor_is_passed_on(worker: Callable[..., Any]) -> None:
    """What the program has open stays with it; a worker has its own few."""
    with socket.socket() as mine:
        mine.set_inheritable(True)
        inode = os.readlink(f"/proc/self/fd/{mine.fileno()}")
        pid = worker().pid
        there = []
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                there.append(os.readlink(fd))
    assert inode not in there
    assert len(there) < 10, there
