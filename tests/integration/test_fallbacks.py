"""Systems that lack what gradwire would rather have: no memfd, no files, no /proc, odd TMPDIR (R50, R52, R63)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

TARGETS = str(Path(__file__).parent / "targets")

HERE = Path(__file__).parent

PROGRAM = """
import gc, os, resource, sys
import numpy as np
import gradwire as gw
LIMIT = {limit!r}
if LIMIT:
    resource.setrlimit(*LIMIT)
with gw.connect() as bridge:
    worker = bridge.worker("numpy", path=[{targets!r}], threads=1, restart="on-failure")
    other = bridge.worker("numpy", path=[{targets!r}], threads=1)
    print(worker.info["carried_by"])
    double, second = worker.function("fragile:double"), other.function("fragile:double")
    for n in (3, 1000, 300_000, 3_000_000):
        x = np.arange(float(n))
        kept = [double(x + i) for i in range(4)]
        assert all((y == 2 * (x + i)).all() for i, y in enumerate(kept)), n
        assert (second(kept[1]) == 4 * (x + 1)).all(), n
        kept[0][0] = -1
        assert (kept[1] == 2 * (x + 1)).all() and (x == np.arange(n)).all(), n
    a = bridge.empty(50_000, "f8")
    a[:] = 5
    assert (double(a) == 10).all()
    y, pullback = worker.function("fragile:dot").vjp(x, x)
    assert (pullback(np.float64(2.0))[0] == 2 * x).all()
    del kept, y, pullback
    gc.collect()
    for _ in range(3):
        double(x)
    print(worker.stats()["lent"] <= 1)
"""


def program(limit: Any = None) -> str:
    return PROGRAM.format(limit=limit, targets=str(HERE / "targets"))


def run(code: str, *before: str, **env: str) -> tuple[str, str]:
    """What it prints and what it says; before: a program that starts it."""
    ended = subprocess.run(
        [*before, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, **env},
    )
    if ended.returncode == 77:
        pytest.skip("this system does not let a program forbid itself system calls")
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    return ended.stdout, ended.stderr


def hardened(*calls: str) -> list[str]:
    return [sys.executable, str(HERE / "hardened.py"), ",".join(calls)]


def test_r63_the_usual_way() -> None:
    assert run(program()) == ("shared memory\nTrue\n", "")


def test_r63_memfd_forbidden_everywhere() -> None:
    output, said = run(program(), *hardened("memfd_create"))
    assert output == "files\nTrue\n"
    assert said.count("gradwire: ") == 1 and "travel through files" in said and "not permitted" in said


def test_a_system_call_that_is_needed_is_named() -> None:
    code = "import gradwire as gw\ntry: gw.connect()\nexcept gw.ConnectError as error: print(error)"
    output, said = run(code, *hardened("pidfd_open"))
    assert "the system call pidfd_open is needed: Linux 5.3 or newer" in output and not said


@pytest.mark.parametrize("limit", [0, 100_000], ids=["no file", "small ones"])
def test_r63_nothing_can_be_shared(limit: int) -> None:
    """No file may have any bytes, or as many as the program's arrays, memory files included."""
    import resource

    output, said = run(program((resource.RLIMIT_FSIZE, (limit, limit))))
    assert output == "messages\nTrue\n"
    assert said.count("gradwire: ") == 1 and "travel through messages" in said and "RLIMIT_FSIZE" in said


LIMITED = """
import numpy as np
import gradwire as gw
with gw.connect() as bridge:
    worker = bridge.worker("numpy", path=[{targets!r}])
    many, limit = worker.function("fragile:many"), worker.function("fragile:limit_files")
    assert many(1).size == 1 and many(1).size == 1
    limit(100_000)
    try:
        many(100_000)
    except gw.MemoryExhaustedError as error:
        assert "needed, 100000 free (RLIMIT_FSIZE" in str(error), error
    else:
        raise SystemExit("800 KB went through a limit of 100 KB")
    assert many(10_000).sum() == 10_000 and worker.info["carried_by"] == "shared memory"
    limit(-1)
    assert many(100_000).sum() == 100_000
    print("fine")
"""


def test_r50_a_worker_whose_code_limits_files_says_so() -> None:
    """Memory that is shared counts as a file."""
    assert run(LIMITED.format(targets=str(HERE / "targets")))[0] == "fine\n"


