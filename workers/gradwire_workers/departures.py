"""What a worker lets go of: all of a client's that is gone, and what a client says it will not name again.

In this order, for each refers to what follows: plans and kept forwards of a module, its optimizers, the module; then the
cycles are looked for that it may have been part of (`garbage`).
"""

from __future__ import annotations

from typing import Any

from gradwire_wire.messages import Forget, Release
from gradwire_workers.garbage import Garbage
from gradwire_workers.loaded import Loaded
from gradwire_workers.program import Program
from gradwire_workers.reception import Reception
from gradwire_workers.residuals import Residuals
from gradwire_workers.sessions import Session, forget_plans
from gradwire_workers.state import State

__all__ = ["Departures"]


class Departures:
    """`release` and `forget` act on messages, see `desk`; ``garbage`` wants a look now and then."""

    def __init__(self, loaded: Loaded, state: State, residuals: Residuals, reception: Reception) -> None:
        self._loaded, self._state, self._residuals, self._reception = loaded, state, residuals, reception
        self.garbage = Garbage()

    def end(self, session: Session) -> None:
        """A client is gone: its residuals go, its loans, and what it has loaded."""
        self._residuals.end(session.client_id)
        session.exchange.end()
        had_optimizers = self._state.end(session.client_id)
        self._let_go(list(self._loaded.end(session.client_id).values()), had_optimizers)

    def release(self, session: Session, release: Release, *_: Any) -> None:
        """These tokens will not be named again."""
        self._residuals.release(release.released, session.client_id)

    def forget(self, session: Session, forget: Forget, *_: Any) -> None:
        """These remotes and optimizers will not be named again."""
        gone = self._loaded.forget(forget.remotes, session.client_id)
        programs = list(gone.values())
        if gone:
            lanes = [lane for lane, owner in self._reception.lanes.values() if owner is session]
            forget_plans([*lanes, *session.dealers.values()], programs)
            self._residuals.forget(gone)
            gone.clear()
        self._let_go(programs, self._state.forget(forget.optimizers, session.client_id))

    def _let_go(self, programs: list[Program], had_optimizers: bool) -> None:
        """Of what nobody can name. Modules and optimizers are large, and parts of cycles."""
        self._state.forget_of(programs)
        had_modules = any(program.is_module for program in programs)
        programs.clear()
        if had_modules or had_optimizers:
            self.garbage.note(had_modules)
