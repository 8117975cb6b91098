"""The error tree: one root, retries, pickling apart, and what a remote exception becomes here."""

from __future__ import annotations

import builtins
import copy
import pickle
import traceback

import pytest

from gradwire_wire import errors
from gradwire_wire.errors import GradwireError, RemoteError, WorkerDiedError, remote_error, shown

CLASSES = [
    c
    for c in vars(errors).values()
    if isinstance(c, type) and issubclass(c, Exception) and c is not Exception
]
BUILTIN = [
    name
    for name, c in vars(builtins).items()
    if isinstance(c, type) and issubclass(c, Exception) and not name.endswith("Group")
    if not issubclass(c, (StopIteration, StopAsyncIteration))
]


def test_all_is_the_public_names() -> None:
    assert set(errors.__all__) == {c.__name__ for c in CLASSES} | {
        "class_named",
        "remote_error",
        "shown",
        "with_base",
    }


@pytest.mark.parametrize("cls", CLASSES)
def test_one_root_and_plain_construction(cls: type[GradwireError]) -> None:
    assert issubclass(cls, GradwireError) and cls.__doc__
    error = cls("what happened, where, what to try")
    assert cls is RemoteError or str(error) == "what happened, where, what to try"
    assert type(cls.retry_safe) is bool


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    for cls in CLASSES:
        assert cls.__name__ in (errors.__doc__ or "")


def test_also_catchable_as_the_builtin() -> None:
    pairs = [
        (errors.DeadlineError, TimeoutError),
        (errors.ConnectError, ConnectionError),
        (errors.MemoryExhaustedError, MemoryError),
        (errors.DtypeError, TypeError),
        (errors.UnsupportedTensorError, TypeError),
        (errors.UnknownTargetError, LookupError),
    ]
    for cls, builtin in pairs:
        assert issubclass(cls, builtin)


def test_a_death_carries_its_circumstances() -> None:
    error = WorkerDiedError("gone", exit_code=7, signal=None, output="last words", was_running=False)
    assert (error.exit_code, error.signal, error.output, error.was_running) == (7, None, "last words", False)
    assert copy.copy(error).output == "last words"


@pytest.mark.parametrize("name", BUILTIN)
def test_a_remote_builtin_is_that_builtin_too(name: str) -> None:
    error = remote_error(name, "bad 42", "Traceback: file.py line 3", "torch")
    assert isinstance(error, RemoteError) and isinstance(error, getattr(builtins, name))
    with pytest.raises(getattr(builtins, name)):
        raise error
    assert (error.type_name, error.message, error.worker) == (name, "bad 42", "torch")
    for text in (str(error), "".join(traceback.format_exception(type(error), error, None))):
        assert "bad 42" in text and "file.py line 3" in text and "torch" in text
    assert "bad 42" in repr(error) and error.args == ("bad 42",)


@pytest.mark.parametrize("name", [*BUILTIN, "my.module.CustomError"])
def test_it_can_be_pickled_as_pools_of_processes_do(name: str) -> None:
    error = remote_error(name, "bad 42", "Traceback: file.py line 3", "torch")
    error.extra = 5  # type: ignore[attr-defined]
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error) and str(again) == str(error) and again.extra == 5
        assert again.args == ("bad 42",) and again.traceback == error.traceback


@pytest.mark.parametrize("cls", CLASSES)
def test_so_can_the_others(cls: type[GradwireError]) -> None:
    again = pickle.loads(pickle.dumps(cls("what happened")))
    assert type(again) is cls and again.args == ("what happened",)


@pytest.mark.parametrize(
    "name",
    [
        "my.module.CustomError",
        "ExceptionGroup",
        "StopIteration",
        "StopAsyncIteration",
        "SystemExit",
        "KeyboardInterrupt",
        "print",
        "no such",
        "",
        "x.ValueError",
    ],
)
def test_what_is_no_builtin_exception_is_a_plain_remote_error(name: str) -> None:
    assert type(remote_error(name, "m", "", "w")) is RemoteError


def test_r59_what_is_derived_from_a_builtin_is_that_builtin_too() -> None:
    error = remote_error("json.decoder.JSONDecodeError(ValueError)", "bad 42", "", "w")
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(one, ValueError) and one.type_name == "json.decoder.JSONDecodeError"
        assert str(one) == "json.decoder.JSONDecodeError: bad 42 in worker 'w'"
    missing = remote_error("FileNotFoundError", "[Errno 2] No such file or directory: '/x'", "", "w")
    assert isinstance(missing, OSError) and missing.errno == 2
    assert missing.strerror == "No such file or directory"


def test_the_prefix_of_builtins_is_understood() -> None:
    assert isinstance(remote_error("builtins.ValueError", "m", "", ""), ValueError)
    assert str(remote_error("ValueError", "m", "", "")) == "ValueError: m"


def deep(levels: int) -> list:
    x: list = []
    for _ in range(levels):
        x = [x]
    return x


@pytest.mark.parametrize(
    "value", [b"x" * 10**7, "x" * 10**7, deep(5000), list(range(10**6)), {1: deep(900)}, None]
)
def test_shown_is_short_whatever_it_is_given(value: object) -> None:
    assert len(shown(value)) < 200
