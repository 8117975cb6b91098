"""The examples of the README and the reference run as they stand there, and the reference names what there is."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
import subprocess
import sys

import gradwire as gw
from gradwire.options import Options

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_the_examples(torch_python: str) -> None:
    """The second one goes on where the first has left off, with its bridge open again."""
    first, second = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len([line for line in first.splitlines() if line.strip()]) <= 15
    again = 'bridge = gw.connect()\nworker = bridge.worker("torch", python=".envs/torch/bin/python")\n'
    run = subprocess.run(
        [sys.executable, "-c", f"{first}\n{again}{second}\nprint('loss', float(value))"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    assert "Array" in run.stdout or "[" in run.stdout
    assert float(run.stdout.split("loss")[1]) > 0


REFERENCE = (ROOT / "docs/reference/api.md").read_text()


def test_a_numpy_function_with_a_derivative(tmp_path: pathlib.Path) -> None:
    target, program = re.findall(r"```python\n(.*?)```", REFERENCE, re.DOTALL)
    (tmp_path / "square.py").write_text(target)
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "(array([0., 2., 4.]),)",
        "(array([0., 1., 4.]), array([0., 2., 4.]))",
    ]


def test_the_reference_names_all_that_there_is_and_nothing_else() -> None:
    words = set(re.findall(r"\w+", REFERENCE))
    internal = {"described", "handle", "seed_operand", "autograph_info__"}
    public = {name for name in dir(gw.Remote) if not name.startswith("_")} - internal
    options = {field.name for field in dataclasses.fields(Options)}
    arguments = {*inspect.signature(gw.Bridge.worker).parameters} - {"self"}
    assert {*gw.__all__, *public, *options, *arguments} - words - {"Bridge", "Worker", "Remote"} == set()
    for kind in (gw.Bridge, gw.Worker, gw.Remote, gw.Optimizer, gw.Pullback):
        named = re.findall(rf"`{kind.__name__.lower()}\.(\w+)", REFERENCE)
        assert named and [name for name in named if not hasattr(kind, name)] == []
