"""Calls: the derived function that a message names, at the operands that came with it; and calls that come again as plans.

A planned call comes as a short frame, whose way through here is the one that must cost nothing: it is answered by a short frame
as well, or, where its results look different this time, by the message that an ordinary call is answered by.
"""

from __future__ import annotations

from typing import Any

from gradwire_wire import sockets
from gradwire_wire.carriers import Carrier
from gradwire_wire.chain import check_not_in_chain
from gradwire_wire.errors import ProtocolError
from gradwire_wire.messages import Call, Plan
from gradwire_wire.sockets import Addressee
from gradwire_wire.words import checked_word
from gradwire_workers import faults, plans
from gradwire_workers.answers import Answers, Reply
from gradwire_workers.asked import check_mode, is_seeded, site_of, take_seed
from gradwire_workers.evaluation import Request
from gradwire_workers.held import Held
from gradwire_workers.loaded import Loaded
from gradwire_workers.operands import Operands
from gradwire_workers.residuals import Kept, Residuals
from gradwire_workers.sessions import Line, Session
from gradwire_workers.users_code import UsersCode

__all__ = ["MAX_DEALERS", "Calls"]

MAX_DEALERS = 1024


class Calls:
    """count: of all calls so far. name, incarnation: of this worker, for the chain of calls."""

    def __init__(
        self,
        name: str,
        incarnation: bytes,
        *,
        loaded: Loaded,
        operands: Operands,
        users_code: UsersCode,
        answers: Answers,
        residuals: Residuals,
        held: Held,
    ) -> None:
        self._name, self._incarnation, self._loaded = name, incarnation, loaded
        self._operands, self._users_code = operands, users_code
        self._answers, self._residuals, self._held = answers, residuals, held
        self.count = 0

    # -- messages --------------------------------------------------------------------------------

    def call(self, session: Session, call: Call, carriers: list[Carrier | None], _: Any) -> Reply:
        """Evaluate it. ``carriers``: its operands; the list is empty when this answers."""
        program = self._loaded[call.remote]
        self.count += 1
        self._residuals.release(call.released, session.client_id)
        check_not_in_chain(self._incarnation, self._name, call.chain)
        site = site_of(call, program)
        word = checked_word(call.word, len(call.headers))
        if is_seeded(call):
            word, site = take_seed(call, word, site, carriers)
        operands = self._operands.adopted(call, carriers)
        chain = [*call.chain, self._incarnation]
        result, kept, ns = self._users_code.evaluate(
            session, program, site, word, call, call.call_id, operands, chain
        )
        token = 0 if kept is None else self._residuals.add(kept)
        try:
            return self._answers.done(session, call.call_id, result.tensors, result.structure, token, ns)
        except BaseException:
            self._residuals.release([token], session.client_id)
            raise

    def plan(self, session: Session, call: Plan, carriers: list[Carrier | None], line: Line) -> Reply:
        """A call, and how it will come from now on."""
        layout = plans.checked_layout(call, line)
        if len(session.dealers) >= MAX_DEALERS and type(line) is Addressee and not line.plans:
            raise ProtocolError(f"more than {MAX_DEALERS} DEALERs of one client have plans")
        reply = self.call(session, call, carriers, line)  # type: ignore[arg-type]
        program = self._loaded[call.remote]
        site, word = site_of(call, program, is_checked=True), checked_word(call.word, len(call.headers))
        chain = [*call.chain, self._incarnation]
        plan = plans.Plan(call, program, site, word, chain, layout, line, session.exchange)
        if self._operands.adopter is not None:
            plan.expect_arrays(self._operands.adopter)
        return reply._replace(plan=plan)

    # -- short frames ----------------------------------------------------------------------------

    def serve_short(self, session: Session, line: Line, nbytes: int) -> None:
        """A planned call: everything about it is known but its number, its tokens and its tensors."""
        call_id, token, released, together, plan = plans.short_of(line, nbytes)
        try:
            if plan is None:
                raise ProtocolError("a short call of a plan that is unknown, or not as the plan says")
            if released:
                self._residuals.release(released, session.client_id)
            if plan.adopters is not None:
                operands = plan.take_tensors()
            else:
                operands = self._operands.adopted(plan.call, plan.take())
            reply = self._call_short(session, call_id, token, plan, operands, line, together)
        except BaseException as error:
            reply = Reply(faults.failed(call_id, error))
            del error
        if reply is not None and self._answers.send(session, reply, line) and plan is not None:
            plan.note_done(reply.message)  # type: ignore[arg-type]

    def _call_short(
        self,
        session: Session,
        call_id: int,
        token: int,
        plan: plans.Plan,
        operands: list[Any],
        line: Line,
        together: int,
    ) -> Reply | None:
        """Answers by a short answer, which may wait in ``held``, or gives the long one."""
        self.count += 1
        call = plan.call
        if call.training is not None:
            check_mode(call, plan.program, token)
        kept = None
        if plan.run is not None and not token:
            tensors, structure, ns = self._users_code.run_planned(session, call_id, plan, operands)
        else:
            request = Request(call.remote, call.keep, token, call.token_ops)
            result, kept, ns = self._users_code.evaluate(
                session, plan.program, plan.site, plan.word, request, call_id, list(operands), plan.chain
            )  # a list of its own, which a pullback may keep
            tensors, structure = result
        operands.clear()  # the caller of this still has the list, and the answer must not find it holding any
        number = 0 if kept is None else self._residuals.issue()
        exported = self._answers.exported(tensors, structure)
        try:
            if plan.answer(line, call_id, exported, structure, number, ns, self._held, together):
                if kept is not None:
                    self._keep_behind_answer(number, kept)
                return None
        except sockets.Unreachable:
            return None
        if kept is not None:
            self._residuals.put(number, kept)
        try:
            return self._answers.done(session, call_id, exported, structure, number, ns)
        except BaseException:
            self._residuals.release([number], session.client_id)
            raise

    def _keep_behind_answer(self, token: int, kept: Kept) -> None:
        """While the client goes on. An error would be a second answer: it is printed, and who pulls back is told that nothing is kept."""
        try:
            self._residuals.put(token, kept)
        except Exception as error:
            faults.show(error)
