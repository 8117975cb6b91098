"""Modules that are loaded when they are first needed.

Theory of operation. Python lets a thread import a module again that it is just importing, and gives it what is there
so far. Only a handler of signals meets that: one that makes a call where the first call of its program has just begun
to load something, or where the program imports a framework. So a module counts once it is complete, and whoever
needs one that its own thread has left incomplete is refused: waiting would be for ever. Another thread's import is waited for,
by Python.
"""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

from gradwire_wire.errors import MemoryExhaustedError, UsageError
from gradwire_wire.process import RAISE_LIMIT, lacks_descriptors

__all__ = ["complete", "is_loading", "needed"]

_under_way: set[int] = set()
"""The threads that load something here."""


def is_loading(name: str) -> bool:
    """Whether the module's import has begun and is not over."""
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)


def complete(name: str) -> Any:
    """The module if it has been loaded to its end; else, or where a program hides it by None, None."""
    return None if is_loading(name) else sys.modules.get(name)


def needed(name: str) -> Any:
    """The module, which is imported if need be. UsageError for a handler of signals that has interrupted its import; MemoryExhaustedError
    where no file can be opened."""
    module = complete(name)
    return _imported(name) if module is None else module


def _imported(name: str) -> Any:
    thread = threading.get_ident()
    if thread in _under_way:
        raise _interrupted(name)
    _under_way.add(thread)
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and is_loading(error.name):
            raise _interrupted(error.name) from None
        raise
    except OSError as error:
        if not lacks_descriptors(error):
            raise
        raise MemoryExhaustedError(
            f"too many files are open in this process for it to load {name!r}: close some, or {RAISE_LIMIT}: {error}"
        ) from error
    finally:
        _under_way.discard(thread)
    if is_loading(name):
        raise _interrupted(name)
    return module


def _interrupted(name: str) -> UsageError:
    return UsageError(
        f"a handler of signals makes a call that needs the module {name!r}, and has interrupted its loading. "
        "Have it set a flag, or make its call in a thread of its own"
    )
