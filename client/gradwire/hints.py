"""Classes that annotations name and that a program may never need: loaded for whoever asks (`typing.get_type_hints`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradwire.loading import needed

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gradwire.remote import Remote
    from gradwire.trace import Trace

__all__ = ["Future", "Remote", "Trace"]

_HOMES = {"Future": "concurrent.futures", "Remote": "gradwire.remote", "Trace": "gradwire.trace"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradwire.hints' has no attribute {name!r}")
    return getattr(needed(_HOMES[name]), name)
