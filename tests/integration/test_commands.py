"""The command line, as a person and as a program use it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

import gradwire as gw
from gradwire import commands
from gradwire.broker_link import BrokerLink
from gradwire.commands import brokers, call, doctor
from gradwire.numpy_files import read_argument, write_result
from gradwire.shared_broker import card_of
from gradwire_wire.errors import UsageError


def gradwire(*arguments: str, timeout_s: float = 60.0, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; stdout and stderr as text."""
    command = [sys.executable, "-m", "gradwire", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s, **options)  # type: ignore[call-overload]


def test_every_command_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        commands.main(["--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for name in commands.COMMANDS:
        assert f"    {name} " in shown


def test_an_unknown_command_is_a_usage_error() -> None:
    done = gradwire("doktor")
    assert done.returncode == 2
    assert "doctor" in done.stderr and "Traceback" not in done.stderr


def test_an_interrupt_while_it_reads_its_own_modules_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "parser", interrupted)
    assert commands.main(["ps"]) == 130


def test_doctor_names_this_interpreter_and_what_it_has() -> None:
    done = gradwire("doctor", "--json")
    findings = json.loads(done.stdout)
    assert done.returncode == any(finding["level"] == "problem" for finding in findings)
    (own,) = [f["text"] for f in findings if f["topic"] == "interpreter" and sys.executable in f["text"]]
    assert "numpy" in own and "pyzmq" in own
    topics = {finding["topic"] for finding in findings}
    assert {"memory", "tensors", "calls", "open files", "sockets", "left-overs"} <= topics


def test_r52_doctor_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    killed = Path(os.environ["XDG_RUNTIME_DIR"]) / f"gradwire-{os.geteuid()}-0badcafe"
    killed.mkdir(mode=0o700)
    try:
        environment = {**os.environ, "TMPDIR": os.environ["XDG_RUNTIME_DIR"], "XDG_RUNTIME_DIR": str(deep)}
        done = gradwire("doctor", "--json", env={**environment, "GRADWIRE_LANE": "zmq"})
    finally:
        killed.rmdir()
    by_topic = {finding["topic"]: finding for finding in json.loads(done.stdout)}
    assert "107 are allowed" in by_topic["sockets"]["text"]
    assert "XDG_RUNTIME_DIR" in by_topic["sockets"]["remedy"]
    assert str(killed) in by_topic["left-overs"]["text"] and by_topic["left-overs"]["remedy"]
    assert by_topic["calls"]["remedy"] == "unset GRADWIRE_LANE"


def test_a_limit_of_ones_own_is_what_doctor_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """It told what the machine has, and a limit that is none was found by the bridge whose broker had been started."""
    monkeypatch.setenv("GRADWIRE_MAX_SHARED_BYTES", str(1 << 24))
    assert (
        "0.0 GiB may be shared" in doctor._memory().text
        and "GRADWIRE_MAX_SHARED_BYTES" in doctor._memory().text
    )
    monkeypatch.setenv("GRADWIRE_MAX_SHARED_BYTES", "16M")
    assert doctor._memory().remedy == "unset GRADWIRE_MAX_SHARED_BYTES"
    monkeypatch.setattr(BrokerLink, "start_private", None)
    with pytest.raises(UsageError, match="must be a number of bytes"):
        gw.connect()


def test_a_lane_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for sockets, and a benchmark measured those."""
    monkeypatch.setenv("GRADWIRE_LANE", "pages")
    with pytest.raises(UsageError, match="GRADWIRE_LANE=pages is none of auto, page, socket and zmq"):
        gw.connect()
    done = gradwire("doctor", "--json", env={**os.environ})
    (calls,) = (finding for finding in json.loads(done.stdout) if finding["topic"] == "calls")
    assert calls["level"] == "problem" and calls["remedy"] == "unset GRADWIRE_LANE"


# ---- A shared broker, from the shell -------------------------------------------------------------------------------

OPS = """
import dataclasses
import numpy as np
def scaled(x, factor=1.0):
    print("scaling", np.shape(x))
    return {"twice": 2 * x, "scaled": factor * np.asarray(x)}
def same(x):
    return x
@dataclasses.dataclass
class Fit:
    weights: object
    parts: object
def fit(x):
    return Fit(x, [Fit(1, None)])
def fails(x):
    raise ValueError("not today")
"""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose file is up, as the broker named "shell"."""
    folder = tmp_path_factory.mktemp("shell")
    (folder / "shell_ops.py").write_text(OPS)
    text = '[workers.ops]\nframework = "numpy"\nfunctions.same = "shell_ops.py:same"\n'
    (folder / "shell.toml").write_text(text)
    np.save(folder / "x.npy", np.arange(6.0).reshape(2, 3))
    done = gradwire("up", str(folder / "shell.toml"))
    assert done.returncode == 0 and done.stdout.startswith("ipc://"), done.stderr
    assert "gradwire.connect('shell')" in done.stderr
    yield folder
    done = gradwire("stop", "--all", "--broker", "shell")
    assert done.returncode == 0, done.stderr


def test_ps_lists_what_runs(shell: Path) -> None:
    deadline = time.monotonic() + 60
    while True:  # one that has not answered at once is taken for busy
        (worker,) = json.loads(gradwire("ps", "--broker", "shell", "--json").stdout)
        if worker["state"] != "busy" or time.monotonic() > deadline:
            break
    assert (worker["broker"], worker["name"], worker["state"]) == ("shell", "ops", "idle")
    assert worker["memory_bytes"] > 1 << 20 and worker["loads"] == ["same"]
    assert os.readlink(f"/proc/{worker['pid']}/exe") == os.path.realpath(sys.executable)
    table = gradwire("ps").stdout.splitlines()
    assert table[0].split() == ["BROKER", "WORKER", "FRAMEWORK", "PID", "STATE", "CALLS", "MEMORY", "AGE"]
    assert any(line.split()[:2] == ["shell", "ops"] for line in table)


def test_call_with_files_and_json(shell: Path) -> None:
    x, out = str(shell / "x.npy"), str(shell / "out.npz")
    to = ("--broker", "shell", "--worker", "ops")
    done = gradwire("call", "shell_ops.py:scaled", "--arg", x, "--kwarg", "factor=0.5", "--out", out, *to)
    assert done.returncode == 0, done.stderr
    with np.load(out) as made:
        np.testing.assert_array_equal(made["twice"], 2 * np.arange(6.0).reshape(2, 3))
        np.testing.assert_array_equal(made["scaled"], np.arange(6.0).reshape(2, 3) / 2)
    done = gradwire("call", "same", "--arg", '{"a": [1, null, "é"], "b": 2.5}', "--json", "--broker", "shell")
    assert json.loads(done.stdout) == {"a": [1, None, "é"], "b": 2.5}
    done = gradwire("call", "shell_ops.py:fit", "--arg", x, "--json", "--broker", "shell")
    assert json.loads(done.stdout) == {
        "weights": [[0, 1, 2], [3, 4, 5]],
        "parts": [{"weights": 1, "parts": None}],
    }
    assert "scaling (2, 3)" in gradwire("logs", "ops", "--broker", "shell").stdout.splitlines()


def test_call_starts_a_worker_of_its_own(shell: Path) -> None:
    arguments = ("--arg", "3", "--framework", "numpy", "--python", sys.executable, "--json")
    done = gradwire("call", "shell_ops.py:same", *arguments, cwd=shell)
    assert (done.stdout.strip(), done.returncode) == ("3", 0), done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("call", "shell_ops.py:fails", "--arg", "1", "--broker", "shell"), "ValueError: not today"),
        (("call", "shell_ops.py:sam", "--arg", "1", "--broker", "shell"), "did you mean 'same'"),
        (("call", "same", "--arg", "no.npy", "--broker", "shell"), "no.npy cannot be read: No such file"),
        (("call", "same", "--worker", "opps", "--broker", "shell"), "no worker 'opps'; there are ops"),
        (("stop", "opps", "--broker", "shell"), "no worker 'opps'; there are ops"),
        (("logs", "opps", "--broker", "shell"), "no worker 'opps'; there are ops"),
        (("call", "same", "--arg", "1", "--out", "no/x.npy", "--broker", "shell"), "there is no folder no"),
        (("ps", "--broker", "shall"), "start one with: gradwire up FILE"),
        (("ps", "--broker", "ipc:///no/broker"), "`gradwire ps` lists those that run"),
        (("ps", "--broker", "tcp://127.0.0.1:1"), "commands are about the brokers of this machine"),
        (("keys", "add", "nowhere", "bob"), "make keys with `gradwire keys create DIR`"),
        (("keys", "create", __file__), "test_commands.py: it is a file; name another folder"),
        (("env", "build", "-r", "nowhere.txt"), "nowhere.txt: No such file"),
        (("ps", "--broker", "nobody"), "another TMPDIR or XDG_RUNTIME_DIR"),
        (("env", "remove", "nobody"), "no environment is 'nobody'"),
        (("bench", "--json", "no/x.json"), "there is no folder no"),
        (("up", "nowhere.toml"), "nowhere.toml cannot be read: No such file"),
    ],
)
def test_r65_a_mistake_is_told_in_a_sentence(shell: Path, arguments: tuple[str, ...], says: str) -> None:
    done = gradwire(*arguments)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.startswith(f"gradwire {arguments[0]}: ") and says in done.stderr
    assert 'commands/__init__.py", line' not in done.stderr, "a traceback of gradwire's own"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("stop",), "or --all for the broker"),
        (("stop", "--all", "x"), "or --all for the broker"),
        (("stop", "x", "--timeout", "soon"), "'soon' is not a number"),
        (("call", "same", "--arg", "words"), "write a text in quotation marks"),
        (("call", "same", "--kwarg", "x"), "write it as name=value"),
        (("call", "same", "--kwarg", "x=words"), "write a text in quotation marks"),
        (("call", "same", "--timeout", "0"), "not a number above 0"),
        (("call", "same", "--python", "3.11"), "--python goes with --framework"),
        (("call", "same", "--worker", "a", "--framework", "numpy"), "not allowed with"),
        (("call", "same", "--out", "x.txt"), "must end in .npy"),
        (("bench", "--threads", "0"), "not a number from 1 up"),
        (("up", "any.toml", "--listen", "tcp://127.0.0.1:1"), "never in the clear"),
        (("keys", "create", "nowhere", "--client", "a/b"), "made of letters"),
        (("keys",), "required"),
        ((), "required"),
    ],
)
def test_what_is_written_wrongly_is_told_by_argparse(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is done, and whether or not a broker runs."""
    with pytest.raises(SystemExit) as leaving:
        commands.main(arguments)
    said = capsys.readouterr()
    assert leaving.value.code == 2 and not said.out and not os.path.exists("nowhere")
    *usage, error = said.err.splitlines()
    assert usage[0].startswith("usage: gradwire") and says in error


def test_a_broker_that_does_not_answer_hides_no_other(
    shell: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shell / "other.toml").write_text('[workers.another]\nframework = "numpy"\n')
    assert gradwire("up", str(shell / "other.toml")).returncode == 0
    pid = card_of("shell").pid
    monkeypatch.setattr(call, "ANSWER_S", 1.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until_stopped(pid)
        for answer_s in (1.0, 10.0, 30.0):  # the first in which the other one answers
            monkeypatch.setattr(brokers, "ANSWER_S", answer_s)
            assert commands.main(["ps"]) == 1
            said = capsys.readouterr()
            if "another" in said.out:
                break
        assert "another" in said.out and "shell" not in said.out.split()
        assert f"does not answer. If it was stopped (pid {pid}): kill -CONT {pid}" in said.err
        assert commands.main(["call", "same", "--arg", "1", "--broker", "shell"]) == 1
        assert f"kill -CONT {pid}" in capsys.readouterr().err
        (finding,) = [f for f in doctor._brokers() if f.text.startswith("'shell'")]
        assert finding.level == "problem" and finding.remedy == f"kill -CONT {pid}"
    finally:
        os.kill(pid, signal.SIGCONT)
        assert gradwire("stop", "--all", "--broker", "other").returncode == 0


def wait_until_stopped(pid: int) -> None:
    """Every thread: a busy machine takes its time."""
    deadline = time.monotonic() + 60
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("redirected", "code", "says"),
    [
        ("> /dev/full", 1, "gradwire env: No space left on device\n"),
        (">&-", 0, ""),
        ("> /dev/full 2>&1", 1, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">&2", 0, "bridge.worker(\\u2026, requirements=[\\u2026])"),  # in a locale that has no such letter
    ],
)
def test_r60_whatever_becomes_of_what_it_prints(
    redirected: str, code: int, says: str, tmp_path: Path
) -> None:
    command = f"'{sys.executable}' -m gradwire env list {redirected}"
    done = subprocess.run(
        ["sh", "-c", command],
        env={
            **os.environ,
            "GRADWIRE_CACHE": str(tmp_path),
            "PYTHONIOENCODING": "ascii",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code
    assert says in done.stderr and done.stderr.count("\n") == bool(says)


def test_r60_a_reader_who_has_seen_enough(tmp_path: Path) -> None:
    command = f"{{ '{sys.executable}' -m gradwire --version; echo $? >&2; '{sys.executable}' -m gradwire env list; echo $? >&2; }} | true"
    done = subprocess.run(
        ["sh", "-c", command],
        env={**os.environ, "GRADWIRE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.stderr.split()[-1]) == ("", "1") and "Traceback" not in done.stderr


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_logs_follow_what_is_printed(shell: Path) -> None:
    command = [sys.executable, "-m", "gradwire", "logs", "ops", "-f", "--broker", "shell"]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert following.stdout is not None
    assert gradwire("call", "shell_ops.py:scaled", "--arg", "[1.0]", "--broker", "shell").returncode == 0
    deadline = time.monotonic() + 60
    while following.stdout.readline() != "scaling (1,)\n":
        assert time.monotonic() < deadline
    following.send_signal(signal.SIGINT)
    assert following.communicate(timeout=60)[1] == "" and following.returncode == 0


def test_a_worker_that_was_stopped_still_tells_its_last_lines(shell: Path) -> None:
    (shell / "brief.toml").write_text('[workers.brief]\nframework = "numpy"\n')
    assert gradwire("up", str(shell / "brief.toml")).returncode == 0
    to = ("--broker", "brief")
    assert gradwire("call", "shell_ops.py:scaled", "--arg", "2", *to).returncode == 0
    assert gradwire("stop", "brief", *to).returncode == 0
    (worker,) = json.loads(gradwire("ps", "--json", *to).stdout)
    assert (worker["state"], worker["doing"]) == ("ended", "exit code 0")
    assert "scaling ()" in gradwire("logs", "brief", *to).stdout
    assert gradwire("stop", "--all", *to).returncode == 0
    assert gradwire("ps", *to).returncode == 1


# ---- Files ---------------------------------------------------------------------------------------------------------


def test_files_never_run_what_they_hold(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([print], dtype=object))
    with pytest.raises(UsageError, match="not an array file that can be read"):
        read_argument(str(tmp_path / "objects.npy"))
    torn = b"\x93NUMPY\x01\x00\x02\x00{\n"
    for content in (b"hello", b"", b"PK\x03\x04", torn):
        (tmp_path / "other.npy").write_bytes(content)
        with pytest.raises(UsageError, match="not an array file that can be read"):
            read_argument(str(tmp_path / "other.npy"))
    with pytest.raises(UsageError, match="is neither a"):
        read_argument("[" * 100_000)


def test_results_go_to_the_kind_of_file_they_fit(tmp_path: Path) -> None:
    write_result(tmp_path / "one.npy", np.float32(3))
    assert np.load(tmp_path / "one.npy") == 3
    write_result(tmp_path / "two.npz", (np.zeros(2), 4))
    with np.load(tmp_path / "two.npz") as made:
        assert sorted(made) == ["arr_0", "arr_1"] and made["arr_1"] == 4
    ragged = {"a": [np.zeros(2), np.zeros(3)]}
    for result, name in (
        ((1, 2), "x.npy"),
        (1, "x.txt"),
        ({"a": "text"}, "x.npz"),
        (None, "x.npy"),
        (ragged, "x.npz"),
    ):
        with pytest.raises(UsageError, match=r"--out"):
            write_result(tmp_path / name, result)
    assert sorted(os.listdir(tmp_path)) == ["one.npy", "two.npz"], "nothing half-written"
    write_result(tmp_path / "three.npz", Fit(np.ones(3), 0.5))
    write_result(tmp_path / "four.npz", {"file": np.ones(2), "allow_pickle": np.zeros(0, "i2")})
    with np.load(tmp_path / "three.npz") as three, np.load(tmp_path / "four.npz") as four:
        assert sorted(three) == ["loss", "weights"] and three["weights"].shape == (3,)
        assert sorted(four) == ["allow_pickle", "file"] and four["allow_pickle"].dtype == np.int16


@dataclasses.dataclass
class Fit:
    """A result with names."""

    weights: np.ndarray
    loss: float
