"""The worker's desk: takes messages in order of arrival, has them done, answers. One thread, the main one.

One poller waits for calls (ROUTER), new clients (listening tether), segments and deaths of clients
(tethers) and the broker (control). User code runs here, on the main thread, one call at a time. No
reply can block: a client that is gone or does not read loses its reply, and its loans end with it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import time
from typing import Any, Callable, Iterator, NamedTuple, Sequence, Union

import numpy as np

from gradwire_wire import messages, sockets
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.chain import check_not_in_chain, serve
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import (
    DtypeError,
    GradwireError,
    MemoryExhaustedError,
    ProtocolError,
    UnsupportedTensorError,
    VersionMismatchError,
)
from gradwire_wire.exchange import Exchange, Memory, NotShared, close_all
from gradwire_wire.lane import MAX_PACKET, Lane, TooLong, received_lane
from gradwire_wire.machine import read_memory
from gradwire_wire.messages import (
    Call,
    Done,
    Failed,
    Hello,
    Load,
    Long,
    Ping,
    Plan,
    Refused,
    Release,
    Spec,
    State,
    Trace,
    Welcome,
)
from gradwire_wire.page import WorkerPage, can_page, received_page_lane
from gradwire_wire.segments import Ledger
from gradwire_wire.sockets import Addressee
from gradwire_wire.structures import fill_call, flatten
from gradwire_wire.tether import Tether, TetherClosedError, accept_tether, listen_tether
from gradwire_wire.words import checked_word
from gradwire_workers import faults, plans
from gradwire_workers.asked import (
    all_there,
    aval_of,
    check_mode,
    is_seeded,
    name_of_operand,
    seed_place,
    site_of,
    take_seed,
)
from gradwire_workers.evaluation import Request, evaluate
from gradwire_workers.far import FarDoor
from gradwire_workers.interrupts import Interrupts
from gradwire_workers.loaded import Loaded
from gradwire_workers.permissions import Permissions
from gradwire_workers.program import Program, Result, WorkerSite
from gradwire_workers.residuals import Kept, Residuals
from gradwire_workers.state import CHANGES
from gradwire_workers.state import State as ModuleState

__all__ = ["Desk"]

Line = Union[Addressee, Lane]
BYTES = BY_NAME["uint8"]
RESIDUAL_BYTES = 512 << 20
SHORT_S = 0.02  # while descriptors are short tethers are looked at at this pace
MAX_DEALERS = 1024
TURN_S = 500e-6
IN_ROW = 2
_ARRAYS_ALONE = {np.ndarray}


class Session:
    """One client process: its tether (none at tcp), the ledger it marks, the tensors exchanged with it, its DEALERs with plans."""

    def __init__(self, client_id: bytes, tether: Tether | None, marks: Ledger, exchange: Exchange) -> None:
        self.client_id, self.tether, self.marks, self.exchange = client_id, tether, marks, exchange
        self.dealers: dict[bytes, Addressee] = {}


class Reply(NamedTuple):
    """What goes back: the message, tensors that could not be shared, and the plan that the call made."""

    message: Done | Failed
    frames: Sequence[bytes] = ()
    plan: plans.Plan | None = None


class Desk:
    """Binds at once; `serve` runs until ``on_control`` says stop. See docs/protocol.md for the conversation."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: bytes,
        token: bytes,
        endpoint: str,
        tether_path: str,
        engine: Any,
        max_shared_bytes: int | None = None,
        allow: Sequence[str] | None = None,
        listen: str = "",
        keys: str = "",
    ) -> None:
        """``allow``: what targets clients may name (see `permissions`); None: any. listen, keys: see `far`."""
        self._name, self._incarnation, self._token, self._engine = name, incarnation, token, engine
        # a framework whose programs take numpy memory as it is (JAX's jit) need not make arrays of it first
        self._adopt_operand = getattr(engine, "adopt_operand", engine.adopt)
        self._adopter = getattr(engine, "adopter", None)
        self._export_all = getattr(engine, "export_all", None)
        self._router = sockets.bind_router(endpoint)
        self._listener = listen_tether(tether_path)
        self._memory = Memory(max_shared_bytes, os.path.dirname(tether_path))
        self._far = FarDoor(listen, keys) if listen else None
        self._sessions: dict[bytes, Session] = {}
        self._tethers: dict[int, tuple[Tether, Session | None]] = {}
        self._lanes: dict[int, tuple[Lane, Session]] = {}
        self.loaded = Loaded(name, engine, None if allow is None else Permissions(allow))
        self._state = ModuleState(engine, self.loaded.register, self.loaded.find)
        self.calls = 0
        self.far_endpoint = self._far.endpoint if self._far is not None else ""
        self._residuals = Residuals(_residual_limit(), int.from_bytes(os.urandom(4), "little"))
        self._awake: tuple[WorkerPage, Session] | None = None
        self._latest: Any = None
        self._in_row = 0
        self._unread: set[int] = set()  # lanes with frames left of a batch
        self._interrupts = Interrupts()
        self._poller = sockets.Poller()
        self._do: dict[type, Callable[[Session, Any, list[Carrier | None], Any], Reply | None]] = {
            Call: self._call,
            Plan: self._plan,
            Spec: self._spec,
            Load: self._load,
            State: self._change_state,
            Release: self._release,
            Trace: self._trace,
            Ping: self._ping,
        }

    def serve(self, control: Any, on_control: Callable[[], bool]) -> None:
        """Serve until ``on_control()``, called whenever the control socket is readable, returns False; then close the doors."""
        try:
            self._serve_until(control, on_control)
        finally:
            self._router.close()
            self._listener.close()

    def _serve_until(self, control: Any, on_control: Callable[[], bool]) -> None:
        poller = self._poller
        far = () if self._far is None else (self._far.router, self._far.gate.socket)
        for waited in (self._router, self._listener.fileno(), control, *far):
            poller.register(waited, sockets.IN)
        while True:
            is_awake = self._awake is not None and self._serve_awake(*self._awake)
            ready = dict(poller.poll(0 if is_awake or self._unread else None))
            if control in ready and not on_control():
                return
            if self._listener.fileno() in ready:
                self._accept()
            for waited in [*ready, *(self._unread - ready.keys())]:
                if waited in self._lanes:
                    self._serve_lane(waited)
                elif waited in self._tethers:
                    self._read_tether(waited)
                elif waited is self._router:
                    self._serve_router()
                elif self._far is not None:
                    self._serve_far(self._far, waited)

    def _serve_awake(self, lane: WorkerPage, session: Session) -> bool:
        """Serve calls of one page as long as they come quickly. Whether more may come after a look at the poller.

        So the others wait at most `TURN_S` and a call for their turn, and where they take turns nobody is awake.
        """
        until = time.perf_counter() + TURN_S
        try:
            while lane.is_next_here():
                received = lane.next()
                if received is not None:
                    self._serve(session, received, lane)
                if time.perf_counter() > until:
                    return True
        except sockets.Unreachable:
            self._close_lane(lane.fileno())
        self._awake = None
        return False

    def _note_turn(self, lane: Lane, session: Session) -> None:
        """A page's call came by the poller: is it the only one that is used?"""
        if lane is not self._latest:
            self._latest, self._in_row = lane, 0
            return
        self._in_row += 1
        if self._awake is not None:  # whose client does not ring: it would wait for ever if it were forgotten
            return
        if type(lane) is WorkerPage and self._in_row >= IN_ROW and not lane.was_packet:
            self._awake = (lane, session)

    # -- clients come and go ---------------------------------------------------------------------

    def _accept(self) -> None:
        tether = accept_tether(self._listener)
        if tether is not None:
            self._tethers[tether.fileno()] = (tether, None)
            self._poller.register(tether.fileno(), sockets.IN)

    def _read_tether(self, fd: int) -> None:
        tether, session = self._tethers[fd]
        try:
            if session is None:
                self._greet(fd, tether)
            else:
                session.exchange.receive_segments()
                self._take_lanes(session)
        except MemoryExhaustedError:  # no descriptor left: what has come stays to be read
            time.sleep(SHORT_S)
        except (TetherClosedError, GradwireError, OSError):
            self._end(fd)

    def _greet(self, fd: int, tether: Tether) -> None:
        received = tether.receive(0)
        if received is None:
            return
        hello, descriptors = received
        try:
            marks = self._checked_hello(hello, descriptors)
        except GradwireError as error:
            tether.send(Refused(type(error).__name__, str(error)), timeout_s=0.1)
            raise
        ours = Ledger(self._memory.folder)
        tether.send(
            Welcome(messages.PROTOCOL, self._incarnation, os.getpid(), True, can_page()),
            ours.descriptors,
            timeout_s=1.0,
        )
        ours.close()
        session = Session(hello.client_id, tether, marks, Exchange(self._memory, tether, marks, ours))
        session.exchange.expect_lanes()
        self._sessions[hello.client_id] = session
        self._tethers[fd] = (tether, session)

    def _checked_hello(self, hello: Any, descriptors: list[int]) -> Ledger:
        """The client's ledger, once everything else is right."""
        problem: GradwireError | None = None
        if type(hello) is not Hello or len(descriptors) > 1:
            problem = ProtocolError("a client must say Hello first, with its ledger")
        elif hello.protocol != messages.PROTOCOL:
            problem = VersionMismatchError(
                f"this worker speaks protocol {messages.PROTOCOL}, the client {hello.protocol}; use the same gradwire"
            )
        elif not hmac.compare_digest(hello.token, self._token):
            problem = ProtocolError("wrong token: this worker belongs to another broker")
        elif len(hello.client_id) != 16 or hello.client_id in self._sessions:
            problem = ProtocolError("a client's id must be 16 bytes of its own")
        if problem is not None:
            close_all(descriptors)
            raise problem
        return Ledger.received(descriptors)

    def _take_lanes(self, session: Session) -> None:
        for descriptors in session.exchange.take_lanes():
            lane = received_lane(*descriptors) if len(descriptors) == 1 else received_page_lane(*descriptors)
            if lane is not None:
                self._lanes[lane.fileno()] = (lane, session)
                self._poller.register(lane.fileno(), sockets.IN)

    def _close_lane(self, fd: int) -> None:
        lane, _ = self._lanes.pop(fd)
        self._unread.discard(fd)
        if self._awake is not None and self._awake[0] is lane:
            self._awake = None
        self._poller.unregister(fd)
        lane.close()

    def _end(self, fd: int) -> None:
        """A client is gone: its loans, its residuals, its lanes and its tether go."""
        tether, session = self._tethers.pop(fd)
        self._poller.unregister(fd)
        tether.close()
        if session is not None:
            self._sessions.pop(session.client_id, None)
            for lane in [lane for lane, (_, owner) in self._lanes.items() if owner is session]:
                self._close_lane(lane)
            self._residuals.end(session.client_id)
            session.exchange.end()

    # -- messages --------------------------------------------------------------------------------

    def _serve_router(self) -> None:
        frames = sockets.receive_nowait(self._router)
        if frames is None:
            return
        identity, *frames = frames
        session = self._sessions.get(identity[:16])
        self._serve_dealer(session, frames, _line_of(session, self._router, identity), identity)

    def _serve_dealer(
        self, session: Session | None, frames: list[bytes], line: Addressee, identity: bytes
    ) -> None:
        self._serve(session, line.take_short(frames) if line.plans else frames, line)
        if session is not None and line.plans:
            session.dealers[identity] = line

    def _serve_far(self, far: FarDoor, waited: Any) -> None:
        """Clients at tcp, who have no tether: they say Hello where they call, and all their tensors come in frames."""
        if waited is far.gate.socket:
            far.gate.answer()
            return
        frames = sockets.receive_nowait(far.router) if waited is far.router else None
        if frames is None:
            return
        identity, *frames = frames
        session = far.sessions.get(identity[:16])
        line = _line_of(session, far.router, identity)
        hello = far.hello_in(identity, frames)
        if hello is None:
            self._serve_dealer(session, frames, line, identity)
            return
        try:
            marks = self._checked_hello(hello, [])
        except GradwireError as error:
            far.answer(line, Refused(type(error).__name__, str(error)))
            return
        ours = Ledger.received([])
        session = Session(hello.client_id, None, marks, Exchange(self._memory, None, marks, ours))
        for left in far.admit(session):
            self._residuals.end(left.client_id)
            left.exchange.end()
        far.answer(line, Welcome(messages.PROTOCOL, self._incarnation, os.getpid(), False, False))

    def _serve_lane(self, fd: int) -> None:
        lane, session = self._lanes[fd]
        try:
            if lane.backlog:
                self._flush(lane)
            received = lane.receive_nowait()
        except sockets.Unreachable:
            self._close_lane(fd)
            return
        if received is not None:
            self._serve(session, received, lane)
            self._note_turn(lane, session)
        if lane.is_pipelined:
            self._serve_further(fd, lane, session)

    def _flush(self, lane: Lane) -> None:
        lane.flush()
        if not lane.backlog:
            self._poller.modify(lane.fileno(), sockets.IN)

    def _serve_further(self, fd: int, lane: Lane, session: Session) -> None:
        """Calls that were submitted behind the first, which nobody waits for one by one; for one turn."""
        until = time.perf_counter() + TURN_S
        try:
            while time.perf_counter() < until and (received := lane.receive_nowait()) is not None:
                self._serve(session, received, lane)
        except sockets.Unreachable:
            self._close_lane(fd)
            return
        (self._unread.add if lane.has_more else self._unread.discard)(fd)

    def _serve(self, session: Session | None, received: list[bytes] | int, line: Line) -> None:
        if type(received) is int and session is not None:
            self._serve_short(session, line, received)
        else:
            self._serve_one(session, received, line)  # type: ignore[arg-type]
        if isinstance(line, Lane) and line.backlog:
            self._poller.modify(line.fileno(), sockets.IN | sockets.OUT)
        if session is not None and session.exchange.has_lanes:
            # the tether was perhaps read on the way, and will not be readable again
            self._take_lanes(session)

    def _serve_one(self, session: Session | None, frames: list[bytes], line: Line) -> None:
        call_id = 0
        try:
            if session is None or not frames:
                raise ProtocolError("a call from a client that has not said Hello")
            message = messages.unpack(frames[0])
            act = self._do.get(type(message))
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
        if reply is not None and self._send(session, reply, line) and reply.plan is not None:
            reply.plan.note_done(reply.message)  # type: ignore[arg-type]
            line.plans[reply.plan.call.plan] = reply.plan

    def _serve_short(self, session: Session, line: Line, nbytes: int) -> None:
        """A planned call: everything about it is known but its number, its tokens and its tensors."""
        call_id, token, released, plan = plans.short_of(line, nbytes)
        try:
            if plan is None:
                raise ProtocolError("a short call of a plan that is unknown, or not as the plan says")
            if released:
                self._residuals.release(released, session.client_id)
            if plan.adopters is not None:
                operands = plan.take_tensors()
            else:
                operands = self._operands(plan.call, plan.take())
            reply = self._call_short(session, call_id, token, plan, operands, line)
        except BaseException as error:
            reply = Reply(faults.failed(call_id, error))
            del error
        if reply is not None and self._send(session, reply, line) and plan is not None:
            plan.note_done(reply.message)  # type: ignore[arg-type]

    def _send(self, session: Session | None, reply: Reply, line: Line) -> bool:
        """Send a reply, or why it cannot be sent. Whether a Done was sent."""
        is_done = type(reply.message) is Done
        try:
            frames = [messages.pack(reply.message), *reply.frames]
            if (
                session is not None
                and isinstance(line, Lane)
                and (len(frames) > 1 or len(frames[0]) > MAX_PACKET)
            ):
                frames = [_by_memory(session, reply.message.call_id, frames)]
        except Exception as error:  # longer than the client would read, or text that is none
            self._take_back(session, reply)
            frames, is_done = [messages.pack(faults.failed(reply.message.call_id, error))], False
        try:
            try:
                line.send_nowait(frames)
            except TooLong:
                self._send_shortened(session, reply, frames, line)
        except sockets.Unreachable:
            self._take_back(session, reply)
            return False
        return is_done

    def _send_shortened(self, session: Session | None, reply: Reply, frames: list[bytes], line: Line) -> None:
        """Send, or keep until it can be sent, what stands for a packet that the system did not take."""
        assert isinstance(line, Lane)  # no other says so
        shortened = self._shortened(session, reply, frames)
        try:
            line.send_nowait([shortened])
        except TooLong:
            line.keep(shortened)

    def _shortened(self, session: Session | None, reply: Reply, frames: list[bytes]) -> bytes:
        """What stands for a packet that the system did not take, however short of buffers it is."""
        assert session is not None
        try:
            return _by_memory(session, reply.message.call_id, frames)
        except GradwireError as error:
            self._take_back(session, reply)
            return messages.pack(faults.failed(reply.message.call_id, error))

    def _take_back(self, session: Session | None, reply: Reply) -> None:
        """The reply was not sent: what it would have lent comes back, and nobody knows its token."""
        if session is not None and type(reply.message) is Done:
            session.exchange.take_back(reply.message.headers)
            self._residuals.release([reply.message.token], session.client_id)

    def _done(
        self,
        session: Session,
        call_id: int,
        result: Sequence[Any],
        structure: bytes,
        token: int = 0,
        ns: int = 0,
    ) -> Reply:
        frames: list[bytes] = []
        headers = session.exchange.lend(self._exported(result), frames)
        return Reply(Done(call_id, structure, headers, token, ns), frames)

    def _exported(self, result: Sequence[Any]) -> Sequence[Carrier | None]:
        if self._export_all is not None and _ARRAYS_ALONE.issuperset(map(type, result)):
            exported: Sequence[Carrier | None] = self._export_all(result)
            return exported
        export = self._engine.export
        return [None if x is None else x if type(x) is Carrier else export(x) for x in result]

    def _call(self, session: Session, call: Call, carriers: list[Carrier | None], _: Any) -> Reply:
        program = self.loaded[call.remote]
        self.calls += 1
        self._residuals.release(call.released, session.client_id)
        check_not_in_chain(self._incarnation, self._name, call.chain)
        site = site_of(call, program)
        word = checked_word(call.word, len(call.headers))
        if is_seeded(call):
            word, site = take_seed(call, word, site, carriers)
        operands = self._operands(call, carriers)
        chain = [*call.chain, self._incarnation]
        result, token, ns = self._evaluate(session, program, site, word, call, call.call_id, operands, chain)
        try:
            return self._done(session, call.call_id, result.tensors, result.structure, token, ns)
        except BaseException:
            self._residuals.release([token], session.client_id)
            raise

    def _plan(self, session: Session, call: Plan, carriers: list[Carrier | None], line: Line) -> Reply:
        """A call, and how it will come from now on."""
        layout = plans.checked_layout(call, line)
        if len(session.dealers) >= MAX_DEALERS and type(line) is Addressee and not line.plans:
            raise ProtocolError(f"more than {MAX_DEALERS} DEALERs of one client have plans")
        reply = self._call(session, call, carriers, line)  # type: ignore[arg-type]
        program = self.loaded[call.remote]
        site, word = site_of(call, program, is_checked=True), checked_word(call.word, len(call.headers))
        chain = [*call.chain, self._incarnation]
        plan = plans.Plan(call, program, site, word, chain, layout, line, session.exchange)
        if self._adopter is not None:
            plan.expect_arrays(self._adopter)
        return reply._replace(plan=plan)

    def _call_short(
        self, session: Session, call_id: int, token: int, plan: plans.Plan, operands: list[Any], line: Line
    ) -> Reply | None:
        """Answers by a short answer, or gives the long one."""
        self.calls += 1
        call = plan.call
        if call.training is not None:
            check_mode(call, plan.program, token)
        if plan.run is not None and not token:
            tensors, structure, kept, ns = self._run_short(session, call_id, plan, operands)
        else:
            request = Request(call.remote, call.keep, token, call.token_ops)
            result, kept, ns = self._evaluate(
                session, plan.program, plan.site, plan.word, request, call_id, list(operands), plan.chain
            )  # a list of its own, which a pullback may keep
            tensors, structure = result
        operands.clear()  # the caller of this still has the list, and the answer must not find it holding any
        try:
            exported = self._exported(tensors)
            try:
                loans = plan.put(call_id, exported, structure, kept, ns)
            except NotShared:
                loans = None
            if loans is None:
                return self._done(session, call_id, exported, structure, kept, ns)
        except BaseException:
            self._residuals.release([kept], session.client_id)
            raise
        try:
            line.send_short_nowait(plan.answer_nbytes)
        except TooLong:
            session.exchange.take_back_loans(loans)
            return self._done(session, call_id, exported, structure, kept, ns)
        except sockets.Unreachable:
            session.exchange.take_back_loans(loans)
            self._residuals.release([kept], session.client_id)
        return None

    def _run_short(
        self, session: Session, call_id: int, plan: plans.Plan, operands: list[Any]
    ) -> tuple[Sequence[Any], bytes, int, int]:
        """As `_evaluate`, where nothing is kept and the plan knows how to run: results, tree, 0, nanoseconds."""
        interrupts = self._interrupts
        start = time.perf_counter_ns()
        try:
            serve(plan.chain)
            interrupts.begin(session.marks, call_id)
            tensors, structure = plan.run(operands)  # type: ignore[misc]
        finally:
            interrupts.end()
            serve(())
        return tensors, structure, 0, time.perf_counter_ns() - start

    def _evaluate(
        self,
        session: Session,
        program: Program,
        site: WorkerSite,
        word: Any,
        request: Any,
        call_id: int,
        operands: list[Any],
        chain: list[bytes],
    ) -> tuple[Result, int, int]:
        """Run the user's code: results, the token of what is kept, nanoseconds."""
        start = time.perf_counter_ns()
        try:
            serve(chain)
            self._interrupts.begin(session.marks, call_id)
            result, residual = evaluate(program, site, word, request, operands, self._residuals, self._zeros)
        finally:
            self._interrupts.end()
            serve(())
        elapsed = time.perf_counter_ns() - start
        token = 0
        if residual is not None:
            avals = () if word or getattr(residual, "takes_absent", False) else self._inexact(result.tensors)
            kept = Kept(residual, request.remote, session.client_id, program.generation, avals)
            token = self._residuals.add(kept)
        return result, token, elapsed

    def _inexact(self, results: Sequence[Any]) -> list[Aval]:
        """Shapes and dtypes of what has a cotangent."""
        return [aval for aval in map(self._engine.aval, results) if aval.dtype.is_inexact]

    def _zeros(self, aval: Aval) -> Any:
        return self._engine.adopt(Carrier(np.zeros(aval.shape, aval.dtype.carrier), aval.dtype, True))

    @contextlib.contextmanager
    def _users_code(self, session: Session, call_id: int, is_interruptible: bool = True) -> Iterator[None]:
        """What runs here is the user's: it may be interrupted by its caller, and what it calls is part of this call."""
        serve([self._incarnation])
        try:
            if is_interruptible:
                self._interrupts.begin(session.marks, call_id)
            yield
        finally:
            self._interrupts.end()
            serve(())

    def _operands(self, call: Call | Plan, carriers: list[Carrier | None]) -> list[Any]:
        """The operands as the framework's tensors; None where the client left one out.

        A kept forward must not refer to memory that somebody may still write: then it is copied.
        """
        operands: list[Any] = []
        for carrier in carriers:
            if carrier is not None and call.keep and not carrier.owned:
                carrier = Carrier(carrier.array.copy(order="K"), carrier.dtype)
            try:
                operands.append(None if carrier is None else self._adopt_operand(carrier))
            except (DtypeError, UnsupportedTensorError) as error:
                raise type(error)(f"{name_of_operand(call, len(operands))}: {error}") from None
        carriers.clear()  # the caller of this still has the list, and must not keep what the call let go
        return operands

    def _spec(self, session: Session, spec: Spec, carriers: list[Carrier | None], _: Any) -> Reply:
        program = self.loaded[spec.remote]
        site = site_of(spec, program)
        avals = [aval_of(raw) for raw in spec.avals]
        if is_seeded(spec):
            del avals[seed_place(spec, len(avals))]
        try:
            with self._users_code(session, spec.call_id):
                results, structure = program.spec(site, avals)
                ruled = bool(hasattr(program, "has_rules") and program.has_rules(site, avals))
        except DtypeError:
            self._refuse_operands(spec, avals)
            raise
        tree, _ = flatten([[[list(a.shape), list(a.dtype)] for a in results], structure, ruled], _never)
        return Reply(Done(spec.call_id, tree, [], 0, 0))

    def _refuse_operands(self, spec: Spec, avals: Sequence[Aval]) -> None:
        """Raise for the first operand of a type that the framework here does not take, by its name."""
        for i, (_, dtype) in enumerate(avals):
            try:
                self._adopt_operand(Carrier(np.empty(0, dtype.carrier), dtype))
            except DtypeError as error:
                raise DtypeError(f"{name_of_operand(spec, i)}: {error}") from None

    def _load(self, session: Session, load: Load, carriers: list[Carrier | None], _: Any) -> Reply:
        self.loaded.was_used = True
        args, kwargs = fill_call(load.structure, [self._engine.adopt(c) for c in all_there(carriers)])
        with self._users_code(session, load.call_id):
            number = self.loaded.load(load.kind, load.target, args, kwargs)
        program = self.loaded[number]
        facts = {
            "remote": number,
            "is_module": program.is_module,
            "training": program.training,
            "may_have_rules": hasattr(program, "has_rules"),
        }
        return Reply(Done(load.call_id, flatten(facts, _never)[0], [], 0, 0))

    def load_named(self, name: str, kind: str, target: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        """See `Loaded.load_named`."""
        try:
            self.loaded.load_named(name, kind, target, args, kwargs)
        finally:
            self._interrupts.end()

    def _change_state(self, session: Session, state: State, carriers: list[Carrier | None], _: Any) -> Reply:
        args, kwargs = fill_call(state.structure, all_there(carriers))
        program = self.loaded[state.remote]
        with self._users_code(session, state.call_id, is_interruptible=state.verb not in CHANGES):
            tree = self._state.act(program, state.verb, args, kwargs)
        structure, leaves = flatten(tree, lambda x: type(x) is Carrier or self._engine.is_tensor(x))
        return self._done(session, state.call_id, leaves, structure)

    def _release(self, session: Session, release: Release, carriers: list[Carrier | None], _: Any) -> None:
        self._residuals.release(release.released, session.client_id)

    def _ping(self, session: Session, ping: Ping, *_: Any) -> Reply:
        return self._done(session, ping.call_id, (), flatten(None, _never)[0])

    def _trace(self, session: Session, trace: Trace, *_: Any) -> Reply:
        from gradwire_workers import recording  # whoever is not traced does without

        structure, rows = recording.act(self, session, trace)
        return self._done(session, trace.call_id, rows, structure)


def _line_of(session: Session | None, router: Any, identity: bytes) -> Addressee:
    """The client's DEALER of that identity, with its plans if it has any."""
    known = None if session is None else session.dealers.get(identity)
    return known or Addressee(router, identity)


def _by_memory(session: Session, call_id: int, frames: Sequence[bytes]) -> bytes:
    """A message that stands for frames too long for a lane's packet: they lie in shared memory."""
    further: list[Any] = []
    carriers = [Carrier(np.frombuffer(frame, np.uint8), BYTES) for frame in frames]
    headers = session.exchange.lend(carriers, further)
    if further:
        session.exchange.take_back(headers)
        raise MemoryExhaustedError(
            f"{sum(map(len, frames))} bytes of reply cannot be shared: too many results are held at once. Drop some"
        )
    return messages.pack(Long(call_id, headers))


def _never(_: Any) -> bool:
    return False


def _residual_limit() -> int:
    available = read_memory().available
    return RESIDUAL_BYTES if available is None else min(RESIDUAL_BYTES, available // 4)
