"""The worker's desk: takes messages in order of arrival, has them done, answers. One thread, the main one.

One poller waits for calls (ROUTER), new clients (listening tether), segments and deaths of clients
(tethers) and the broker (control). User code runs here, on the main thread, one call at a time. No
reply can block: a client that is gone or does not read loses its reply, and its loans end with it.

    reception   clients come and go: tethers, Hello, lanes, the far door
    turns       which lane is served without a look at the poller
    calls       calls, and those that come again as short frames
    operands    ─► users_code ─►  answers: what a call goes through
    departures  what is let go of: a client's that is gone, what it will not name again
    desk        here: the loop, and who acts on which message
"""

from __future__ import annotations

import os
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Callable, Sequence

from gradwire_wire import messages, sockets
from gradwire_wire.carriers import Carrier
from gradwire_wire.errors import DtypeError, ProtocolError
from gradwire_wire.exchange import Memory
from gradwire_wire.lane import Lane
from gradwire_wire.machine import read_memory
from gradwire_wire.messages import Call, Done, Forget, Load, Ping, Plan, Release, Spec, State, Trace
from gradwire_wire.page import WorkerPage
from gradwire_wire.sockets import Addressee
from gradwire_wire.structures import fill_call, flatten, leaf_count
from gradwire_workers import faults, plans
from gradwire_workers.answers import Answers, Reply
from gradwire_workers.asked import all_there, aval_of, is_seeded, seed_place, site_of
from gradwire_workers.calls import Calls
from gradwire_workers.departures import Departures
from gradwire_workers.far import FarDoor
from gradwire_workers.held import Held
from gradwire_workers.loaded import Loaded
from gradwire_workers.operands import Operands
from gradwire_workers.permissions import Permissions
from gradwire_workers.program import Engine
from gradwire_workers.reception import Reception
from gradwire_workers.residuals import Residuals
from gradwire_workers.sessions import Line, Session, line_of
from gradwire_workers.state import State as ModuleState
from gradwire_workers.turns import TURN_S, Turns
from gradwire_workers.users_code import UsersCode

if TYPE_CHECKING:
    from gradwire_workers.recording import Recorder

__all__ = ["Desk"]

RESIDUAL_BYTES = 512 << 20
MOST_RAISED = 100
SHORT = 256
"""Bytes of a verb's arguments that are remembered."""
_SCALARS = frozenset((type(None), bool, int, float, str))
Act = Callable[[Session, Any, "list[Carrier | None]", Any], "Reply | None"]


