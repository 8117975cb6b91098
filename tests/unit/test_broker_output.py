"""What workers print, kept for reports, sent to clients and shown: bounded, and honest about what was lost."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.link_thread import LinkThread
from gradwire.worker_output import Labeller, Screen
from gradwire_broker.output import Outlet, Tail
from gradwire_broker.reports import STARTING, end_of, ended_early, not_started, timed_out
from gradwire_broker.worker import Worker
from gradwire_wire.control import Output

# ---- The last lines ------------------------------------------------------------------------------------------------


def test_a_short_text_is_kept_whole() -> None:
    tail = Tail()
    for piece in ("one\n", "tw", "o\nthree"):
        tail.write(piece)
    assert tail.text() == "one\ntwo\nthree"


@given(st.lists(st.text(alphabet="ab\n", max_size=300), max_size=80))
def test_r60_the_end_is_kept_and_the_loss_is_told(pieces: list[str]) -> None:
    tail = Tail(max_lines=10, max_characters=200)
    for piece in pieces:
        tail.write(piece)
    whole = "".join(pieces)
    text = tail.text()
    if text.startswith("["):
        note, _, kept = text.partition("\n")
        lost = int(note[1:].split()[0].replace(",", ""))
        assert whole[lost:].rstrip("\n") == kept
        assert lost > 0
    else:
        assert text == whole.rstrip("\n")
        kept = text
    assert len(kept) <= 200
    assert kept.count("\n") < 10
    assert tail._held <= 400 + 300


# ---- One client's queue --------------------------------------------------------------------------------------------


def test_r60_an_outlet_keeps_within_window_and_bound() -> None:
    outlet = Outlet(window=3000, bound=10_000)
    for i in range(100):
        outlet.write("w", f"{i:03}" + "x" * 997)
    first = outlet.take()
    assert first[0].dropped > 0
    assert sum(piece.cost for piece in first) <= 3000 + (1 << 15) + 512
    assert outlet.take() == []
    while True:
        outlet.heard(sum(piece.cost for piece in first))
        more = outlet.take()
        if not more:
            break
        assert more[0].dropped == 0
        first = more
    assert first[-1].text.endswith("x")


@given(st.lists(st.tuples(st.sampled_from("ab"), st.text(min_size=1, max_size=2000)), max_size=60))
def test_what_is_not_dropped_arrives_in_order(writes: list[tuple[str, str]]) -> None:
    outlet = Outlet(window=1000, bound=5000)
    taken: list[Output] = []
    for name, text in writes:
        outlet.write(name, text)
        got = outlet.take()
        taken += got
        outlet.heard(sum(piece.cost for piece in got) // 2)
    outlet.heard(1 << 20)
    taken += outlet.take()
    written = sum(len(text) for _, text in writes)
    assert sum(len(piece.text) + piece.dropped for piece in taken) == written
    if not any(piece.dropped for piece in taken):
        for name in "ab":
            assert "".join(p.text for p in taken if p.name == name) == "".join(
                t for n, t in writes if n == name
            )


def test_small_pieces_are_put_together() -> None:
    outlet = Outlet()
    for _ in range(1000):
        outlet.write("w", "x\n")
    assert [piece.text for piece in outlet.take()] == ["x\n" * 1000]


# ---- Shown ---------------------------------------------------------------------------------------------------------


def shown(*outputs: tuple[str, str, int]) -> str:
    labeller = Labeller()
    return "".join(labeller.labelled(Output(*output)) for output in outputs)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([("t", "one\ntwo\n", 0)], "[t] one\n[t] two\n"),
        ([("t", "on", 0), ("t", "e\n", 0)], "[t] one\n"),
        ([("t", "on", 0), ("j", "two\n", 0), ("t", "e\n", 0)], "[t] on\n[j] two\n[t] e\n"),
        ([("t", "\r 10%", 0), ("t", "\r 20%", 0), ("t", "\n", 0)], "[t] \r[t]  10%\r[t]  20%\n"),
        ([("t", "a\r\nb", 0)], "[t] a\r\n[t] b"),
        ([("t", "on", 0), ("t", "two\n", 7000)], "[t] on\n[t] … 7,000 characters dropped …\n[t] two\n"),
        ([("t", "\n\n", 0)], "[t] \n[t] \n"),
    ],
)
def test_r60_every_line_has_the_workers_name(outputs: list[tuple[str, str, int]], expected: str) -> None:
    assert shown(*outputs) == expected


def test_it_is_shown_on_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    streams = [io.StringIO(), io.StringIO()]
    for stream in streams:
        monkeypatch.setattr(sys, "stderr", stream)
        screen.show(Output("w", "hello\n", 0))
        assert screen.pour() == Output("w", "hello\n", 0).cost
    assert [stream.getvalue() for stream in streams] == ["[w] hello\n"] * 2


class _Broken(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [None, _Broken(), "closed"])
def test_a_stream_that_takes_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    if stream == "closed":
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    screen = Screen()
    screen.show(Output("w", "hello\n", 0))
    assert screen.pour() > 0
    assert not screen.waiting


@pytest.mark.parametrize("raised", [ValueError, SystemExit, KeyboardInterrupt])
def test_r60_what_a_stream_of_the_users_raises_ends_no_thread(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window's "stop" may be made of it; neither what is shown nor the error of a callback may be lost by that."""

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            raise raised

    monkeypatch.setattr(sys, "stderr", Stream())
    screen = Screen()
    screen.show(Output("w", "hello\n", 0))
    assert screen.pour() > 0 and not screen.waiting
    ended, ran = threading.Event(), threading.Event()
    thread = LinkThread(ended.set)
    thread.start()
    thread.call_soon(sys.stderr.write)  # wants a text
    thread.call_soon(ran.set)
    assert ran.wait(10.0) and not ended.is_set()
    thread.end()
    assert ended.wait(10.0)


