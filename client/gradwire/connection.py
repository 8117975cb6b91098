"""Everything this process has to one incarnation of a worker: tether, tensors, lines for calls.

Theory of operation. A call checks a line out of the pool, sends one message, waits for the reply with
that call's id, and puts the line back. The wait is a blocking receive that wakes a few times a second
to look whether the worker died, the deadline passed or the bridge was closed (`gradwire.life`); signals interrupt
it. How a message gets on its way is in `gradwire.sending`, how a reply is read, and what becomes of one that
nobody waits for any more, in `gradwire.replies`. Calls that are submitted go by a `gradwire.pipeline`.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gradwire.answers import check_results
from gradwire.broker_link import BrokerLink
from gradwire.endings import error_of, was_lost, without_frames
from gradwire.exits import end_daemon
from gradwire.handshake import Ask, shake_hands
from gradwire.inquiry import inquiry_about
from gradwire.life import Life, TetherWatch
from gradwire.lines import MOST_ASIDE_S, Line, Lines, lanes_wanted, pages_wanted
from gradwire.loading import needed
from gradwire.plans import Plan, Seen, Template, add, signature_of
from gradwire.replies import Abandoned, Released, reply_in
from gradwire.sending import Sender
from gradwire.site import Outcome, Site
from gradwire.worker_records import WorkerFacts
from gradwire_wire import messages, sockets
from gradwire_wire.carriers import Carrier
from gradwire_wire.chain import check_not_in_chain, serving
from gradwire_wire.errors import ClosedError, DeadlineError, GradwireError, ProtocolError
from gradwire_wire.exchange import Ended, Exchange, Memory, NotShared
from gradwire_wire.lane import TooLong
from gradwire_wire.messages import Done, Failed
from gradwire_wire.plans import MAX_RELEASED
from gradwire_wire.segments import Ledger
from gradwire_wire.tether import connect_tether
from gradwire_wire.words import Word

if TYPE_CHECKING:
    from gradwire.background import Background
    from gradwire.far import NoTether
    from gradwire.notes import Invocation, Message
    from gradwire.pipeline import Pipeline
    from gradwire.steps import Steps

__all__ = ["LOOK_MS", "Connection"]

LOOK_MS = 100


class Connection:
    """The way to one worker process. Any thread may call; blocking calls release the GIL.

    life: whether there is somebody to call. lines: what calls go by. exchange: what is lent and borrowed. ours: the ledger
    that this end writes. released: tokens to be named in the next message. dropped_remotes, dropped_optimizers: numbers of what
    nobody here has any more. sender: of messages.
    """

    life_class = Life
    _watch: TetherWatch | NoTether

    def __init__(
        self,
        link: BrokerLink,
        facts: WorkerFacts,
        memory: Memory,
        timeout_s: float,
        is_busy: Ask = lambda: False,
    ) -> None:
        """Shakes hands with the worker. ConnectError, VersionMismatchError, DeadlineError. is_busy: see `shake_hands`."""
        check_not_in_chain(facts.incarnation, facts.name, serving())  # it could not greet us either
        self.facts, self.link, self._memory = facts, link, memory
        self.life = self.life_class(link, facts)
        self._client_id = b"c" + os.urandom(15)
        self.call_ids = itertools.count(1)
        self._seen = Seen()
        self.released, self.dropped_remotes, self.dropped_optimizers = Released(), Released(), Released()
        self._opening = threading.RLock()
        self._pipeline: Pipeline | None = None
        self._steps: Steps | None = None
        self._gave_up_at = -math.inf
        self.last_error: tuple[float, GradwireError] | None = None
        self.calls = 0
        self.waited_s = 0.0
        self.compute_ns = 0
        self.lines, self.exchange, self.ours = self._open(timeout_s, is_busy)
        self.sender = Sender(self.lines, self.exchange, self.life)
        self._abandoned = Abandoned(self.lines, self.exchange, self.ours, self.released, self.life)

    def _open(self, timeout_s: float, is_busy: Ask) -> tuple[Lines, Exchange, Ledger]:
        wants_lanes, wants_pages = lanes_wanted(), pages_wanted()
        tether = connect_tether(self.facts.tether_path, timeout_s)
        try:
            exchange, ours, welcome = shake_hands(
                tether, self.facts, self._client_id, self._memory, timeout_s, is_busy
            )
        except BaseException:
            tether.close()
            raise
        lanes = welcome.lanes and wants_lanes and exchange.can_share
        pages = welcome.pages and wants_pages
        lines = Lines(self.facts.endpoint, self._client_id, exchange, LOOK_MS, lanes, pages)
        self._watch = TetherWatch(tether, exchange, self.link, self.life)
        return lines, exchange, ours

    # -- calls -----------------------------------------------------------------------------------

    def request(
        self, make: Callable[[int, list[Any]], Any], carriers: Sequence[Any], timeout_s: float | None
    ) -> tuple[Done, Sequence[bytes]]:
        """Send one message and wait for its reply.

        make(call_id, headers): the message. Blocks at most ``timeout_s`` (None: until the worker answers or dies).
        """
        try:
            self.life.check_usable()
            if self._steps is not None:
                self.settle()
            return self._request_noted(make, carriers, timeout_s)
        except ClosedError:
            end_daemon()
            raise

    def ask(
        self, make: Callable[[int, list[Any]], Any], timeout_s: float | None
    ) -> tuple[Done, Sequence[bytes]]:
        """`request` of what has nothing to do with calls: it waits for no submitted steps, and nobody notes it."""
        self.life.check_usable()
        return self._request(make, (), timeout_s, None)

    def _request_noted(
        self, make: Callable[[int, list[Any]], Any], carriers: Sequence[Any], timeout_s: float | None
    ) -> tuple[Done, Sequence[bytes]]:
        recorder = self.link.recorder
        noted = None if recorder is None else recorder.message(self)
        try:
            return self._request(make, carriers, timeout_s, noted)
        except BaseException as error:
            self._note_failure(error, noted)
            raise

    def _request(
        self,
        make: Callable[[int, list[Any]], Any],
        carriers: Sequence[Any],
        timeout_s: float | None,
        noted: Message | None,
    ) -> tuple[Done, Sequence[bytes]]:
        start = time.perf_counter()
        if self.lines.aside:
            self._abandoned.collect()
        further: list[Any] = []
        headers = self.exchange.lend(carriers, further)
        call_id = next(self.call_ids)
        try:
            message = make(call_id, headers)
            if noted is not None:
                noted.note_lent(message)
            line = self.sender.send(message, headers, further)
        except BaseException as error:
            self._give_up(error, call_id)
            raise
        reply, frames = self._finish(line, call_id, start, timeout_s, None, noted)
        self.lines.check_in(line)
        if noted is not None:
            noted.note_answered(())
        return reply, frames[1:]

    def evaluate(
        self,
        remote: int,
        site: Site,
        word: Word,
        carriers: Sequence[Any],
        keep: int,
        token: int | list[Any],
        token_ops: int,
        invocation: Invocation | None = None,
    ) -> Outcome:
        """Make a call; one that is made again and again is short (`gradwire_wire.plans`). Blocks as `request` does.

        invocation: that it is part of, where it is recorded.
        """
        chain, key = self.life.check_usable(), None
        if self._steps is not None:
            self.settle()
        noted = None if invocation is None else invocation.message(self, word, carriers, keep, token)
        try:
            signature = signature_of(carriers) if type(token) is int and not site.seeded else None
            if signature is not None:
                key = (remote, site.number, word, keep, token_ops, tuple(chain) if chain else (), signature)
                line = self.sender.check_out(0, 0)
                plan = line.plans.get(key)
                if plan is None:
                    self.lines.check_in(line)
                else:
                    try:
                        return self._evaluate_short(line, plan, word, carriers, token, site.timeout_s, noted)
                    except (NotShared, TooLong):
                        pass
            call = Template(remote, site, word, keep, token, token_ops, chain)
            return self._evaluate_long(call, key, carriers, noted)
        except BaseException as error:
            self._note_failure(error, noted)
            raise

    def _evaluate_short(
        self,
        line: Line,
        plan: Plan,
        word: Word,
        carriers: Sequence[Any],
        token: Any,
        timeout_s: float | None,
        noted: Message | None,
    ) -> Outcome:
        """Make a planned call by its line. `NotShared`, TooLong: it must be long this time."""
        start = time.perf_counter()
        if self.lines.aside:
            self._abandoned.collect()
        released = self.released.take(MAX_RELEASED) if self.released else ()
        call_id, loans = next(self.call_ids), None
        try:
            loans = plan.put(carriers, call_id, token, released)
            if noted is not None:
                noted.note_lent_short(call_id)
            line.send_short_nowait(plan.nbytes)
        except BaseException as error:
            self.released.extend(released)  # naming tokens twice harms nobody
            self._give_up(error, call_id)
            self.sender.unsent(error, line, loans)
            raise
        reply, frames = self._finish(line, call_id, start, timeout_s, plan, noted)
        if frames:
            return self._outcome(line, plan, word, reply, frames[1:], noted)
        try:
            results = plan.take()
        except BaseException as error:
            self.lines.drop(line)
            self.released.give_back(reply.token)
            if isinstance(error, Ended):
                self.life.raise_unreachable(was_running=True)
            raise
        self.lines.check_in(line)
        if noted is not None:
            noted.note_answered(results)
        return Outcome(results, plan.structure, reply.token)

    def _evaluate_long(
        self, call: Template, key: tuple[Any, ...] | None, carriers: Sequence[Any], noted: Message | None
    ) -> Outcome:
        """Make a call by a message, which is a Plan where one of that key was made before. None: it cannot be planned."""
        start = time.perf_counter()
        if self.lines.aside:
            self._abandoned.collect()
        further: list[Any] = []
        headers = self.exchange.lend(carriers, further)
        released = self.released.take() if self.released else []
        message = call.message(next(self.call_ids), headers, released)
        plan = None
        try:
            if noted is not None:
                noted.note_lent(message)
            if key is not None and not further and self._seen.note(key):
                line, plan = self.sender.send_plan(message, key[-1], headers)
            if plan is None:
                line = self.sender.send(message, headers, further)
        except BaseException as error:
            self.released.extend(released)
            self._give_up(error, message.call_id)
            raise
        if plan is not None and noted is not None:
            noted.sent_as = "plan"
        reply, frames = self._finish(line, message.call_id, start, call.site.timeout_s, None, noted)
        if plan is not None:
            add(line, key, plan)
        return self._outcome(line, plan, call.word, reply, frames[1:], noted)

    def _give_up(self, error: BaseException, call_id: int) -> None:
        """A handler of signals has raised this while the call was sent: perhaps it was, and then it ends in the worker, where nobody waits for it."""
        if isinstance(error, (GradwireError, NotShared, TooLong, sockets.Unreachable)):
            return  # certainly not sent
        self.ours.cancel(call_id)
        self._gave_up_at = time.monotonic()
        self.life.interrupt()

    def _outcome(
        self,
        line: Line,
        plan: Plan | None,
        word: Word,
        done: Done,
        further: Sequence[bytes],
        noted: Message | None,
    ) -> Outcome:
        """What a long answer brought."""
        try:
            check_results(word, done.headers)
            results = self.borrow_all(done.headers, further)
            if plan is not None:
                plan.note_done(done, self.exchange)
        except BaseException:
            self.released.give_back(done.token)
            self.lines.drop(line)
            raise
        self.lines.check_in(line)
        if noted is not None:
            noted.note_answered(results)
        return Outcome(results, done.structure, done.token)

    def _finish(
        self,
        line: Line,
        call_id: int,
        start: float,
        timeout_s: float | None,
        plan: Plan | None,
        noted: Message | None,
    ) -> tuple[Any, Sequence[bytes]]:
        """Wait for the answer to what was sent: a Done and its frames, or a `Short`. The line stays checked out.

        Raises what a Failed says, and then the line is back.
        """
        seen: list[Any] = []
        try:
            if noted is not None:
                noted.note_sent(line)
            deadline = None if timeout_s is None else start + timeout_s
            reply, frames = self._wait(line, call_id, deadline, plan, seen)
            if noted is not None:
                noted.note_received()
        except BaseException as error:
            if isinstance(error, GradwireError) and not isinstance(error, DeadlineError):
                self.lines.drop(line)
            else:  # Ctrl-C, or whatever a handler of signals raises
                self._abandoned.abandon(line, call_id, seen)
            raise
        self.calls += 1
        self.waited_s += time.perf_counter() - start
        if type(reply) is Failed:
            self.lines.check_in(line)
            raise error_of(reply, self.facts.name)
        self.compute_ns += reply.compute_ns
        return reply, frames

    def _wait(
        self,
        line: Line,
        call_id: int,
        deadline: float | None,
        plan: Plan | None,
        seen: list[Any],
    ) -> tuple[Any, Sequence[bytes]]:
        """The reply and its frames; what came is noted in ``seen`` at once, for whoever is interrupted after that."""
        pings: list[int] | None = None
        while True:
            try:
                received = line.receive()
            except sockets.Again:
                pings = pings or []
                received = self._wait_longer(line, deadline, pings)
            except sockets.Unreachable:
                self.life.raise_unreachable(was_running=True)
            seen.append(received)
            if type(received) is int:
                if plan is None:
                    raise ProtocolError("a short answer to a long message")
                short = plan.head(received)
                if short.call_id != call_id:
                    raise ProtocolError("a short answer to another call")
                return short, ()
            frames, reply = reply_in(received, self.exchange)  # type: ignore[arg-type]
            if reply.call_id == call_id or (reply.call_id == 0 and type(reply) is Failed):
                return reply, frames
            seen.clear()
            if pings and reply.call_id in pings:  # which came behind the call
                raise was_lost(self.facts.name)
            self._abandoned.decline(reply)

    def _wait_longer(self, line: Line, deadline: float | None, pings: list[int]) -> Any:
        """What comes on the line at last, to whoever has waited in vain for a moment. pings: see `gradwire.inquiry`."""
        inquiry = inquiry_about(line, self.lines, self.call_ids, pings)
        try:
            while True:
                self.life.look_around(deadline)
                if inquiry.is_lost():
                    raise was_lost(self.facts.name)
                try:
                    return line.receive()
                except sockets.Again:
                    pass
                except sockets.Unreachable:
                    self.life.raise_unreachable(was_running=True)
        finally:
            inquiry.end()

    def borrow_all(self, headers: Sequence[Any], frames: Sequence[bytes]) -> list[Carrier | None]:
        """What an answer lends, or brought. Raises why it is gone where worker or connection have ended since the answer came."""
        try:
            return self.exchange.borrow_all(headers, frames)
        except Ended:
            self.life.raise_unreachable(was_running=True)

    # -- calls that are submitted ----------------------------------------------------------------

    @property
    def keeps_order(self) -> bool:
        """Whether calls that are submitted are made in their order: by the pipeline, or one by one where it cannot be had just now."""
        return self.lines.can_pipeline

    def pipeline(self, background: Background) -> Pipeline | None:
        """What calls are submitted by; None where they cannot be. Raises what any call would, were it made now."""
        self.life.check_usable()
        found = self._pipeline
        if self.link.recorder is not None:  # it notes messages whose answers are waited for one by one
            if found is not None:
                found.divert()
            return None
        if found is None or found.is_over:
            found = self._open_pipeline(background)
        return found

    def _open_pipeline(self, background: Background) -> Pipeline | None:
        if self._opening._is_owned():  # type: ignore[attr-defined]
            return None  # a handler of signals has interrupted just this
        kind = needed("gradwire.pipeline").Pipeline  # whoever never submits does without
        with self._opening:
            if self._pipeline is None or self._pipeline.is_over:
                lane = self.lines.open_pipeline()
                if lane is None or self.life.is_closed:
                    self._pipeline = None
                else:
                    self._pipeline = kind(self, lane, background)
            return self._pipeline

    def submitted_steps(self) -> Steps:
        """Those that were submitted here, for which every message waits then."""
        if self._steps is None:
            self._steps = needed("gradwire.steps").Steps()
        return self._steps

    def settle(self) -> None:
        """Steps that were submitted are made before what is asked next. Raises what one of them has raised and nobody has been told."""
        self.drain()
        if self._steps is not None:
            self._steps.raise_failed()

    def give_back(self) -> None:
        """No more calls are submitted here; those that wait for room go to the anteroom."""
        if self._pipeline is not None:
            self._pipeline.give_back()

    def drain(self) -> None:
        """Wait until what was submitted before is done."""
        if self._pipeline is not None:
            self._pipeline.drain()

    # -- what is due beside calls ----------------------------------------------------------------

    def _note_failure(self, error: BaseException, noted: Message | None) -> None:
        """A message has ended by this."""
        if noted is not None:
            noted.note_error(error)
        if isinstance(error, GradwireError):
            self.note_error(error)

    def note_error(self, error: GradwireError) -> None:
        """A call has raised this."""
        self.last_error = (time.monotonic(), without_frames(error))

    def every_second(self) -> None:
        """In the link's thread: what nobody else may come by to do."""
        if self.life.gone.is_set() or self.life.is_closed or self.life.is_foreign:
            return
        self._abandoned.collect()
        if self.lines.aside or time.monotonic() - self._gave_up_at < MOST_ASIDE_S:
            # abandoned and not over: a signal just before user code began to wait in C was seen by nobody
            self.life.interrupt()
        if self.released:
            released = self.released.take()
            if not self.sender.tell(messages.Release(released)):
                self.released.extend(released)
        self.tell_of_dropped()

    def tell_of_dropped(self) -> None:
        """Have the worker let go of what nobody here has any more. Never waits."""
        if self.dropped_remotes or self.dropped_optimizers:
            forget = messages.Forget(self.dropped_remotes.take(), self.dropped_optimizers.take())
            if not self.sender.tell(forget):
                self.dropped_remotes.extend(forget.remotes)
                self.dropped_optimizers.extend(forget.optimizers)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop using the worker. Views of its results stay valid. Idempotent."""
        if self.life.is_closed or self.life.is_foreign:
            return
        self.life.is_closed = True
        if self._pipeline is not None:
            self._pipeline.close()
        self._watch.stop()
        self.lines.close()
        self._watch.let_go()

    def bury(self) -> None:
        """After `close`, once the process is gone: what it had borrowed is free again."""
        self.life.gone.set()
        if not self.life.is_foreign:
            self.exchange.end()
