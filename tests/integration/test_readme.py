"""The examples of the README and the reference run as they stand there, and the reference names what there is."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import pathlib
import re
import subprocess
import sys

import numpy as np

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


CLASSES = {
    kind.__name__.lower(): kind for kind in (gw.Bridge, gw.Worker, gw.Remote, gw.Optimizer, gw.Pullback)
}
OF_OURS = {
    "described",
    "handle",
    "seed_operand",
    "autograph_info__",
}  # names without underscore, for our own files
OF_OURS |= {"bury", "detach", "every_second", "is_closed", "keeps_name", "last_error"}


def test_the_reference_names_all_that_there_is_and_nothing_else() -> None:
    words = set(re.findall(r"\w+", REFERENCE))
    options = {field.name for field in dataclasses.fields(Options)}
    assert {*gw.__all__, *options} - words - {"Bridge", "Worker", "Remote"} == set()
    for name, kind in CLASSES.items():
        named = set(re.findall(rf"`(?:await )?{name}\.(\w+)", REFERENCE))
        assert {n for n in dir(kind) if not n.startswith("_")} - OF_OURS - named == set()
        assert [n for n in named if not hasattr(kind, n)] == []


def test_the_signatures_in_the_reference_are_true() -> None:
    found = re.findall(
        r"`(?:await )?([a-z][\w.]*)\((.*?)\)`", "".join(re.findall(r"(?m)^\|.*\|$", REFERENCE))
    )
    assert len(found) > 40
    for name, arguments in found:
        told = inspect.signature(eval(f"lambda {arguments}: 0", {"np": np}))
        there = _signature(name)
        if there is not None:
            assert str(told) == str(there), name


def _signature(name: str) -> inspect.Signature | None:
    """Of a name as the reference has it, without types and self; None where it is no name of ours."""
    owner, _, attribute = name.rpartition(".")
    if owner in CLASSES or name in CLASSES:
        function = getattr(CLASSES[owner or name], attribute if owner else "__call__")
    elif owner.partition(".")[0] == "gw":
        function = operator.attrgetter(name.removeprefix("gw."))(gw)
    else:
        return None
    if function is gw.Remote.options:  # which names them itself, to say what is unknown
        return inspect.Signature(
            [
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
                for field in dataclasses.fields(Options)
            ]
        )
    parameters = inspect.signature(function).parameters.values()
    return inspect.Signature([p.replace(annotation=p.empty) for p in parameters if p.name != "self"])