class Desk:
    """Binds at once; `serve` runs until ``on_control`` says stop. See docs/protocol.md for the conversation.

    recorder: is told when messages come and are done with; None while no client records.
    """

    recorder: Recorder | None

    def __init__(
        self,
        *,
        name: str,
        incarnation: bytes,
        token: bytes,
        endpoint: str,
        tether_path: str,
        engine: Engine,
        max_shared_bytes: int | None = None,
        allow: Sequence[str] | None = None,
        listen: str = "",
        keys: str = "",
    ) -> None:
        """``allow``: what targets clients may name (see `permissions`); None: any. listen, keys: see `far`."""
        self._engine = engine
        self.recorder = None
        self._poller, self._turns = sockets.Poller(), Turns()
        self._router = sockets.bind_router(endpoint)
        self._reception = Reception(
            tether_path,
            Memory(max_shared_bytes, os.path.dirname(tether_path)),
            self._poller,
            incarnation=incarnation,
            token=token,
            turns=self._turns,
            on_end=self._forget,
        )
        self._far = FarDoor(listen, keys) if listen else None
        self.far_endpoint = self._far.endpoint if self._far is not None else ""
        self.loaded = Loaded(name, engine, None if allow is None else Permissions(allow))
        self._state = ModuleState(engine, self.loaded.register, self.loaded.find)
        self._residuals = Residuals(_residual_limit(), int.from_bytes(os.urandom(4), "little"))
        self._operands = Operands(engine)
        self.users_code = UsersCode(engine, incarnation, self._residuals, self._state.optimizer)
        self._held = Held(self._watch)
        self.answers = Answers(engine, self._residuals, self._held)
        self._calls = Calls(
            name,
            incarnation,
            loaded=self.loaded,
            operands=self._operands,
            users_code=self.users_code,
            answers=self.answers,
            residuals=self._residuals,
            held=self._held,
        )
        self._departures = Departures(self.loaded, self._state, self._residuals, self._reception)
        self._raised = 0  # in a row, between calls
        self._acts = self._table()

    def _table(self) -> dict[type, Act]:
        """Who acts on which message."""
        return {
            Call: self._calls.call,
            Plan: self._calls.plan,
            Spec: self._spec,
            Load: self._load,
            State: self._change_state,
            Release: self._departures.release,
            Forget: self._departures.forget,
            Trace: self._trace,
            Ping: self._ping,
        }

    @property
    def calls(self) -> int:
        """How many have been served."""
        return self._calls.count

    # -- the loop --------------------------------------------------------------------------------

    def serve(self, control: Any, on_control: Callable[[], bool]) -> None:
        """Serve until ``on_control()``, called whenever the control socket is readable, returns False; then close the doors."""
        try:
            self._serve_until(control, on_control)
        finally:
            self._router.close()
            self._reception.listener.close()

    def _serve_until(self, control: Any, on_control: Callable[[], bool]) -> None:
        poller, turns, reception, garbage = (
            self._poller,
            self._turns,
            self._reception,
            self._departures.garbage,
        )
        knocks = reception.listener.fileno()
        far = () if self._far is None else (self._far.router, self._far.gate.socket)
        for waited in (self._router, knocks, control, *far):
            poller.register(waited, sockets.IN)
        while True:
            is_awake = turns.awake is not None and self._serve_awake(*turns.awake)
            reception.reserve.keep_room()
            try:
                if self._held:
                    self._held.release()
                if garbage.is_due:
                    garbage.look()
                ready = dict(poller.poll(0 if is_awake or turns.unread else garbage.wait_ms()))
            except sockets.SocketError:
                raise
            except Exception as error:
                self._note_raised(error)
                ready = {}
            else:
                self._raised = 0
            if control in ready and not on_control():
                return
            if knocks in ready:
                reception.accept()
            for waited in [*ready, *(turns.unread - ready.keys())]:
                if waited in reception.lanes:
                    self._serve_lane(waited)
                elif waited in reception.tethers:
                    reception.read_tether(waited)
                elif waited is self._router:
                    self._serve_router()
                elif self._far is not None:
                    self._serve_far(self._far, waited)

    def _note_raised(self, error: Exception) -> None:
        """A signal handler that user code has left raised while nobody called: it is shown, and nothing was lost by it.

        What is raised again and again, before anything else can be done, is none of that, and ends the worker.
        """
        self._raised += 1
        if self._raised > MOST_RAISED:
            raise error
        faults.show(error, "gradwire: a signal handler of user code raised, between calls:")

    def _forget(self, session: Session) -> None:
        if self.recorder is not None:
            self.recorder.end(session)
        self._departures.end(session)

    # -- lanes and doors -------------------------------------------------------------------------

    def _serve_awake(self, lane: WorkerPage, session: Session) -> bool:
        """Serve calls of one page as long as they come quickly. Whether more may come after a look at the poller.

        So the others wait at most `TURN_S` and a call for their turn, and where they take turns nobody is awake.
        """
        until = time.perf_counter() + TURN_S
        try:
            while True:
                try:
                    if not lane.is_next_here():
                        break
                except sockets.Unreachable:
                    raise
                except Exception as error:
                    self._note_raised(error)
                    return True
                received = lane.next()
                if received is not None:
                    self._serve(session, received, lane)
                if time.perf_counter() > until:
                    return True
        except sockets.Unreachable:
            self._reception.close_lane(lane.fileno())
        self._turns.awake = None
        return False

    def _serve_lane(self, fd: int) -> None:
        lane, session = self._reception.lanes[fd]
        try:
            if lane.backlog:
                self._flush(lane)
            received = lane.receive_nowait()
        except sockets.Unreachable:
            self._reception.close_lane(fd)
            return
        if received is not None:
            self._serve(session, received, lane)
            self._turns.note(lane, session)
        if lane.is_pipelined or self._held:
            self._serve_further(fd, lane, session)

    def _flush(self, lane: Lane) -> None:
        lane.flush()
        if not lane.backlog:
            self._poller.modify(lane.fileno(), sockets.IN)

    def _watch(self, line: Line) -> None:
        """What the line has not taken goes once it does."""
        if isinstance(line, Lane) and line.backlog:
            self._poller.modify(line.fileno(), sockets.IN | sockets.OUT)

    def _serve_further(self, fd: int, lane: Lane, session: Session) -> None:
        """Calls that were submitted behind the first, which nobody waits for one by one; for one turn."""
        until, held = time.perf_counter() + TURN_S, self._held
        try:
            try:
                while time.perf_counter() < until or (held and self._is_alone(fd)):
                    received = lane.receive_nowait()
                    if received is None:
                        break
                    self._serve(session, received, lane)
            finally:
                held.release()
        except sockets.Unreachable:
            self._reception.close_lane(fd)
            return
        unread = self._turns.unread
        (unread.add if lane.has_more else unread.discard)(fd)

    def _serve_router(self) -> None:
        router, held, sessions = self._router, self._held, self._reception.sessions
        received = sockets.receive_nowait(router)
        while received is not None:
            identity, *frames = received
            session = sessions.get(identity[:16])
            self._serve_dealer(session, frames, line_of(session, router, identity), identity)
            received = sockets.receive_nowait(router) if held and self._is_alone(router) else None
        held.release()

    def _is_alone(self, here: Any) -> bool:
        """Whether nobody else waits than who is served here; a page that is awake does not ring."""
        turns = self._turns
        if turns.awake is not None or not turns.unread <= {here}:
            return False
        return all(waited == here for waited, _ in self._poller.poll(0))

    def _serve_dealer(
        self, session: Session | None, frames: list[bytes], line: Addressee, identity: bytes
    ) -> None:
        self._serve(session, line.take_short(frames) if line.plans else frames, line)
        if session is not None and line.plans:
            session.dealers[identity] = line

    def _serve_far(self, far: FarDoor, waited: Any) -> None:
        """Clients by tcp, which say Hello on the same socket on which they call."""
        if waited is far.gate.socket:
            far.gate.answer()
            return
        frames = sockets.receive_nowait(far.router) if waited is far.router else None
        if frames is None:
            return
        identity, *frames = frames
        session = far.sessions.get(identity[:16])
        line = line_of(session, far.router, identity)
        hello = far.hello_in(identity, frames)
        if hello is None:
            self._serve_dealer(session, frames, line, identity)
        else:
            self._reception.greet_far(far, hello, line)

    # -- messages --------------------------------------------------------------------------------

    def _serve(self, session: Session | None, received: list[bytes] | int, line: Line) -> None:
        """Act on what has come, a message's frames or a short frame's length, and answer."""
        recorder, held = self.recorder, self._held
        if recorder is not None:
            recorder.note_received()
        if held and not held.go_on(line, plans.number_of(line, received) if type(received) is int else -1):
            held.release()
        if type(received) is int and session is not None:
            self._calls.serve_short(session, line, received)
        else:
            self._serve_message(session, received, line)  # type: ignore[arg-type]
        self._watch(line)
        if session is not None and session.exchange.has_lanes:
            # the tether was perhaps read on the way, and will not be readable again
            self._reception.take_lanes(session)
        if recorder is not None:
            recorder.note_sent(session)

    def _serve_message(self, session: Session | None, frames: list[bytes], line: Line) -> None:
        call_id = 0
        try:
            if session is None or not frames:
                raise ProtocolError("a call from a client that has not said Hello")
            message = messages.unpack(frames[0])
            act = self._acts.get(type(message))
            if act is None:
                raise ProtocolError(f"a worker is not told {type(message).__name__}")
            call_id = getattr(message, "call_id", 0)
            # all tensors at once and first of all: whatever goes wrong later, each of them is returned;
            # and as an argument alone: the reply must not go out while anything here still holds one
            reply = act(
                session,
                message,
                session.exchange.borrow_all(getattr(message, "headers", ()), frames[1:]),
                line,
            )
        except BaseException as error:  # whatever user code raises is an answer; the worker lives
            reply = Reply(faults.failed(call_id, error))
            del error
        if reply is not None and self.answers.send(session, reply, line) and reply.plan is not None:
            reply.plan.note_done(reply.message)  # type: ignore[arg-type]
            line.plans[reply.plan.call.plan] = reply.plan

    def _spec(self, session: Session, spec: Spec, carriers: list[Carrier | None], _: Any) -> Reply:
        program = self.loaded[spec.remote]
        site = site_of(spec, program)
        avals = [aval_of(raw) for raw in spec.avals]
        if is_seeded(spec):
            del avals[seed_place(spec, len(avals))]
        try:
            with self.users_code.running(session, spec.call_id):
                results, structure = program.spec(site, avals)
                ruled = program.has_rules(site, avals)
        except DtypeError:
            self._operands.refuse(spec, avals)
            raise
        return _told(spec.call_id, [[[list(a.shape), list(a.dtype)] for a in results], structure, ruled])

    def _load(self, session: Session, load: Load, carriers: list[Carrier | None], _: Any) -> Reply:
        self.loaded.was_used = True
        args, kwargs = fill_call(load.structure, [self._engine.adopt(c) for c in all_there(carriers)])
        with self.users_code.running(session, load.call_id):
            number = self.loaded.load(load.kind, load.target, args, kwargs)
        self.loaded.give(number, session.client_id)
        program = self.loaded[number]
        facts = {
            "remote": number,
            "is_module": program.is_module,
            "training": program.training,
            "moves_in_evaluation": program.moves_in_evaluation,
            "may_have_parameters": program.may_have_parameters,
            "may_have_rules": program.may_have_rules,
        }
        return _told(load.call_id, facts)

    def load_named(self, name: str, kind: str, target: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        """See `Loaded.load_named`."""
        try:
            self.loaded.load_named(name, kind, target, args, kwargs)
        finally:
            self.users_code.interrupts.end()

    def _change_state(self, session: Session, state: State, carriers: list[Carrier | None], _: Any) -> Reply:
        args, kwargs = _arguments(state, carriers)
        program = self.loaded[state.remote]
        with self.users_code.running(
            session, state.call_id, is_interruptible=state.verb not in messages.WHOLE_VERBS
        ):
            tree = self._state.act(program, state.verb, args, kwargs)
        if state.verb == "functional":
            self.loaded.give(tree, session.client_id)
        elif state.verb == "optimizer":
            self._state.give(tree, session.client_id)
        structure, leaves = flatten(tree, lambda x: type(x) is Carrier or self._engine.is_tensor(x))
        return self.answers.done(session, state.call_id, leaves, structure)

    def _ping(self, session: Session, ping: Ping, *_: Any) -> Reply:
        return self.answers.done(session, ping.call_id, (), flatten(None, _never)[0])

    def _trace(self, session: Session, trace: Trace, *_: Any) -> Reply:
        from gradwire_workers import recording  # whoever is not traced does without

        structure, rows = recording.act(self, session, trace)
        return self.answers.done(session, trace.call_id, rows, structure)


def _arguments(state: State, carriers: list[Carrier | None]) -> tuple[list[Any], dict[str, Any]]:
    """Of a verb: those that are asked for step after step have a few scalars, which are remembered."""
    if not carriers and len(state.structure) <= SHORT:
        known = _scalars_of(state.structure)
        if known is not None:
            return list(known), {}
    return fill_call(state.structure, all_there(carriers))


@lru_cache(maxsize=256)
def _scalars_of(structure: bytes) -> tuple[Any, ...] | None:
    """The arguments that a structure has, if it has nothing else; None where there are others, or what could be changed."""
    if leaf_count(structure):
        return None
    args, kwargs = fill_call(structure, [])
    return tuple(args) if not kwargs and _SCALARS.issuperset(map(type, args)) else None


def _told(call_id: int, facts: Any) -> Reply:
    """A reply without tensors."""
    return Reply(Done(call_id, flatten(facts, _never)[0], [], 0, 0))


def _never(_: Any) -> bool:
    return False


def _residual_limit() -> int:
    available = read_memory().available
    return RESIDUAL_BYTES if available is None else min(RESIDUAL_BYTES, available // 4)
