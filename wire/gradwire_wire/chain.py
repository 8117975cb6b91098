"""Which call this process is serving, and through which workers it came: told with every call made meanwhile.

A worker serves one call at a time, so a call that comes back to a worker on its own chain (A → B → A) could never
finish: whoever is about to make it, or to serve it, refuses. The chain belongs to the process and not to a thread or
context: user code calls from threads and event loops of its own and from those of XLA, which inherit no context.
So a call made by a thread that has nothing to do with the call being served is refused, too, where it would come back.
"""

from __future__ import annotations

from typing import Sequence

from gradwire_wire.errors import UsageError

__all__ = ["check_not_in_chain", "serve", "serving"]

_NONE: list[bytes] = []
_serving = _NONE


def serve(chain: Sequence[bytes]) -> None:
    """Worker: user code runs for a call that came through these incarnations, our own the last. Empty: no more."""
    global _serving
    _serving = list(chain) if chain else _NONE


def serving() -> list[bytes]:
    """The chain of the call that this process is serving; empty in a program that is no worker. Not to be changed."""
    return _serving


def check_not_in_chain(incarnation: bytes, name: str, chain: Sequence[bytes]) -> None:
    """UsageError where a call with this chain would come back to that worker."""
    if chain and incarnation in chain:
        raise UsageError(
            f"worker {name!r} was called by a call that it is itself waiting for (A → B → A); "
            "it serves one call at a time, so this could never finish. Let a third worker do that part, or return to "
            "the caller first"
        )
