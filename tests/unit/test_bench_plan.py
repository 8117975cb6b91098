"""`gradwire bench`: what is asked for, what is printed, and what is refused, without measuring anything."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import socket
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.benchmark import beside, measure, picture, report
from gradwire.benchmark.measure import arrays, found, percentiles_us
from gradwire.benchmark.plan import FAR_END, Plan, Work, default_works, parsed_shape
from gradwire.commands import main


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("256x64", ((256, 64), "float32")),
        ("7:int64", ((7,), "int64")),
        (":float64", ((), "float64")),
        ("0x3", ((0, 3), "float32")),
    ],
)
def test_shapes(text: str, meant: Any) -> None:
    assert parsed_shape(text) == meant


@pytest.mark.parametrize("text", ["axb", "3,4", "-1", "3x", "3:float", "3:bfloat16"])
def test_shapes_that_are_none(text: str) -> None:
    with pytest.raises(gw.UsageError, match=f"--shape {text}"):
        parsed_shape(text)


def test_a_plan_goes_to_a_process_and_comes_back_the_same() -> None:
    plan = Plan("torch", None, 1, ("here",), default_works("torch"), 0.5)
    assert Plan.of(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan


def test_every_framework_has_the_same_functions() -> None:
    names = ["identity", "make_mlp", "compiled", "tensors", "to_array"]
    for framework in ("numpy", "torch", "jax", "tensorflow"):
        text = (FAR_END / f"{framework}.py").read_text()
        assert [n for n in names if f"def {n}(" not in text] == [], framework


def test_targets_are_found_as_a_worker_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def f(x): return x\nclass M:\n    def __call__(self, x): return x\nm = M()"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert found("mine:f", "function")(3) == found("mine.py:f", "function")(3) == 3
    assert type(found("mine:M", "module")).__name__ == type(found("mine:m", "module")).__name__ == "M"


def test_percentiles_are_of_calls_that_were_made() -> None:
    calls = []
    figures = percentiles_us(lambda: calls.append(1), 0.001)
    assert figures["p50_us"] <= figures["p95_us"] <= figures["p99_us"] and len(calls) > figures["calls"] >= 7


def figures_of(p50: float) -> dict[str, Any]:
    return {"p50_us": p50, "p95_us": p50 * 2, "p99_us": p50 * 3, "calls": 9.0}


RESULTS: dict[str, Any] = {
    "machine": {**report.machine(), "processor": "a processor"},
    "worker": {
        "framework": "torch",
        "version": "2.13.0",
        "python": "3.11.7",
        "threads": 1,
        "carried_by": "shared memory",
    },
    "works": ["w"],
    "sizes": ["4", "65536"],
    "callers": {
        "numpy": {
            "works": {
                "w": {**figures_of(200.0), "parts_us": dict.fromkeys(report.PARTS, 12.5), "by": "lane"}
            },
            "sizes": {"4": figures_of(150.0), "65536": figures_of(250.0)},
        },
        "jax": {"error": "UsageError: no such thing"},
    },
    "direct": {"w": figures_of(100.0)},
    "pipe": {
        "works": {"w": figures_of(300.0)},
        "sizes": {"4": figures_of(160.0), "65536": figures_of(900.0)},
    },
}


def test_the_table() -> None:
    text = report.tables(RESULTS)
    (row,) = [line for line in text.splitlines() if line.startswith("numpy caller")]
    assert row.split()[2:] == ["200.0", "400.0", "600.0", "2.00", *["12.5"] * 6, "lane"]
    (row,) = [line for line in text.splitlines() if line.startswith("64 KiB")]
    assert row.split()[2:] == ["250.0", "900.0"]
    assert "jax: UsageError: no such thing" in text and "a processor" in text


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg = picture.draw(RESULTS, str(tmp_path / "p"))
    assert png.read_bytes().startswith(b"\x89PNG") and b"<svg" in svg.read_bytes()


def test_without_matplotlib_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    assert main(["bench", "--plot", "p"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--python", "x"], "--python needs --framework"),
        (["--framework", "numpy", "--target", "a:b"], "--shape 256x64"),
        (["--framework", "numpy", "--shape", "3"], "about a --target"),
        (["--framework", "numpy", "--callers", "mxnet"], "there are numpy, torch"),
        (["--framework", "numpy", "--seconds", "0"], "a number above 0"),
    ],
)
def test_what_is_written_wrongly_is_a_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["bench", *arguments])
    assert leaving.value.code == 2
    said = capsys.readouterr()
    assert says in said.err and "Traceback" not in said.err and not said.out


def test_json_without_a_file_is_all_that_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gradwire.commands.bench.measured", lambda plan, callers: {"callers": callers})
    assert main(["bench", "--framework", "numpy", "--callers", "numpy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"callers": ["numpy"]}


def test_a_pipe_whose_server_dies_is_a_sentence(tmp_path: Path) -> None:
    import sys

    work = Work("w", "no_such_module:f", "function", (((1,), "float32"),))
    plan = Plan("numpy", None, 1, (str(tmp_path),), (work,), 0.01)
    assert "pipe's other end is gone" in beside.piped(plan, sys.executable)["error"]


def test_numbers_to_call_with_have_the_asked_for_types() -> None:
    made = arrays([[(2, 3), "float32"], [(), "int64"]])
    assert [(x.shape, x.dtype.name) for x in made] == [((2, 3), "float32"), ((), "int64")]


class Sealed:
    """A tensor that only its framework makes an array of."""

    def numpy(self) -> Any:
        return np.ones(2)


def test_a_tree_of_results_goes_through_the_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not arrays alone: a target that gives a dict ended the process that was measured beside."""
    (tmp_path / "gives_trees.py").write_text(
        "from tests.unit.test_bench_plan import Sealed\n"
        "def f(x):\n    return {'y': Sealed(), 'aux': (Sealed(), None, 3)}\n"
    )
    monkeypatch.setattr(
        measure,
        "_framework",
        lambda name: SimpleNamespace(compiled=lambda f: f, tensors=list, to_array=lambda x: x.numpy()),
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    ours, theirs = socket.socketpair()
    server = threading.Thread(
        target=measure.serve, args=(theirs.detach(), "sealed", "gives_trees:f", "function")
    )
    server.start()
    end: Any = Connection(ours.detach())
    assert end.recv() == "ready"
    end.send([np.ones(3)])
    found = end.recv()
    end.close()
    server.join()
    assert (
        found["y"].tolist() == [1, 1] and found["aux"][0].tolist() == [1, 1] and found["aux"][1:] == [None, 3]
    )
