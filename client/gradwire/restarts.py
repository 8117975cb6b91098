"""When a worker that died is started again, and how long that waits. Pure: it is told what happened and when.

A worker is started again by the next call that needs it, never in the background: nobody is surprised by a process
that nobody asked for, and every failure has a caller to be told to. Waits double from one untimely end to the next,
up to a cap, and begin anew after a healthy time. Ends before the first answered call are counted apart: after
`MOST_EARLY_ENDS` of them in a row something is wrong with the worker rather than with a call, and it is given up.
"""

from __future__ import annotations

from gradwire_wire.errors import UsageError

__all__ = ["MODES", "MOST_EARLY_ENDS", "Restarts"]

MODES = ("never", "on-failure", "always")
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
HEALTHY_S = 10.0
MOST_EARLY_ENDS = 5


class Restarts:
    """The policy of one worker and what it knows of the worker's ends."""

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise UsageError(f"restart must be one of {', '.join(map(repr, MODES))}, not {mode!r}")
        self.mode = mode
        self.forget()

    def forget(self) -> None:
        """The user has started it by hand: earlier ends do not count."""
        self._untimely_ends = 0
        self.early_ends = 0

    @property
    def revives(self) -> bool:
        """Whether this worker may be started again without being asked."""
        return self.mode != "never"

    def wants(self, exit_code: int | None) -> bool:
        """Whether a worker that ended so is to be started again. None: by a signal, or nobody knows how."""
        return self.mode == "always" or (self.mode == "on-failure" and exit_code != 0)

    def note_end(self, lived_s: float, has_answered: bool) -> None:
        """It ended. ``has_answered``: whether any call had been answered; not so where it never became ready."""
        self._untimely_ends = 0 if lived_s >= HEALTHY_S else self._untimely_ends + 1
        self.early_ends = 0 if has_answered else self.early_ends + 1

    @property
    def is_given_up(self) -> bool:
        """Whether it ended at its start so often that it is not tried again."""
        return self.early_ends >= MOST_EARLY_ENDS

    @property
    def delay_s(self) -> float:
        """What to wait before the next start: nothing after a healthy life or a first untimely end."""
        repeats = self._untimely_ends - 2
        return 0.0 if repeats < 0 else float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(repeats, 30)))

    def advice(self, exit_code: int | None) -> str:
        """What a message about that end says about going on."""
        if self.is_given_up:
            return "it was given up after so many ends at its start: worker.restart() tries it once more"
        if self.wants(exit_code):
            return f"the next call starts it again (restart={self.mode!r}), with modules as new from their factories"
        if self.revives:
            return f"an end by itself is not followed by a start (restart={self.mode!r}): worker.restart() starts it again"
        return "worker.restart() starts it again, with modules as new from their factories"
