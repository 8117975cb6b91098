"""What a restart of the worker takes from a module, and whether its program has been told. Pure.

A module is loaded again from its factory, so what is lost is whatever had become of it since. Going on without a word
would be silently wrong: the program is told once, by the first use after the restart. It is not told again where a call
of this module met the death, and not where it has said that it knows (`Worker.restart` with ``discard_state=True``, or
a state loaded before anything else).
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Stake", "Stakes"]


class Stake(IntEnum):
    """What of a module may no longer be as its factory made it."""

    NOTHING = 0
    BUFFERS = 1
    ALL = 2


class Stakes:
    """Of one module, shared by its functional forms. ``is_lost``: it went with a process, and nobody has been told."""

    def __init__(self) -> None:
        self.stake = Stake.NOTHING
        self.is_lost = False
        self._is_known = False

    def raise_to(self, stake: Stake) -> None:
        """A call or a verb that moves this much has been made."""
        if stake > self.stake:
            self.stake = stake

    def note_death(self) -> None:
        """A call of this module has told its caller that the process died."""
        self._is_known = True

    def begin(self, discarded: bool) -> None:
        """The module was loaded again. discarded: the program has said that it knows what that means."""
        if discarded or self._is_known:
            self.is_lost = False
        elif self.stake > Stake.NOTHING:
            self.is_lost = True
        self.stake, self._is_known = Stake.NOTHING, False

    def settle(self) -> None:
        """The program has been told, or has loaded a state."""
        self.is_lost = False
