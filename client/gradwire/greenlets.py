"""Programs in which greenlets stand in for threads and sockets (gevent, eventlet): there nothing of a bridge could wait."""

from __future__ import annotations

import _socket
import _thread
import select
import socket
from types import BuiltinFunctionType

from gradwire_wire.errors import UsageError

__all__ = ["check_none"]


def check_none() -> None:
    """UsageError where this program's threads or sockets are not the system's.

    (Debuggers start threads by functions of their own as well; but what a thread's number is they leave alone.)
    """
    real = {
        "threads": isinstance(_thread.get_ident, BuiltinFunctionType),
        "sockets": issubclass(socket.socket, _socket.socket),
        "select": isinstance(getattr(select, "poll", None), BuiltinFunctionType),
    }
    replaced = [name for name, is_real in real.items() if not is_real]
    if replaced:
        raise UsageError(
            f"something (gevent, eventlet) has replaced this program's {', '.join(replaced)} by its own, and a call would wait for "
            "ever. Leave them as they are, as by gevent's monkey.patch_all(thread=False, socket=False, select=False), or use "
            "gradwire in a process of its own"
        )
