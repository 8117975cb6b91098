"""R54: where greenlets stand in for threads or sockets nothing could be waited for: refused before anything is started."""

from __future__ import annotations

import _thread
import select
import socket
from typing import Any

import pytest

import gradwire as gw
from gradwire.greenlets import check_none


class GreenSocket:
    """As gevent's and eventlet's are: no subclass of the system's."""


@pytest.mark.parametrize(
    ("module", "name", "green", "what"),
    [
        (_thread, "get_ident", lambda: 0, "threads"),
        (socket, "socket", GreenSocket, "sockets"),
        (select, "poll", None, "select"),
    ],
)
def test_r54_greenlets_are_refused(
    module: Any, name: str, green: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_none()
    with monkeypatch.context() as patched:
        patched.setattr(module, name, green)
        with pytest.raises(
            gw.UsageError, match=rf"program's {what} by its own.*monkey.patch_all\(thread=False"
        ):
            gw.connect()


def test_what_debuggers_replace_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    start = _thread.start_new_thread
    monkeypatch.setattr(_thread, "start_new_thread", lambda *args: start(*args))
    check_none()
