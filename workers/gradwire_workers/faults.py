"""An exception as the message that tells the caller about it. Reads exceptions, never trusts them."""

from __future__ import annotations

import os
import traceback
from types import TracebackType

import gradwire_wire
import gradwire_workers
from gradwire_wire.errors import GradwireError, RemoteError
from gradwire_wire.messages import Failed

__all__ = ["failed"]

MAX_TEXT = 200_000
_OWN = tuple(
    os.path.abspath(folder) + os.sep for m in (gradwire_wire, gradwire_workers) for folder in m.__path__
)


def failed(call_id: int, error: BaseException) -> Failed:
    """gradwire's own errors keep their class; everything else is the user's and becomes RemoteError."""
    if isinstance(error, RemoteError):  # of a worker that this one called: passed on as what it is
        return Failed(
            call_id, "RemoteError", error.type_name, _shorten(error.message), _shorten(_formatted(error))
        )
    if isinstance(error, GradwireError):
        hint = "recompute" if getattr(error, "recompute", False) else ""
        return Failed(call_id, _own_class(error), hint, _text_of(error), "")
    return Failed(call_id, "RemoteError", _name_of(type(error)), _text_of(error), _shorten(_formatted(error)))


def _own_class(error: GradwireError) -> str:
    """The caller knows the classes of gradwire, and not what user code derives from them."""
    return next(c.__name__ for c in type(error).__mro__ if c.__module__ == GradwireError.__module__)


def _name_of(kind: type[BaseException]) -> str:
    name = str(kind.__qualname__)
    return _shorten(name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}")


def _text_of(error: BaseException) -> str:
    try:
        text = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else str(error)
        return _shorten(text if isinstance(text, str) else repr(text))
    except Exception as failure:  # a user's __str__ may do anything
        return f"<its message cannot be shown: {type(failure).__name__}>"


def _formatted(error: BaseException) -> str:
    try:
        tb = _users_part(error.__traceback__)
        return "".join(traceback.format_exception(type(error), error, tb))
    except Exception as failure:
        return f"<its traceback cannot be shown: {type(failure).__name__}>"


def _users_part(tb: TracebackType | None) -> TracebackType | None:
    """Without the frames of the worker itself on top (all of it, if it never left the worker)."""
    part = tb
    while part is not None and os.path.abspath(part.tb_frame.f_code.co_filename).startswith(_OWN):
        part = part.tb_next
    return part or tb


def _shorten(text: str) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]}\n… cut …\n{text[-MAX_TEXT // 2 :]}"