def test_r63_lanes_switched_off_besides() -> None:
    output, _ = run(program(), *hardened("memfd_create"), GRADWIRE_LANE="zmq")
    assert output == "files\nTrue\n"


def test_r63_no_proc() -> None:
    unshare = shutil.which("unshare")
    command = [unshare or "unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody mount over /proc")
    output, _ = run(program(), *command)
    assert output == "shared memory\nTrue\n"


@pytest.fixture
def short() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gwt-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


TMPDIRS: dict[str, Callable[[Path], Path]] = {
    "of 150 characters": lambda short: short / ("x" * 150),
    "missing": lambda short: short / "missing",
    "a file": lambda short: short / "file",
    "with spaces and accents": lambda short: short / "é ü",
    "that others may write": lambda short: short / "open",
}


@pytest.mark.parametrize("kind", TMPDIRS)
def test_r52_tmpdir(kind: str, short: Path) -> None:
    path = TMPDIRS[kind](short)
    if kind == "a file":
        path.write_text("")
    elif kind != "missing":
        path.mkdir()
    if "others" in kind:
        path.chmod(0o777)
    output, said = run(program(), TMPDIR=str(path), XDG_RUNTIME_DIR="")
    assert (output, said) == ("shared memory\nTrue\n", "")


def test_r52_tmpdir_that_cannot_be_written(short: Path) -> None:
    """By a user who is not root, for whom no folder is closed."""
    if os.getuid():
        closed, before = short / "closed", []
        closed.mkdir(mode=0o500)
    else:
        setpriv = shutil.which("setpriv")
        if setpriv is None or not os.access(sys.executable, os.X_OK) or _unreadable_to_others():
            pytest.skip("root may write everywhere, and another user cannot run this interpreter")
        closed, before = short, [setpriv, "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        os.chmod(short, 0o755)
    output, _ = run(program(), *before, TMPDIR=str(closed), XDG_RUNTIME_DIR="", HOME="/nonexistent")
    assert output == "shared memory\nTrue\n"


def _unreadable_to_others() -> bool:
    """Whether another user cannot come to the interpreter or to these files."""
    roots = [Path(os.path.realpath(sys.executable)), HERE]
    return any(not folder.stat().st_mode & 0o001 for root in roots for folder in root.parents)


R50 = """
import numpy as np
import gradwire as gw
with gw.connect() as bridge:
    double = bridge.worker("numpy", path=[{targets!r}]).function("fragile:double")
    double(np.ones(1 << 17))
    for _ in range(3):
        try:
            double(np.ones(32 << 17))
        except gw.MemoryExhaustedError as error:
            text = str(error)
            assert error.retry_safe and isinstance(error, MemoryError)
            assert "free (GRADWIRE_MAX_SHARED_BYTES of this process)" in text and "free" in text and "Drop results" in text, text
            assert any(int(w) >= 32 << 20 for w in text.split() if w.isdigit()), text
        else:
            raise SystemExit("32 MB went through a limit of 16 MB")
        assert (double(np.ones(1 << 17)) == 2).all()
    print("fine")
"""


def test_r50_a_limit_of_16_mb_and_32_mb_to_send() -> None:
    limit = {"GRADWIRE_MAX_SHARED_BYTES": str(16 << 20)}
    assert run(R50.format(targets=str(HERE / "targets")), **limit)[0] == "fine\n"


R50_WORKER = """
import numpy as np
import gradwire as gw
with gw.connect() as bridge:
    worker = bridge.worker("numpy", path=[{targets!r}], env={{"GRADWIRE_MAX_SHARED_BYTES": str(16 << 20)}})
    double = worker.function("fragile:double")
    try:
        double(np.ones(32 << 17))
    except gw.MemoryExhaustedError as error:
        assert "GRADWIRE_MAX_SHARED_BYTES" in str(error) and not error.retry_safe, error
    else:
        raise SystemExit("32 MB went through a limit of 16 MB")
    kept = [double(np.full(1 << 17, float(i))) for i in range(8)]
    assert all((y == 2 * i).all() for i, y in enumerate(kept))
    try:
        bridge.worker("numpy", env={{"GRADWIRE_MAX_SHARED_BYTES": "much"}})
    except gw.WorkerStartError as error:
        assert "must be a number of bytes" in str(error), error
        print("fine")
"""


def test_r50_a_limit_of_16_mb_in_the_worker_and_32_mb_to_return() -> None:
    assert run(R50_WORKER.format(targets=str(HERE / "targets")))[0] == "fine\n"


# ---- Other users, other PID namespaces -----------------------------------------------------------------------------------

STRANGER = """
import os, sys
from gradwire_wire.errors import ConnectError
from gradwire_wire.tether import TetherClosedError, connect_tether
path = sys.argv[1]
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
try:
    tether = connect_tether(path, 5)
    tether.receive(60)
except ConnectError as error: print("ConnectError", error)
except TetherClosedError: print("hung up")
else: print("let in")
"""

CALLER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import fragile
double = fragile.remote_of(eval(sys.argv[2]), "fragile:double")
x = np.arange(100_000.0)
kept = [double(x + i) for i in range(5)]
assert all((y == 2 * (x + i)).all() for i, y in enumerate(kept))
print(double.handle._ready().exchange.carried_by, os.getpid() < 50)
"""


def as_stranger(path: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", STRANGER, path], capture_output=True, text=True, check=False, timeout=30
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_r57_another_user_is_kept_out_by_the_folder_and_by_the_kernels_word(short: Path) -> None:
    import gradwire as gw
    from gradwire_wire.tether import accept_tether, listen_tether

    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[str(HERE / "targets")], threads=1)
        assert "Permission denied" in as_stranger(worker._connection.facts.tether_path)
    os.chmod(short, 0o755)  # and were the folder open: SO_PEERCRED
    listener = listen_tether(str(short / "t"))
    os.chmod(short / "t", 0o777)
    listener.settimeout(20)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(accept_tether(listener)))
    thread.start()
    assert as_stranger(str(short / "t")) == "hung up\n"
    thread.join()
    listener.close()
    assert taken == [None]


def test_memory_is_shared_across_pid_namespaces() -> None:
    import gradwire as gw

    unshare = shutil.which("unshare")
    command = [unshare or "unshare", "--pid", "--fork", "--mount-proc"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody make a PID namespace")
    with gw.connect() as bridge:
        worker = bridge.worker("numpy", path=[str(HERE / "targets")], threads=1)
        facts = repr(list(worker._connection.facts[:6]))
        ended = subprocess.run(
            [*command, sys.executable, "-c", CALLER, str(HERE / "targets"), facts],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert ended.stdout == "shared memory True\n", ended.stderr


@pytest.mark.parametrize("lane", ["page", "zmq"])
def test_r52_sockets_that_somebody_removes(lane: str) -> None:
    """As cleaners of /tmp do. What needs no further line goes on; and nothing waits for one that cannot be opened."""
    code = f"""
import os, shutil, threading, time
import numpy as np
import gradwire as gw
with gw.connect() as bridge:
    worker = bridge.worker("numpy", path=[{TARGETS!r}], threads=1, restart="on-failure")
    double, stay = worker.function("fragile:double"), worker.function("fragile:stay_with")
    assert double(1.0) == 2.0
    shutil.rmtree(bridge._link.folder)
    assert double(1.0) == 2.0 and (double(np.ones(100_000)) == 2).all()
    # by a lane a text that is too long for it needs another line, by ZeroMQ a second call at once
    other = threading.Thread(target=lambda: stay(1.0, "SIG_IGN", "begun", "end"))
    other.start()
    while not os.path.exists("begun"): time.sleep(0.01)
    try: double("x" * 300_000) if os.environ["GRADWIRE_LANE"] != "zmq" else double(1.0)
    except gw.ConnectError as error: assert error.retry_safe and "was removed" in str(error), error
    else: raise SystemExit("it was sent")
    open("end", "w").close()
    other.join()
    assert double(1.0) == 2.0 and worker.alive
    try: worker.restart()
    except gw.WorkerStartError as error: assert "the folder of the sockets" in str(error), error
print("fine")
"""
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "GRADWIRE_LANE": lane},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=folder,
        )
    assert ended.stdout == "fine\n", ended.stdout + ended.stderr
