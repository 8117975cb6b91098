"""Where the user's code runs: marked as running, so that its caller can interrupt it, and with the chain of calls it is part of."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Iterator, Sequence

from gradwire_wire.chain import serve
from gradwire_workers.cut_graphs import warn_of_cut
from gradwire_workers.evaluation import evaluate
from gradwire_workers.interrupts import Interrupts
from gradwire_workers.minimizing import minimize
from gradwire_workers.plans import Plan
from gradwire_workers.program import Engine, Optimizer, Program, Result, WorkerSite
from gradwire_workers.residuals import Kept, Residuals
from gradwire_workers.sessions import Session

__all__ = ["UsersCode"]


class UsersCode:
    """Runs on the thread that made this, which handles signals.

    residuals: where kept forwards are. optimizer: gives a program's by its number.
    """

    def __init__(
        self,
        engine: Engine,
        incarnation: bytes,
        residuals: Residuals,
        optimizer: Callable[[Program, int], Optimizer],
    ) -> None:
        self._engine, self._incarnation, self._residuals = engine, incarnation, residuals
        self._optimizer = optimizer
        self.interrupts = Interrupts()

    def evaluate(
        self,
        session: Session,
        program: Program,
        site: WorkerSite,
        word: Any,
        request: Any,
        call_id: int,
        operands: list[Any],
        chain: list[bytes],
    ) -> tuple[Result, Kept | None, int]:
        """A derived function at the operands: results, what is to be kept, nanoseconds."""
        start = time.perf_counter_ns()
        try:
            serve(chain)
            self.interrupts.begin(session.marks, call_id)
            if word and word[0][0] == "M":
                return self._minimize(program, site, word[0], operands), None, time.perf_counter_ns() - start
            result, residual = evaluate(program, site, word, request, operands, self._residuals)
            warn_of_cut(program, site, word, result.tensors)
        finally:
            self.interrupts.end()
            serve(())
        elapsed = time.perf_counter_ns() - start
        if residual is None:
            return result, None, elapsed
        return result, Kept(residual, request.remote, session.client_id, program.generation), elapsed

    def _minimize(
        self, program: Program, site: WorkerSite, op: tuple[Any, ...], operands: Sequence[Any]
    ) -> Result:
        """Half a step would be worse than none: from its beginning nothing is interrupted."""
        _, number, clip_norm = op
        optimizer = self._optimizer(program, number)
        return minimize(
            self._engine, program, site, operands, optimizer, clip_norm, settle=self.interrupts.end
        )

    def run_planned(
        self, session: Session, call_id: int, plan: Plan, operands: list[Any]
    ) -> tuple[Sequence[Any], bytes, int]:
        """As `evaluate`, where nothing is kept and the plan knows how to run: results, tree, nanoseconds."""
        interrupts = self.interrupts
        start = time.perf_counter_ns()
        try:
            serve(plan.chain)
            interrupts.begin(session.marks, call_id)
            tensors, structure = plan.run(operands)  # type: ignore[misc]
        finally:
            interrupts.end()
            serve(())
        return tensors, structure, time.perf_counter_ns() - start

    @contextlib.contextmanager
    def running(self, session: Session, call_id: int, is_interruptible: bool = True) -> Iterator[None]:
        """What runs here is the user's: it may be interrupted by its caller, and what it calls is part of this call."""
        serve([self._incarnation])
        try:
            if is_interruptible:
                self.interrupts.begin(session.marks, call_id)
            yield
        finally:
            self.interrupts.end()
            serve(())
