"""The messages of the control plane: what is packed comes back, and nothing else comes through."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire_wire import control, lifeline, spawn
from gradwire_wire.errors import ProtocolError, UsageError
from gradwire_wire.lifeline import ANOTHER_GRADWIRE, CouldNot, Doing, Lifeline, LifelineEnded, WorkerReady
from gradwire_wire.vocabulary import Vocabulary

TEXT = st.text(max_size=20)
OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**40),
    float: st.floats(0, 1e9),
    bool: st.booleans(),
    str: TEXT,
    bytes: st.binary(max_size=20),
    list[str]: st.lists(TEXT, max_size=3),
    dict[str, str]: st.dictionaries(TEXT, TEXT, max_size=3),
    dict[str, str | None]: st.dictionaries(TEXT, st.none() | TEXT, max_size=3),
    dict[bytes, bytes]: st.dictionaries(st.binary(max_size=9), st.binary(max_size=9), max_size=3),
    dict[str, Any]: st.dictionaries(TEXT, st.none() | st.booleans() | TEXT, max_size=3),
}


def _of(hint: Any) -> st.SearchStrategy[Any]:
    for kind, strategy in OF_TYPE.items():
        if hint == kind:
            return strategy
        if hint == kind | None:
            return st.none() | strategy
    raise AssertionError(f"no strategy for {hint}")


def messages_of(kinds: dict[Any, type]) -> st.SearchStrategy[Any]:
    """Any message of a vocabulary."""
    return st.one_of(
        st.builds(cls, **{name: _of(hint) for name, hint in get_type_hints(cls).items()})
        for cls in kinds.values()
    )


@given(messages_of(control.KINDS))
def test_what_is_packed_comes_back(message: Any) -> None:
    back = control.unpack(control.pack(message))
    assert back == message
    assert type(back) is type(message)


@given(messages_of(lifeline.KINDS))
def test_what_goes_into_a_lifeline_comes_out(message: Any) -> None:
    ours, theirs = Lifeline.pair()
    theirs_end = Lifeline(theirs)
    try:
        ours.send_nowait(message)
        assert theirs_end.receive_nowait() == message
    finally:
        ours.close()
        theirs_end.close()


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(frame: bytes) -> None:
    try:
        message = control.unpack(frame)
    except ProtocolError:
        return
    assert control.unpack(control.pack(message)) == message


@pytest.mark.parametrize(
    "raw",
    [
        None,
        7,
        [],
        {},
        [99],
        [True, 1],
        [["Attach"], 1],
        [1, 1, b"token"],
        [1, 1, b"token", 7, 8],
        [1, 1, "token", 7],
        [1, -1, b"token", 7],
        [1, True, b"token", 7],
        [5, b"worker", float("inf")],
        [5, b"worker", float("nan")],
        [5, b"worker", -1.0],
        [6, 1.5],
    ],
)
def test_malformed_messages_are_refused(raw: Any) -> None:
    with pytest.raises(ProtocolError):
        control.unpack(msgpack.packb(raw))


def test_a_refusal_names_kind_and_field() -> None:
    with pytest.raises(ProtocolError, match=r"Stop\.timeout_s cannot be 'soon'"):
        control.unpack(msgpack.packb([5, b"w", "soon"]))


def test_a_long_message_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="longer than"):
        control.unpack(b"\xc0" * (control.MAX_MESSAGE + 1))


def test_a_field_of_an_unknown_type_is_noticed_when_the_vocabulary_is_made() -> None:
    from typing import NamedTuple

    class Odd(NamedTuple):
        what: complex

    with pytest.raises(KeyError):
        Vocabulary({1: Odd})


@pytest.mark.parametrize(
    ("text", "said"), [("\ud800", "surrogates"), ("x" * (control.MAX_MESSAGE + 1), "bytes, more than")]
)
def test_what_cannot_be_said_is_refused_where_it_is_said(text: str, said: str) -> None:
    """Or its asker would wait for an answer that never comes."""
    with pytest.raises(UsageError, match=said):
        control.pack(control.ReadLog(1, text, False))


def test_names_that_are_not_utf8_survive() -> None:
    doing = control.Starting(1, b"/tmp/\xff".decode("utf-8", "surrogateescape"))
    assert control.unpack(control.pack(doing)) == doing


# ---- Golden bytes: control protocol 1 stays what it is -----------------------------------------------------------------

GOLDEN = Path(__file__).parents[1] / "wire" / "golden" / "control-1.txt"
ID = bytes(range(16))
EXAMPLES = [
    control.Attach(1, b"token", 1234),
    control.Start(
        *(1, "torch", "enc", "/envs/torch/bin/python", {b"PATH": b"/bin"}, {"A": "b", "C": None}, ["/here"]),
        *("/here", 2, True, "cpu", 120.0),
        *({"net": {"kind": "module", "target": "m:f", "args": [1], "kwargs": {}}}, True, "on-failure"),
    ),
    control.Start(2, "jax", "", None, None, {}, [], "/", None, None, None, 0.5, {}, False, "never"),
    control.Cancel(1),
    control.Interrupt(ID),
    control.Stop(ID, 5.0),
    control.Heard(4711),
    control.ShutDown(3.0),
    control.Attached(1, 1235),
    control.Refused("ConnectError", "the token is not the broker's"),
    control.Starting(1, "importing torch"),
    control.Started(
        1, "enc", ID, 1236, "ipc:///run/w.zmq", "/run/w.mem", b"token", {"threads": 2, "devices": ["cpu"]}
    ),
    control.NotStarted(1, "worker 'enc' (torch) did not start"),
    control.Died(ID, None, "SIGKILL", "last words é", "python -s"),
    control.Output("enc", "✓\n", 7000),
    control.Denied(1, "UsageError", "there is a worker 'enc' already"),
    control.HasThreads(ID, 2),
    control.Detach(),
    control.Look(3),
    control.Show("enc", True),
    control.ReadLog(4, "enc", True),
    control.Restart(5, ID),
    control.Present(
        *(3, "enc", "torch", "idle", "ready", ID, 1236, "ipc:///run/w.zmq", "/run/w.mem", b"token"),
        *({"threads": 2}, ["net"], "never", 17, 1 << 28, 2.5),
    ),
    control.Looked(3),
    control.Log(4, "last words é"),
    control.LetGo(6),
    control.Alone(6),
]


def test_golden_bytes_of_the_control_protocol() -> None:
    assert control.PROTOCOL == 1, "a new version needs golden bytes of its own beside the old"
    assert {type(message) for message in EXAMPLES} == set(control.KINDS.values())
    golden = [line for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    assert [control.pack(message).hex() for message in EXAMPLES] == golden
    assert [control.unpack(bytes.fromhex(line)) for line in golden] == EXAMPLES


# ---- Lifelines -----------------------------------------------------------------------------------------------------


@pytest.fixture
def line() -> Any:
    ours, theirs = Lifeline.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_nothing_said_is_none_and_the_end_is_told(line: Any) -> None:
    ours, theirs = line
    assert ours.receive_nowait() is None
    theirs.send(b'["Doing", "this"]')
    theirs.close()
    assert ours.receive_nowait() == Doing("this")
    with pytest.raises(LifelineEnded):
        ours.receive_nowait()
    with pytest.raises(LifelineEnded):
        ours.send_nowait(lifeline.Leave())


@pytest.mark.parametrize(
    "packet", [b"no json", b"{}", b'["Doing"]', b'["Doing", 1]', b'["Doings", "x"]', b"\xff"]
)
def test_what_is_no_message_is_refused(line: Any, packet: bytes) -> None:
    ours, theirs = line
    theirs.send(packet)
    with pytest.raises(ProtocolError):
        ours.receive_nowait()


def test_a_lifeline_that_nobody_reads_does_not_block(line: Any) -> None:
    ours, _ = line
    with pytest.raises(LifelineEnded):
        for _ in range(10_000):
            ours.send_nowait(Doing("x" * 1000))


def test_facts_of_any_type_are_told_as_text(line: Any) -> None:
    ours, theirs = line
    ours.send_nowait(WorkerReady({"version": ValueError("odd")}, ""))
    assert json.loads(theirs.recv(1000)) == ["WorkerReady", {"version": "odd"}, ""]


# ---- The command line's program ------------------------------------------------------------------------------------

MODULE = "import sys\ndef main(line):\n    print('main', line, sys.path.count(''))\n    return 5\n"


@pytest.fixture
def lent(tmp_path: Any) -> spawn.Lent:
    folder = tmp_path / "lent_one"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "entry.py").write_text(MODULE)
    return spawn.Lent({"lent_one": str(folder)}, [str(tmp_path / "appended")])


def _run(lent: spawn.Lent, cwd: Any, prefix: str = "", python: str = sys.executable) -> tuple[int, str, Any]:
    """Exit code, output and last word of a child that was spawned from a folder."""
    before = spawn.BOOT
    spawn.BOOT = prefix + before
    try:
        process, line = spawn.spawn(
            [python, "-s"],
            lent,
            "lent_one.entry",
            Doing("x"),
            "title",
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    finally:
        spawn.BOOT = before
    output, _ = process.communicate(timeout=60)
    try:
        said = line.receive_nowait()
    except LifelineEnded:
        said = None
    line.close()
    return process.returncode, output.decode(), said


def test_the_module_is_lent_and_its_result_is_the_exit_code(lent: spawn.Lent, tmp_path: Any) -> None:
    code, output, _ = _run(lent, tmp_path)
    assert (code, output.split()[0], output.split()[2]) == (5, "main", "0"), output


def test_the_current_folder_shadows_nothing(lent: spawn.Lent, tmp_path: Any) -> None:
    for name in ("json", "os", "socket", "typing", "lent_one", "importlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "lent_one" / "entry.py").write_text("import json, typing, socket\n" + MODULE)
    assert _run(lent, tmp_path)[0] == 5


@pytest.mark.parametrize("version", ["(2, 7, 18)", "(3, 6, 1)", "(3, 8, 20)"])
def test_an_old_python_says_that_it_is_too_old(lent: spawn.Lent, tmp_path: Any, version: str) -> None:
    code, _, said = _run(lent, tmp_path, f"import sys; sys.version_info = {version}\n")
    dotted = ".".join(version.strip("()").split(", "))
    assert (code, said) == (1, CouldNot(f"gradwire needs Python 3.9 or newer, and this is Python {dotted}"))


def test_a_package_that_does_not_load_any_more_says_what_may_have_happened(
    lent: spawn.Lent, tmp_path: Any
) -> None:
    (tmp_path / "lent_one" / "entry.py").unlink()
    code, output, said = _run(lent, tmp_path)
    assert code == 1 and "No module named 'lent_one.entry'" in output
    assert isinstance(said, CouldNot) and said.message.endswith(ANOTHER_GRADWIRE)


def test_a_config_of_another_version_is_told_to_who_has_sent_it(line: Any) -> None:
    ours, theirs = line
    theirs.send(b'["Doing", "x", "and what later versions say"]')
    with pytest.raises(ProtocolError):
        ours.receive_config()
    _, why = json.loads(theirs.recv(1000))
    assert why.endswith(ANOTHER_GRADWIRE)


def test_a_title_cannot_smuggle_in_code(lent: spawn.Lent) -> None:
    with pytest.raises(ValueError, match="printable"):
        spawn.spawn([sys.executable], lent, "lent_one.entry", Doing("x"), "a\nimport os")


def test_the_shown_command_line_is_short(lent: spawn.Lent, tmp_path: Any) -> None:
    process, line = spawn.spawn(
        [sys.executable], lent, "lent_one.entry", Doing("x"), "the title", stdout=subprocess.DEVNULL
    )
    process.wait(60)
    line.close()
    assert spawn.shown(process) == f"{sys.executable} -c '# gradwire the title …' {process.args[-1]}"


# ---- Never a fork --------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
PACKAGES = ("client/gradwire", "broker/gradwire_broker", "workers/gradwire_workers", "wire/gradwire_wire")


def forks(source: str) -> list[int]:
    """Lines that fork this process, or have code run in a forked child (R02)."""
    return [
        node.lineno if isinstance(node, ast.Attribute) else node.value.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty", "vfork"))
        or (isinstance(node, ast.keyword) and node.arg == "preexec_fn")
    ]


def test_r02_nothing_of_ours_forks() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert not {str(path): lines for path in files if (lines := forks(path.read_text()))}


@pytest.mark.parametrize("source", ["import os\nos.fork()", "subprocess.Popen([], preexec_fn=f)"])
def test_the_search_for_forks_can_find_some(source: str) -> None:
    assert forks(source)
