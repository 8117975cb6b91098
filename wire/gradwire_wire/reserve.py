"""Descriptors kept for gradwire's own use in a process whose user code may open files until there are none left.

libzmq ends the process when somebody connects and there is no descriptor for that, and a lane that cannot be taken out of
the tether serves nobody. So a few are held, and given up a handful at a time when no other is free.
"""

from __future__ import annotations

import os
import resource
import time

from gradwire_wire.process import check_descriptors, lacks_descriptors

__all__ = ["Reserve"]

MOST, HANDFUL = 16, 4
AGAIN_S = 1.0


class Reserve:
    """Some of what the limit allows: a sixteenth, and 16 at most. Used by one thread."""

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._count = MOST if soft == resource.RLIM_INFINITY else min(MOST, soft // 16)
        self._held: list[int] = []
        self._again_s = 0.0
        self._probe = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._refill()

    def keep_room(self) -> None:
        """Whenever user code has run: at least one descriptor is free afterwards, for as long as there is a reserve."""
        try:
            os.close(os.dup(self._probe))
        except OSError as error:
            if lacks_descriptors(error):
                self.release()
            return
        if len(self._held) < self._count and time.monotonic() > self._again_s:
            self._refill()

    def release(self) -> bool:
        """Free a handful. False where none is left."""
        freed, self._held = self._held[:HANDFUL], self._held[HANDFUL:]
        for fd in freed:
            try:
                os.close(fd)
            except OSError:  # user code has closed what is not its own
                pass
        return bool(freed)

    def _refill(self) -> None:
        """Where there is plenty again."""
        self._again_s = time.monotonic() + AGAIN_S
        try:
            check_descriptors(2 * self._count)
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            pass
