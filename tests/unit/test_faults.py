"""Exceptions as messages: whatever user code raises, the worker finds words for it and lives."""

from __future__ import annotations

import builtins
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradwire_wire import errors, messages
from gradwire_wire.errors import DtypeError, ProtocolError, ResidualLostError, remote_error
from gradwire_wire.messages import Failed
from gradwire_workers import faults
from gradwire_workers.faults import MAX_TEXT, failed


def caught(act: Callable[[], Any]) -> BaseException:
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def raising(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def report(error: BaseException) -> Failed:
    """As it arrives at the client."""
    made = messages.unpack(messages.pack(failed(7, error)))
    assert type(made) is Failed and made.call_id == 7
    return made


class TwoArguments(Exception):
    """R59: cannot be rebuilt from its message."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class NotText(Exception):
    __str__ = lambda self: 7  # type: ignore[assignment]  # noqa: E731


class Leaves(Exception):
    def __str__(self) -> str:
        raise SystemExit("in the middle of an error's message")


class _Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__qualname__":
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class Nameless(Exception, metaclass=_Nameless):
    pass


class Passed(errors.RemoteError):
    """What user code may make of a class of ours: nothing in it is text."""

    type_name = message = traceback = None  # type: ignore[assignment]

    def __str__(self) -> str:
        raise KeyboardInterrupt


class Secretive(Exception):
    """Not even its class can be asked for, nor its arguments or its traceback."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is a secret")


class Renamed(Exception):
    pass


Renamed.__qualname__ = "Half\ud800"
Renamed.__module__ = None  # type: ignore[assignment]


def test_r59_a_users_exception() -> None:
    made = report(caught(raising(TwoArguments(1, 2))))
    assert (made.kind, made.message) == ("RemoteError", "1 and 2")
    assert made.type_name == f"{__name__}.TwoArguments"
    assert "test_faults.py" in made.traceback and "TwoArguments: 1 and 2" in made.traceback


@pytest.mark.parametrize(
    "name",
    [n for n, c in vars(builtins).items() if isinstance(c, type) and issubclass(c, BaseException)],
)
def test_every_builtin_exception(name: str) -> None:
    cls = getattr(builtins, name)
    arguments: dict[str, tuple[Any, ...]] = {
        "BaseExceptionGroup": ("two", [ValueError("first 1"), SystemExit("second 2")]),
        "ExceptionGroup": ("two", [ValueError("first 1"), KeyError("second 2")]),
        "UnicodeDecodeError": ("utf-8", b"\xff", 0, 1, "bad 42"),
        "UnicodeEncodeError": ("ascii", "\ud800", 0, 1, "bad 42"),
        "UnicodeTranslateError": ("é", 0, 1, "bad 42"),
    }
    error = cls(*arguments.get(name, ("bad 42",)))
    made = report(caught(raising(error)))
    assert made.kind == "RemoteError" and getattr(builtins, made.type_name) is cls
    if name.endswith("Group"):
        assert sys.version_info < (3, 11) or ("first 1" in made.traceback and "second 2" in made.traceback)
    else:
        assert "bad 42" in made.message and "bad 42" in made.traceback


def test_r59_the_cause_is_there() -> None:
    def act() -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    made = report(caught(act))
    assert "inner" in made.traceback and "direct cause" in made.traceback and made.message == "outer"


def test_a_key_errors_message_is_the_key() -> None:
    assert report(KeyError("missing")).message == "missing"
    assert report(KeyError(("a", 1))).message == "('a', 1)"
    assert report(KeyError("a", "b")).message == "('a', 'b')"


@pytest.mark.parametrize(
    "error",
    [
        Mute(),
        NotText(),
        Leaves(),
        Nameless("x"),
        Passed("x"),
        pytest.param(Secretive("x"), id="Secretive"),
        Renamed("x"),
        ValueError("\ud800 half"),
        ValueError(b"bytes", object()),
        ValueError(),
    ],
)
def test_r59_what_cannot_be_shown_is_said_so(error: BaseException) -> None:
    made = report(caught(raising(error)))
    assert made.kind == "RemoteError" and type(made.message) is str and made.type_name


def test_long_texts_are_cut() -> None:
    made = report(caught(raising(ValueError("x" * 10**7))))
    assert len(made.message) < MAX_TEXT + 100 and "… cut …" in made.message
    assert len(made.traceback) < MAX_TEXT + 100


def test_a_recursion_without_end_is_reported() -> None:
    def forever() -> None:
        forever()

    made = report(caught(forever))
    assert made.type_name == "RecursionError" and len(made.traceback) < MAX_TEXT


def test_r59_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    made = report(caught(lambda: compile("x = = 1", "user.py", "exec")))
    assert made.type_name == "SyntaxError" and "user.py" in made.traceback and "x = = 1" in made.traceback


def test_gradwires_own_errors_keep_their_class() -> None:
    made = report(DtypeError("float64 is not for JAX"))
    assert made == Failed(7, "DtypeError", "", "float64 is not for JAX", "")
    lost = ResidualLostError("gone")
    assert report(lost).type_name == ""
    lost.recompute = True  # type: ignore[attr-defined]
    assert report(lost).type_name == "recompute"


def test_a_class_derived_from_gradwires_is_told_as_what_it_is_derived_from() -> None:
    class Mine(ProtocolError):
        pass

    assert report(Mine("m")).kind == "ProtocolError"


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n.endswith("Error")])
def test_every_class_the_worker_can_name_is_known_to_the_client(name: str) -> None:
    made = report(getattr(errors, name)("m"))
    assert getattr(errors, made.kind).__name__ == name


@pytest.mark.parametrize("name", ["ValueError", "mod.Mine(ValueError)", "mod.Mine"])
def test_an_error_of_a_worker_that_the_worker_called_is_passed_on(name: str) -> None:
    inner = remote_error(name, "bad 42", "Traceback: inner.py", "second")
    made = report(caught(raising(inner)))
    assert (made.kind, made.type_name, made.message) == ("RemoteError", name, "bad 42")
    assert "inner.py" in made.traceback


def test_the_workers_own_frames_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own" / "desk.py"
    own.parent.mkdir()
    source = "def serve(act):\n    return act()\n"
    namespace: dict[str, Any] = {}
    exec(compile(source, str(own), "exec"), namespace)
    monkeypatch.setattr(faults, "_OWN", (f"{own.parent}/",))
    user: dict[str, Any] = {}
    code = textwrap.dedent("""
        def f():
            raise ValueError("bad 42")
    """)
    exec(compile(code, str(tmp_path / "user.py"), "exec"), user)
    try:
        namespace["serve"](user["f"])
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]  # this file's own frame
        made = report(error)
    assert "user.py" in made.traceback and "desk.py" not in made.traceback


def test_a_fault_of_the_worker_itself_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_OWN", (str(Path(__file__).parent) + "/",))
    assert "test_faults.py" in report(caught(raising(ValueError("m")))).traceback
