"""What a broker's ``allow`` lets clients name, and every way around it that we could think of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire_wire.errors import UnknownTargetError, UsageError
from gradwire_workers.permissions import Permissions
from gradwire_workers.state import State
from gradwire_workers.targets import find_target

PACKAGE = {
    "gwtp/__init__.py": "from gwtp.nets import make\n",
    "gwtp/nets.py": """
import functools, os, subprocess as sp
from os import system, environ
from shutil import rmtree
from os.path import *
from gwtp.layers import layer
import json
__all__ = ["make", "listed"]
def make(depth=1):
    return layer
def _hidden():
    return 1
class Net:
    inner = os
    def __call__(self, x):
        return x
    def method(self):
        return 2
class Child(json.JSONEncoder):
    pass
@functools.lru_cache
def cached(x):
    return x
listed = functools.partial(make, 2)
unlisted = functools.partial(make, 2)
alias = os.system
net = Net()
def generator():
    yield 1
running = generator()
""",
    "gwtp/layers.py": "def layer(x):\n    return x\n",
    "gwtp_secret.py": "touched = []\ndef run():\n    return 'ran'\n",
    "nets.py": "import os\ndef f(x):\n    return x\n",
    "sub/nets.py": "def f(x):\n    return x\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


PERMISSIONS = Permissions(["gwtp.*", "nets.py:f", "torchlike.optim.*"])


@pytest.mark.parametrize(
    "target",
    [
        "gwtp.nets:make",
        "gwtp:make",
        "gwtp.layers:layer",
        "gwtp.nets:layer",
        "gwtp.nets:Net",
        "gwtp.nets:Net.method",
        "gwtp.nets:net",
        "gwtp.nets:cached",
        "gwtp.nets:listed",
        "nets.py:f",
    ],
)
def test_what_is_allowed_is_found(folder: Path, target: str) -> None:
    assert find_target(target, PERMISSIONS) is find_target(target)


@pytest.mark.parametrize(
    "target",
    [
        "os:system",
        "builtins:eval",
        "builtins:exec",
        "importlib:import_module",
        "subprocess:Popen",
        "gwtp_secret:run",
        "gwtp.nets:os",
        "gwtp.nets:os.system",
        "gwtp.nets:sp.Popen",
        "gwtp.nets:sp.os.system",
        "gwtp.nets:system",
        "gwtp.nets:environ",
        "gwtp.nets:environ.get",
        "gwtp.nets:rmtree",
        "gwtp.nets:alias",
        "gwtp.nets:join",
        "gwtp.nets:unlisted",
        "gwtp.nets:functools.partial",
        "gwtp.nets:_hidden",
        "gwtp.nets:__builtins__",
        "gwtp.nets:__loader__.get_data",
        "gwtp.nets:__spec__.loader.exec_module",
        "gwtp.nets:make.__globals__",
        "gwtp.nets:make.__globals__.get",
        "gwtp.nets:make.__code__",
        "gwtp.nets:make.__class__",
        "gwtp.nets:make.__module__.join",
        "gwtp.nets:Net.inner",
        "gwtp.nets:Net.inner.system",
        "gwtp.nets:Net.mro",
        "gwtp.nets:Net.__subclasses__",
        "gwtp.nets:Net.__init__.__globals__",
        "gwtp.nets:Child.encode",
        "gwtp.nets:cached.cache_clear",
        "gwtp.nets:listed.func",
        "gwtp.nets:running.gi_frame",
        "gwtp.nets:running.gi_frame.f_builtins",
        "gwtp.nets:running.gi_code.co_name.join",
        "gwtp:nets",
        "gwtp:nets.os.system",
        "gwtp:nets.make",
        "gwtp:layers.layer",
        "gwtp_secret.py:run",
        "sub/nets.py:f",
        "../nets.py:f",
        "./nets.py:f",
        "sub/../nets.py:f",
        "nets.py:os",
        "nets.py:os.system",
        "nets.py:g",
        "gwtp/nets.py:make",
        "gwtp.nets.py:make",
        "gwtp.nets/../../gwtp_secret:run",
        "gwtp.:make",
        "gwtp..nets:make",
        "gwtpx:make",
        "gwtp.nets :make",
        "gwtp.nets:make ",
        "gwtp.nets:make\n",
        "gwtp.nets\n:make",
        "gwtp.nets:make..x",
        "gwtp.nets:ｍake",
        "*:system",
        "gwtp.*:make",
        ":make",
        "make",
        "",
    ],
)
def test_what_is_not_allowed_is_refused_before_it_is_had(folder: Path, target: str) -> None:
    with pytest.raises((UnknownTargetError, UsageError)) as caught:
        find_target(target, PERMISSIONS)
    assert "may not be called here" in str(caught.value) or "a target is" in str(caught.value)
    assert "gwtp_secret" not in sys.modules, "not even imported"


def test_the_absolute_path_of_an_allowed_file_is_another_name(folder: Path) -> None:
    with pytest.raises(UnknownTargetError, match="matches no pattern"):
        find_target(f"{folder}/nets.py:f", PERMISSIONS)
    assert find_target(f"{folder}/nets.py:f", Permissions([f"{folder}/*.py"]))(1) == 1


def test_nothing_is_allowed_by_an_empty_list(folder: Path) -> None:
    with pytest.raises(UnknownTargetError, match="nothing but what its file loads"):
        find_target("gwtp.nets:make", Permissions([]))


def test_patterns_of_files_and_attributes(folder: Path) -> None:
    assert find_target("sub/nets.py:f", Permissions(["sub/*.py"]))(1) == 1
    assert find_target("gwtp.nets:make", Permissions(["gwtp.nets:ma*"]))
    assert find_target("gwtp.nets:make", Permissions(["gwtp.n*"]))
    for pattern in ("*.py", "gwtp", "gwtp:make", "gwtp.layers", "gwtp.nets:m", "gwtp.nets.*:x", "*"):
        with pytest.raises(UnknownTargetError):
            find_target("gwtp.nets:make", Permissions([pattern]))


def test_what_a_pattern_names_itself_may_have_been_defined_elsewhere(folder: Path) -> None:
    """Keras's optimizers have another home than their public name; who writes the name means it. Not a module, nor what is below it."""
    permissions = Permissions(["gwtp.nets:alias", "gwtp.nets:os", "gwtp.nets:unlis*"])
    assert find_target("gwtp.nets:alias", permissions) is find_target("gwtp.nets:alias")
    for target in ("gwtp.nets:alias.__call__", "gwtp.nets:os", "gwtp.nets:os.system", "gwtp.nets:unlisted"):
        with pytest.raises(UnknownTargetError, match="may not be called here"):
            find_target(target, permissions)


def test_optimizers_and_schedules_are_targets_too(folder: Path) -> None:
    class Program:
        is_module = True

        def optimizer(self, target: object, kwargs: object, *_: object) -> object:
            raise AssertionError("it must not come to this")

    state = State(None, lambda _: 1, lambda target: find_target(target, PERMISSIONS))
    with pytest.raises(UnknownTargetError, match="may not be called here"):
        state.act(Program(), "optimizer", ["os:system", {}], {})  # type: ignore[arg-type]