def test_a_stream_of_another_encoding_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    screen = Screen()
    screen.show(Output("w", "grün\n", 0))
    screen.pour()
    assert raw.getvalue() == b"[w] gr\\xfcn\n"


def test_r60_a_pipe_that_nobody_reads_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb", 0) as read, open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        screen = Screen()
        screen.show(Output("w", "x" * 300_000, 0))
        assert screen.pour() == 0
        assert screen.waiting
        while screen.waiting:
            read.read(1 << 16)
            screen.pour()
        monkeypatch.undo()


# ---- Reports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (7, "exit code 7"), (-9, "signal SIGKILL"), (-40, "signal SIG40")]
)
def test_how_it_ended(code: int, text: str) -> None:
    assert str(end_of(code)) == text


def test_r65_a_folder_that_the_user_may_not_enter_is_told_from_the_interpreter(tmp_path: Path) -> None:
    """Who was given another user's rights (sudo, a container's) may still be in a folder of the first."""
    of_worker: Any = SimpleNamespace(
        order=SimpleNamespace(cwd=str(tmp_path), framework="numpy"), place=SimpleNamespace(name="w")
    )
    for refused, told in (
        (str(tmp_path), f"in {tmp_path} (cwd=)"),
        ("bin/python", "cannot execute bin/python"),
    ):
        error = PermissionError(errno.EACCES, "Permission denied", refused)
        assert f"{told}: Permission denied" in Worker._not_executed(of_worker, "bin/python", error)


def test_r65_an_early_end_says_what_it_was_doing_and_what_that_may_mean() -> None:
    assert (
        ended_early(end_of(3), "importing torch") == "its process ended (exit code 3) while importing torch"
    )
    assert "memory" in ended_early(end_of(-9), "importing torch")
    assert "processor" in ended_early(end_of(-4), "importing torch")
    for code in (0, 2):
        assert "a Python interpreter?" in ended_early(end_of(code), "starting the interpreter")
    assert timed_out(3.0, "importing torch").endswith("start_timeout=, or see below where it hung")
    assert timed_out(3.0, STARTING).endswith(
        "it was starting the interpreter. Give it more time with start_timeout="
    )


def test_r65_the_report_has_all_that_is_known() -> None:
    text = not_started(
        "enc", "torch", "why", command="python -s", cwd="/here", ended="exit code 3", output="a\nb"
    )
    assert text == (
        "worker 'enc' (torch) did not start: why\n  command: python -s\n  in folder: /here\n"
        "  ended: exit code 3\n  last output:\n    a\n    b"
    )
    assert not_started("torch", "torch", "why") == "worker 'torch' did not start: why"
    assert "printed nothing" in not_started("torch", "torch", "why", command="python")
