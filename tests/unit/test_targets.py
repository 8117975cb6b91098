"""Finding what a target names, and saying what was looked for where it is not there."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire_wire.errors import UnknownTargetError, UsageError
from gradwire_workers import targets
from gradwire_workers.targets import cannot_be_called, find_target, is_factory

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a file below a folder that targets are looked for in; what gets imported is forgotten again."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.chdir("/")
    before = set(sys.modules)

    def write(name: str, source: str = "def f(x):\n    return x\n") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.path_importer_cache.clear()


def test_a_module_and_its_attributes(write: Write) -> None:
    write("gwt_pkg/__init__.py", "")
    write("gwt_pkg/mod.py", "class C:\n    class D:\n        f = staticmethod(len)\n")
    assert find_target("gwt_pkg.mod:C.D.f") is len
    assert find_target("math:sqrt")(4) == 2


def test_a_file_by_any_path(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("sub/gwt_model.py", "import gwt_sibling\nvalue = gwt_sibling.value\n")
    write("sub/gwt_sibling.py", "value = [1]\n")
    found = find_target(f"{path}:value")
    assert found == [1]
    assert find_target("sub/gwt_model.py:value") is found, "below a folder of the worker"
    monkeypatch.setattr(targets, "_START", str(tmp_path / "sub"))
    assert find_target("gwt_model.py:value") is found, "below the working directory"
    assert find_target("../sub/./gwt_model.py:value") is found
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_target("~/sub/gwt_model.py:value") is found, "as in path= and python="
    os.symlink(path, tmp_path / "gwt_link.py")
    assert find_target(f"{tmp_path}/gwt_link.py:value") is found, "one file is one module"


def test_relative_names_are_those_of_the_start(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User code that changes the working directory, or removes it, changes nothing about what a name means."""
    write("gwt_here.py", "value = 'here'\n")
    write("elsewhere/gwt_here.py", "value = 'elsewhere'\n")
    monkeypatch.setattr(targets, "_START", str(tmp_path))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_target("gwt_here.py:value") == "here"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert find_target("elsewhere/gwt_here.py:value") == "elsewhere"


def test_a_file_of_a_package_is_named_by_its_import_path(write: Write) -> None:
    write("gwt_rel/__init__.py", "")
    write("gwt_rel/sib.py", "value = 41\n")
    path = write("gwt_rel/part.py", "from .sib import value\n")
    with pytest.raises(UnknownTargetError, match=r"'gwt_rel\.part:attr'"):
        find_target(f"{path}:value")
    assert find_target("gwt_rel.part:value") == 41


def test_two_files_of_one_name(write: Write) -> None:
    one, other = write("one/gwt_same.py", "value = 1\n"), write("other/gwt_same.py", "value = 2\n")
    assert find_target(f"{one}:value") == 1 and find_target(f"{other}:value") == 2
    assert find_target(f"{one}:value") == 1


def test_R58_a_file_with_the_name_of_a_framework_does_not_become_it(write: Write) -> None:
    path = write("json.py", "value = 'the user\\'s'\n")
    assert find_target(f"{path}:value") == "the user's"
    assert sys.modules["json"].__file__ != str(path)
    path = write("not-a-name.py", "value = 3\n")
    assert find_target(f"{path}:value") == 3


def test_a_file_that_is_a_module_already_is_that_module(write: Write) -> None:
    path = write("gwt_twice.py", "value = []\n")
    assert find_target("gwt_twice:value") is find_target(f"{path}:value") is find_target("gwt_twice:value")


def test_classes_of_a_file_can_find_their_module(write: Write) -> None:
    path = write("gwt_data.py", "import dataclasses\n@dataclasses.dataclass\nclass C:\n    a: 'int' = 1\n")
    cls = find_target(f"{path}:C")
    assert sys.modules[cls.__module__].C is cls


@pytest.mark.parametrize(
    "target",
    ["", "nothing", ":", "math:", ":sqrt", "math", "file.py", "file.py:", ".relative:f", "..:f"],
)
def test_what_is_no_target_is_a_usage_error(target: str) -> None:
    with pytest.raises(UsageError, match=r"pkg\.mod:attr"):
        find_target(target)


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("torch.optim.Adam", "torch.optim:Adam"),
        ("transformers.AutoModel.from_pretrained", "transformers:AutoModel.from_pretrained"),
        ("PIL.ImageOps.invert", "PIL:ImageOps.invert"),
        ("pkg.mod.f", "pkg.mod:f"),
    ],
)
def test_where_its_colon_was_meant_to_be(target: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        find_target(target)


def test_what_to_do_with_an_object_that_cannot_be_called() -> None:
    """Such as scikit-learn's models: how its methods are reached."""
    assert "lambda name, *args: getattr(found, name)(*args)" in str(cannot_be_called(Path(), is_module=True))
    assert "Name a function" in str(cannot_be_called(Path(), is_module=False))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("gwt_no_such_module:f", "no module named 'gwt_no_such_module'.*path="),
        ("math.no_such_part:f", "no module named"),
        ("gwt_no/such/file.py:f", "no file 'gwt_no/such/file.py'; looked at"),
        ("/gwt/no/such/file.py:f", "looked at"),
        ("folder/file:f", "no module named"),
        ("math:sqrtt", "has no 'sqrtt'; did you mean 'sqrt'"),
        ("json:zzzzzz", r"has no 'zzzzzz' \(json is .*json.__init__\.py\)$"),
        ("math:sqrt.no.such", "has no 'sqrt.no.such'"),
        ("a..b:f", "no module named"),
    ],
)
def test_what_is_not_there_is_said(target: str, words: str) -> None:
    with pytest.raises(UnknownTargetError, match=words):
        find_target(target)


def test_the_interpreter_is_named() -> None:
    with pytest.raises(UnknownTargetError, match=sys.executable):
        find_target("gwt_no_such_module:f")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise ValueError('bad 42')", ValueError),
        ("import gwt_not_installed", ModuleNotFoundError),
        ("from math import no_such", ImportError),
        ("x = = 1", SyntaxError),
        ("raise SystemExit(3)", SystemExit),
    ],
)
def test_R65_what_the_users_module_raises_comes_out_as_it_is(
    source: str, error: type[BaseException], write: Write
) -> None:
    path = write("gwt_broken.py", source + "\n")
    for target in ("gwt_broken:f", f"{path}:f"):
        with pytest.raises(error) as caught:
            find_target(target)
        assert not isinstance(caught.value, UnknownTargetError)
        assert "gwt_broken" not in sys.modules
    write("gwt_broken.py", "def f():\n    return 'mended and tried again'\n")
    sys.path_importer_cache.clear()
    assert find_target(f"{path}:f")() == "mended and tried again"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UnknownTargetError):
        find_target(f"{tmp_path}/folder.py:f")


def test_what_a_module_makes_on_demand(write: Write) -> None:
    write(
        "gwt_lazy.py",
        "def __getattr__(name):\n    if name == 'made':\n        return len\n    raise AttributeError(name)\n",
    )
    assert find_target("gwt_lazy:made") is len
    with pytest.raises(UnknownTargetError):
        find_target("gwt_lazy:other")


class Net:
    def __call__(self) -> None:
        pass

    def method(self) -> None:
        pass


@pytest.mark.parametrize(
    ("found", "is_one"),
    [
        (Net, True),
        (Net().method, True),
        (lambda: None, True),
        (len, True),
        (functools.partial(Net), True),
        (Net(), False),
        (7, False),
    ],
)
def test_what_is_called_to_make_a_module(found: Any, is_one: bool) -> None:
    assert is_factory(found) == is_one
