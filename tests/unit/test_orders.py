"""What is asked of `Bridge.worker` is checked before a byte is sent."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gradwire.orders import checked_spec
from gradwire_wire.errors import UsageError

NOTHING: dict[str, Any] = {
    **dict.fromkeys(("python", "env", "path", "cwd", "threads", "x64", "device")),
    "start_timeout": 120.0,
}


def spec(framework: str = "numpy", name: str = "n", **other: Any) -> Any:
    return checked_spec(framework, name, **{**NOTHING, **other})


def test_nothing_asked_for_is_the_current_folder() -> None:
    assert spec()[:6] == ("numpy", "n", None, {}, [os.getcwd()], os.getcwd())


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("here/a", "b", "me/c"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.chdir(tmp_path / "here")
    made = spec(path=["a", tmp_path / "b", "~/c"], cwd="d", python="~/env/bin/python")
    assert made.path == [f"{tmp_path}/{folder}" for folder in ("here/a", "b", "me/c")]
    assert (made.cwd, made.python) == (f"{tmp_path}/here/d", f"{tmp_path}/me/env/bin/python")
    assert spec(python="3.9").python == "3.9"


def test_modules_are_looked_for_in_what_python_takes_them_from(tmp_path: Path) -> None:
    archive = tmp_path / "models.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("models.py", "")
    assert spec(path=[archive]).path == [str(archive)]


def test_env_takes_text_numbers_and_paths_and_none_removes() -> None:
    env = {"A": "x", "B": 2, "C": Path("/p"), "D": None, "E": ""}
    assert spec(env=env).env == {"A": "x", "B": "2", "C": "/p", "D": None, "E": ""}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"framework": "pytorch"},
            "there is no framework 'pytorch'; there are torch, tensorflow, jax, numpy. Did you mean 'torch'",
        ),
        ({"framework": None}, "there is no framework None"),
        ({"name": ""}, "a worker's name is a text"),
        ({"name": "a\nb"}, "a worker's name is a text"),
        ({"python": 3.1}, "write it as text"),
        ({"python": ""}, "python='' is not a path"),
        ({"env": {"A": True}}, r"env\['A'\] is True: give text"),
        ({"env": {"A": ["x"]}}, r"env\['A'\] is \['x'\]"),
        ({"env": {"A": "\0"}}, "zero character"),
        ({"env": {"A=B": "x"}}, "'A=B', which cannot be the name"),
        ({"env": {1: "x"}}, "1, which cannot be the name"),
        ({"env": ["A=x"]}, "as a dict"),
        ({"path": "src"}, r"a list of folders, \['src'\]"),
        ({"path": 5}, "give a list of folders"),
        ({"path": [None]}, "path=None is not a path"),
        ({"path": [".", "nowhere"]}, f"there is no folder {os.getcwd()}/nowhere"),
        ({"path": [__file__]}, f"is a file. Name the folder it lies in: {Path(__file__).parent}"),
        ({"threads": 0}, "1 or more"),
        ({"threads": True}, "1 or more"),
        ({"threads": 1.5}, "1 or more"),
        ({"x64": "yes"}, "True, False or None"),
        ({"device": 0}, "'cuda:0'"),
        ({"start_timeout": 0}, "seconds"),
        ({"start_timeout": float("nan")}, "seconds"),
        ({"start_timeout": "1"}, "seconds"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        spec(**asked)


def test_a_start_that_may_take_very_long_takes_what_the_system_can_count() -> None:
    assert spec(start_timeout=1e300).start_timeout * 1000 < 2**31
