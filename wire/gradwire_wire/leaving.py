"""Whether the interpreter is at its exit. Finalizers return nothing from then on: other ones may use it to the very end.

Loaded early by whoever wants to work with shared memory in exit functions of its own, which run before what was
registered before them.
"""

from __future__ import annotations

import atexit
import sys

__all__ = ["INTERPRETER"]


class _Interpreter:
    """An object, for finalizers to hold: modules are emptied before the last of them run."""

    is_leaving = False

    def leave(self) -> None:
        self.is_leaving = True
        # pyzmq has an exit function for this, which is not run where one of the user's was the first to import it: it would warn
        # of the open context, and wait for its end
        notice = getattr(sys.modules.get("zmq.sugar.context"), "_notice_atexit", None)
        if notice is not None:
            notice()


INTERPRETER = _Interpreter()
atexit.register(INTERPRETER.leave)
