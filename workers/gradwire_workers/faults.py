"""An exception as the message that tells the caller about it. Reads exceptions, never trusts them."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from types import TracebackType
from typing import Any, Callable

import gradwire_wire
import gradwire_workers
from gradwire_wire.errors import GradwireError, RemoteError, with_base
from gradwire_wire.messages import Failed

__all__ = ["failed", "show"]

MAX_TEXT = 200_000
_OWN = tuple(
    os.path.abspath(folder) + os.sep for m in (gradwire_wire, gradwire_workers) for folder in m.__path__
)


def failed(call_id: int, error: Any) -> Failed:
    """error: any exception. gradwire's own errors keep their class; everything else is the user's and becomes RemoteError.

    Raises nothing, whatever the error's class, ``__str__`` or attributes do: the worker lives on after it.
    """
    kind = type(error)  # and not isinstance, which asks the error itself for its class
    if issubclass(kind, RemoteError):  # of a worker that this one called: passed on as what it is
        name, message = (
            _shown(lambda: with_base(error.type_name, kind), "its type"),
            _shown(lambda: error.message, "its message"),
        )
        return Failed(call_id, "RemoteError", name, message, _formatted(error))
    if issubclass(kind, GradwireError):
        hint = "recompute" if getattr(error, "recompute", False) else ""
        return Failed(call_id, _own_class(error), hint, _text_of(error), "")
    return Failed(call_id, "RemoteError", _name_of(kind), _text_of(error), _formatted(error))


def show(error: BaseException, before: str = "") -> None:
    """Print it with its traceback, after a line of ours. Raises nothing, whatever user code has made of `sys.stderr`."""
    try:
        if before:
            print(before, file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)
    except BaseException as problem:  # user code has changed what showing it takes
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}, which cannot be shown: {type(problem).__name__}\n".encode())


def _own_class(error: GradwireError) -> str:
    """The caller knows the classes of gradwire, and not what user code derives from them."""
    return next(c.__name__ for c in type(error).__mro__ if c.__module__ == GradwireError.__module__)


def _name_of(kind: type[BaseException]) -> str:
    return _shown(lambda: _full_name(kind), "its type")


def _full_name(kind: type[BaseException]) -> str:
    name = str(kind.__qualname__)
    return name if kind.__module__ == "builtins" else with_base(f"{kind.__module__}.{name}", kind)


def _text_of(error: BaseException) -> str:
    return _shown(lambda: error.args[0] if _is_key(error) else str(error), "its message")


def _is_key(error: BaseException) -> bool:
    return issubclass(type(error), KeyError) and len(error.args) == 1


def _formatted(error: BaseException) -> str:
    return _shown(lambda: _traceback_of(error), "its traceback")


def _traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__)))


def _shown(make: Callable[[], Any], what: str) -> str:
    """What that makes, as text; where it fails, which a user's ``__str__`` may do in any way, that this cannot be shown."""
    try:
        text = make()
        return _shorten(text if isinstance(text, str) else repr(text))
    except BaseException as failure:
        return f"<{what} cannot be shown: {type.__repr__(type(failure))}>"


def _users_part(tb: TracebackType | None) -> TracebackType | None:
    """Without the frames of the worker itself on top (all of it, if it never left the worker)."""
    part = tb
    while part is not None and os.path.abspath(part.tb_frame.f_code.co_filename).startswith(_OWN):
        part = part.tb_next
    return part or tb


def _shorten(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n… cut …\n{text[-MAX_TEXT // 2 :]}"
