"""Everything this process has to one incarnation of a worker: tether, tensors, lines for calls.

Theory of operation. A call checks a line out of the pool, sends one message, waits for the reply with
that call's id, and puts the line back. The wait is a blocking receive that wakes a few times a second
to look whether the worker died, the deadline passed or the bridge was closed; signals interrupt it. A
call that is abandoned (deadline, Ctrl-C) leaves its line aside until the late reply has come in; that is
returned unread, and is never anybody else's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from gradwire import exits
from gradwire.answers import check_results
from gradwire.broker_link import BrokerLink
from gradwire.endings import (
    died,
    error_of,
    has_lied,
    vanished,
    was_closed,
    was_lost,
    was_restarted,
    without_frames,
)
from gradwire.inquiry import inquiry_about
from gradwire.lines import Line, Lines, fits, lanes_wanted, pages_wanted
from gradwire.plans import Plan, Seen, add, next_number, short_of, signature_of
from gradwire.site import Outcome, Site
from gradwire.worker_records import WorkerFacts
from gradwire_wire import messages, sockets
from gradwire_wire.chain import check_not_in_chain, serving
from gradwire_wire.errors import (
    ConnectError,
    DeadlineError,
    ForkedError,
    GradwireError,
    MemoryExhaustedError,
    ProtocolError,
    UsageError,
    class_named,
)
from gradwire_wire.exchange import Exchange, Memory, NotShared, close_all
from gradwire_wire.lane import TooLong
from gradwire_wire.messages import Call, Done, Failed, Long
from gradwire_wire.plans import MAX_RELEASED
from gradwire_wire.segments import Ledger
from gradwire_wire.tether import TetherClosedError, connect_tether
from gradwire_wire.words import Word

if TYPE_CHECKING:
    from gradwire.background import Background
    from gradwire.pipeline import Pipeline

__all__ = ["Connection"]

LOOK_MS = 100
REPORT_S = 1.5
SHORT_S = 0.02  # while descriptors are short the tether is looked at at this pace


_forks = 0
"""Which generation of forked processes this is: a look at it costs less than asking the system for the process's id."""


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)


class Connection:
    """The way to one worker process. Any thread may call; blocking calls release the GIL.

    Set by the `Worker`: ``advise``: what to do about an end by that exit code, for messages; ``revives``: whether the
    worker is started again by itself; ``follows_death``: whether this incarnation was; ``is_counted``: whether its end was;
    ``is_replaced``: whether another incarnation has taken over;
    ``state_discarded``: whether the program has said that it knows what was lost before this incarnation.
    """

    def __init__(self, link: BrokerLink, facts: WorkerFacts, memory: Memory, timeout_s: float) -> None:
        """Shakes hands with the worker. ConnectError, VersionMismatchError, DeadlineError."""
        check_not_in_chain(facts.incarnation, facts.name, serving())  # it could not greet us either
        self.facts, self._link, self._memory = facts, link, memory
        self.advise: Callable[[int | None], str] = lambda exit_code: "worker.restart() starts it again"
        self.revives = self.follows_death = self.is_counted = self.is_replaced = False
        self.state_discarded = False
        self._pid, self._forks = os.getpid(), _forks
        self._client_id = b"c" + os.urandom(15)
        self._call_ids = itertools.count(1)
        self._seen = Seen()
        self.released: deque[int] = deque()
        self._gone = threading.Event()
        self._opening = threading.RLock()
        self._broken: str | None = None
        self._pipeline: Pipeline | None = None
        self._closed = False
        self.last_error: tuple[float, GradwireError] | None = None
        self.calls = 0
        self.waited_s = 0.0
        self.compute_ns = 0
        self._open(timeout_s)

    def _open(self, timeout_s: float) -> None:
        wants_lanes, wants_pages = lanes_wanted(), pages_wanted()
        self._tether = connect_tether(self.facts.tether_path, timeout_s)
        try:
            self.exchange, self._ours, welcome = self._shake_hands(timeout_s)
        except BaseException:
            self._tether.close()
            raise
        lanes = welcome.lanes and wants_lanes and self.exchange.can_share
        pages = welcome.pages and wants_pages
        self._lines = Lines(self.facts.endpoint, self._client_id, self.exchange, LOOK_MS, lanes, pages)
        self._tether_fd = self._tether.fileno()
        self._link.watch(self._tether_fd, self._on_tether)
        self._link.tell_of_death(self.facts.incarnation, self._on_death)

    def _shake_hands(self, timeout_s: float) -> tuple[Exchange, Ledger, messages.Welcome]:
        ours = Ledger(self._memory.folder)
        hello = messages.Hello(messages.PROTOCOL, self.facts.token, self._client_id, self._pid)
        try:
            self._tether.send(hello, ours.descriptors, timeout_s)
            ours.close()
            received = self._tether.receive(timeout_s)
        except TetherClosedError as error:
            raise ConnectError(f"worker {self.facts.name!r} hung up during the handshake") from error
        if received is None:
            raise DeadlineError(
                f"worker {self.facts.name!r} did not answer within {timeout_s} s; it may be in a long call"
            )
        answer, descriptors = received
        if type(answer) is messages.Refused:
            close_all(descriptors)
            raise class_named(answer.kind, ProtocolError)(answer.message)
        if (
            type(answer) is not messages.Welcome
            or len(descriptors) > 1
            or answer.incarnation != self.facts.incarnation
        ):
            close_all(descriptors)
            raise ProtocolError(f"unexpected answer to Hello: {answer!r:.80}")
        exchange = Exchange(self._memory, self._tether, Ledger.received(descriptors), ours)
        return exchange, ours, answer

    # -- calls -----------------------------------------------------------------------------------

    def request(
        self, make: Callable[[int, list[Any]], Any], carriers: Sequence[Any], timeout_s: float | None
    ) -> tuple[Done, Sequence[bytes]]:
        """Send one message and wait for its reply.

        make(call_id, headers): the message. Blocks at most ``timeout_s`` (None: until the worker answers or dies).
        """
        self._check_usable()
        try:
            return self._request(make, carriers, timeout_s)
        except GradwireError as error:
            self.last_error = (time.monotonic(), without_frames(error))
            raise

    def _request(
        self, make: Callable[[int, list[Any]], Any], carriers: Sequence[Any], timeout_s: float | None
    ) -> tuple[Done, Sequence[bytes]]:
        start = time.perf_counter()
        if self._lines.aside:
            self._collect()
        further: list[Any] = []
        headers = self.exchange.lend(carriers, further)
        call_id = next(self._call_ids)
        line = self._send(make(call_id, headers), headers, further)
        reply, frames = self._finish(line, call_id, start, timeout_s)
        self._lines.check_in(line)
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
    ) -> Outcome:
        """Make a call; one that is made again and again is short (`gradwire_wire.plans`). Blocks as `request` does."""
        self._check_usable()
        try:
            chain = serving()
            signature = signature_of(carriers) if type(token) is int and not site.seeded else None
            if signature is not None:
                key = (remote, site.number, word, keep, token_ops, tuple(chain) if chain else (), signature)
                line = self._lines.check_out(0, 0)
                plan = line.plans.get(key)
                if plan is None:
                    self._lines.check_in(line)
                else:
                    try:
                        return self._evaluate_short(line, plan, word, carriers, token, site.timeout_s)
                    except (NotShared, TooLong):
                        pass
            call = _Template(remote, site, word, keep, token, token_ops, chain)
            return self._evaluate_long(call, signature, carriers)
        except GradwireError as error:
            self.last_error = (time.monotonic(), without_frames(error))
            raise

    def _evaluate_short(
        self,
        line: Line,
        plan: Plan,
        word: Word,
        carriers: Sequence[Any],
        token: Any,
        timeout_s: float | None,
    ) -> Outcome:
        """Make a planned call by its line. `NotShared`, TooLong: it must be long this time."""
        start = time.perf_counter()
        if self._lines.aside:
            self._collect()
        released = self.take_released(MAX_RELEASED) if self.released else ()
        call_id = next(self._call_ids)
        try:
            loans = plan.put(carriers, call_id, token, released)
        except BaseException:
            self.released.extend(released)
            self._lines.check_in(line)
            raise
        try:
            line.send_short_nowait(plan.nbytes)
        except TooLong:
            self.exchange.take_back_loans(loans)
            self._lines.check_in(line)
            self.released.extend(released)
            raise
        except sockets.Unreachable:
            self.exchange.take_back_loans(loans)
            self._lines.drop(line)
            self._raise_unreachable()
        except BaseException:  # perhaps sent; naming tokens twice harms nobody
            self._lines.drop(line)
            self.released.extend(released)
            raise
        reply, frames = self._finish(line, call_id, start, timeout_s, plan)
        if frames:
            return self._outcome(line, plan, word, reply, frames[1:])
        try:
            results = plan.take()
        except BaseException:
            self._lines.drop(line)
            self._give_back(reply.token)
            raise
        self._lines.check_in(line)
        return Outcome(results, plan.structure, reply.token)

    def _evaluate_long(
        self, call: _Template, signature: tuple[Any, ...] | None, carriers: Sequence[Any]
    ) -> Outcome:
        """Make a call by a message, which is a Plan where the call was made before."""
        start = time.perf_counter()
        if self._lines.aside:
            self._collect()
        further: list[Any] = []
        headers = self.exchange.lend(carriers, further)
        released = self.take_released() if self.released else []
        message = call.message(next(self._call_ids), headers, released)
        key = call.key(signature)
        plan = None
        try:
            if signature is not None and not further and self._seen.note(key):
                line, plan = self._send_plan(message, signature, headers)
            if plan is None:
                line = self._send(message, headers, further)
        except BaseException:  # naming them twice harms nobody
            self.released.extend(released)
            raise
        reply, frames = self._finish(line, message.call_id, start, call.site.timeout_s)
        if plan is not None:
            add(line, key, plan)
        return self._outcome(line, plan, call.word, reply, frames[1:])

    def _send_plan(
        self, call: Call, signature: tuple[Any, ...], headers: Sequence[Any]
    ) -> tuple[Line, Plan | None]:
        """Send a call as a Plan, by a line that carries such; the plan is None where that cannot be, and nothing sent."""
        line = self._lines.check_out(0, 0)
        number = next_number(line)
        try:
            plan = Plan(number, line, signature, self.exchange)
            frame = messages.pack(messages.Plan(*call, number, line.inlined, line.room))
        except (ProtocolError, UsageError):
            plan = None
        if plan is not None and fits(line, len(frame)):
            with contextlib.suppress(TooLong):
                self._send_by(line, [frame], headers)
                return line, plan
        self._lines.check_in(line)
        return line, None

    def _outcome(
        self, line: Line, plan: Plan | None, word: Word, done: Done, further: Sequence[bytes]
    ) -> Outcome:
        """What a long answer brought."""
        try:
            check_results(word, done.headers)
            results = self.exchange.borrow_all(done.headers, further)
            if plan is not None:
                plan.note_done(done, self.exchange)
        except BaseException:
            self._give_back(done.token)
            self._lines.drop(line)
            raise
        self._lines.check_in(line)
        return Outcome(results, done.structure, done.token)

    def _give_back(self, token: int) -> None:
        if token:
            self.released.append(token)

    def _finish(
        self, line: Line, call_id: int, start: float, timeout_s: float | None, plan: Plan | None = None
    ) -> tuple[Any, Sequence[bytes]]:
        """Wait for the answer to what was sent: a Done and its frames, or a `Short`. The line stays checked out.

        Raises what a Failed says, and then the line is back.
        """
        seen: list[Any] = []
        try:
            deadline = None if timeout_s is None else start + timeout_s
            reply, frames = self._wait(line, call_id, deadline, plan, seen)
        except BaseException as error:
            if isinstance(error, GradwireError) and not isinstance(error, DeadlineError):
                self._lines.drop(line)
            else:  # Ctrl-C, or whatever a handler of signals raises
                self._abandon(line, call_id, seen)
            raise
        self.calls += 1
        self.waited_s += time.perf_counter() - start
        if type(reply) is Failed:
            self._lines.check_in(line)
            raise error_of(reply, self.facts.name)
        self.compute_ns += reply.compute_ns
        return reply, frames

    def _send(self, message: Any, headers: Sequence[Any], further: Sequence[Any]) -> Line:
        """Send a message; the line that its reply will come on."""
        try:
            frame = messages.pack(message)
            line = self._lines.check_out(len(frame), len(further))
        except BaseException:  # certainly not sent
            self.exchange.take_back(headers)
            raise
        try:
            self._send_by(line, [frame, *further], headers)
        except TooLong:
            self._lines.check_in(line)
            try:
                line = self._lines.check_out_dealer()
            except BaseException:
                self.exchange.take_back(headers)
                raise
            self._send_by(line, [frame, *further], headers)
        return line

    def _send_by(self, line: Line, frames: Sequence[Any], headers: Sequence[Any]) -> None:
        """Send frames. TooLong: it must go by another line, and nothing was sent."""
        try:
            line.send_nowait(frames)
        except TooLong:
            raise
        except sockets.Unreachable:
            self.exchange.take_back(headers)
            self._lines.drop(line)
            self._raise_unreachable()
        except Exception:  # certainly not sent
            self.exchange.take_back(headers)
            self._lines.drop(line)
            raise
        except BaseException:  # perhaps sent, perhaps in part
            self._lines.drop(line)
            raise

    def tell(self, message: Any) -> bool:
        """Send a message that has no reply. Whether it was sent: not where the worker is gone, or has not read enough. Never waits."""
        frame = messages.pack(message)
        try:
            line = self._lines.check_out(len(frame), 0)
        except MemoryExhaustedError:
            return False
        try:
            line.send_nowait([frame])
        except sockets.Unreachable:
            self._lines.drop(line)
            return False
        except TooLong:
            self._lines.check_in(line)
            return False
        self._lines.check_in(line)
        return True

    def _check_usable(self) -> None:
        if self._closed or self.is_replaced or self._gone.is_set() or self._forks != _forks:
            self._raise_unusable()
        chain = serving()
        if chain:
            check_not_in_chain(self.facts.incarnation, self.facts.name, chain)

    def _raise_unusable(self) -> NoReturn:
        if self._forks != _forks:
            raise ForkedError(
                "this proxy belongs to the parent process; a forked child opens a bridge of its own with gradwire.connect()"
            )
        if self._closed or self.is_replaced:
            self._raise_closed(was_running=False)
        self._raise_dead(was_running=False)

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
                self._raise_unreachable(was_running=True)
            seen.append(received)
            if type(received) is int:
                if plan is None:
                    raise ProtocolError("a short answer to a long message")
                short = plan.head(received)
                if short.call_id != call_id:
                    raise ProtocolError("a short answer to another call")
                return short, ()
            frames, reply = self._read(received)  # type: ignore[arg-type]
            if reply.call_id == call_id or (reply.call_id == 0 and type(reply) is Failed):
                return reply, frames
            seen.clear()
            if pings and reply.call_id in pings:  # which came behind the call
                raise was_lost(self.facts.name)
            self._decline(reply)

    def _wait_longer(self, line: Line, deadline: float | None, pings: list[int]) -> Any:
        """What comes on the line at last, to whoever has waited in vain for a moment. pings: see `gradwire.inquiry`."""
        inquiry = inquiry_about(line, self._lines, self._call_ids, pings)
        try:
            while True:
                self._look_around(deadline)
                if inquiry.is_lost():
                    raise was_lost(self.facts.name)
                try:
                    return line.receive()
                except sockets.Again:
                    pass
                except sockets.Unreachable:
                    self._raise_unreachable(was_running=True)
        finally:
            inquiry.end()

    def _read(self, frames: list[bytes]) -> tuple[list[bytes], Any]:
        """The reply in a message, and the frames it came in or stood for."""
        reply = messages.unpack(frames[0])
        if type(reply) is Long:
            carriers = self.exchange.borrow_all(reply.headers, ())
            frames = [c.array.tobytes() for c in carriers if c is not None]
            reply = messages.unpack(frames[0]) if frames else None
        if type(reply) not in (Done, Failed):
            raise ProtocolError(f"a worker does not say {type(reply).__name__}")
        return frames, reply

    def _look_around(self, deadline: float | None) -> None:
        """No reply yet: is there still somebody to wait for?"""
        if self._closed:  # first: then the worker ends as well, and that is no news
            self._raise_closed(was_running=True)
        if self._gone.is_set():
            self._raise_dead(was_running=True)
        if deadline is not None and time.perf_counter() > deadline:
            raise DeadlineError(
                f"worker {self.facts.name!r} did not answer in time; it was interrupted. Code that loops in C cannot be: "
                "worker.restart() ends it. Give more time with .options(timeout=...)"
            )

    def _raise_unreachable(self, was_running: bool = False) -> NoReturn:
        """The line is broken: because the worker is gone or this end was closed, as will be known at once."""
        if not (self.is_replaced or self._closed):
            self._gone.wait(REPORT_S)
        if self.is_replaced or self._closed:
            self._raise_closed(was_running)
        self._raise_dead(was_running)

    def _raise_closed(self, was_running: bool) -> NoReturn:
        exits.end_daemon()
        raise (was_restarted if self.is_replaced else was_closed)(self.facts.name, was_running)

    def _raise_dead(self, was_running: bool) -> NoReturn:
        if self.is_replaced or exits.is_leaving():
            self._raise_closed(was_running)
        if self._broken is not None:
            raise has_lied(self.facts.name, self._broken)
        death = self._link.death_of(self.facts.incarnation, REPORT_S)
        if death is None:
            raise vanished(self.facts, was_running)
        lives = self._link.broker_alive
        advice = self.advise(death.exit_code) if lives else "its broker has ended as well: connect anew"
        raise died(self.facts, death, advice, was_running)

    # -- calls that are submitted ----------------------------------------------------------------

    may_pipeline = True
    """Whether calls may be under way by a pipeline: not where each of them is recorded."""

    def pipeline(self, background: Background) -> Pipeline | None:
        """What calls are submitted by; None where they cannot be. Raises what any call would, were it made now."""
        self._check_usable()
        found = self._pipeline
        if found is None or found.is_over:
            found = self._open_pipeline(background)
        return found if self.may_pipeline else None

    def _open_pipeline(self, background: Background) -> Pipeline | None:
        from gradwire.pipeline import Pipeline  # whoever never submits does without

        if self._opening._is_owned():  # type: ignore[attr-defined]
            return None  # a handler of signals has interrupted just this
        with self._opening:
            if self._pipeline is None or self._pipeline.is_over:
                lane = self._lines.open_pipeline_lane()
                self._pipeline = None if lane is None or self._closed else Pipeline(self, lane, background)
            return self._pipeline

    def drain(self) -> None:
        """Wait until what was submitted before is done."""
        if self._pipeline is not None:
            self._pipeline.drain()

    def error_of(self, failed: Failed) -> GradwireError:
        """What a worker's Failed stands for."""
        return error_of(failed, self.facts.name)

    def note_error(self, error: GradwireError) -> None:
        """A call has raised this."""
        self.last_error = (time.monotonic(), without_frames(error))

    @staticmethod
    def twin_of(error: BaseException) -> BaseException:
        """One like it, for another call that fails for the same reason."""
        return without_frames(error) if isinstance(error, GradwireError) else error

    # -- calls nobody waits for ------------------------------------------------------------------

    def _abandon(self, line: Line, call_id: int, seen: Sequence[Any]) -> None:
        if seen:  # interrupted after the reply had come: nobody will look at it
            try:
                self._decline_seen(line, seen[-1])
            except ProtocolError:
                self._lines.drop(line)
            else:
                self._lines.check_in(line)
            return
        self._ours.cancel(call_id)
        self._lines.set_aside(line)
        self._link.interrupt(self.facts.incarnation)

    def _collect(self) -> None:
        """Late replies are returned unread, and their lines are good again."""
        self._lines.collect(self._decline_late)

    def _decline_late(self, line: Line, received: list[bytes] | int) -> None:
        """The late answer on a line that was set aside."""
        if type(received) is not int:
            received = self._read(received)[0]  # type: ignore[arg-type]
        self._decline_seen(line, received)

    def _decline_seen(self, line: Line, received: list[bytes] | int) -> None:
        """An answer that nobody wants. What it may have changed about plans nobody took note of.

        One that lies in shared memory was perhaps read, and that given back: then what it lends stays lent.
        """
        if type(received) is int:
            short, plan = short_of(line, received)
            plan.decline()
            self._give_back(short.token)
        else:
            self._decline(messages.unpack(received[0]))  # type: ignore[index]
        line.plans.clear()

    def _decline(self, reply: Any) -> None:
        if type(reply) is Done:
            self.exchange.decline(reply.headers)
            if reply.token:
                self.released.append(reply.token)

    def every_second(self) -> None:
        """In the link's thread: what nobody else may come by to do."""
        if self._gone.is_set() or self._closed or self._pid != os.getpid():
            return
        self._collect()
        if self._lines.aside:
            # abandoned and not over: a signal just before user code began to wait in C was seen by nobody
            self._link.interrupt(self.facts.incarnation)
        if self.released:
            released = self.take_released()
            if not self.tell(messages.Release(released)):
                self.released.extend(released)

    def take_released(self, most: int = 1 << 20) -> list[int]:
        """Tokens dropped since the last message, to be named in the next."""
        taken: list[int] = []
        while self.released and len(taken) < most:
            try:
                taken.append(self.released.popleft())
            except IndexError:
                break
        return taken

    # -- the end ---------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the worker process was there when it was last heard of."""
        return not (self._closed or self.is_replaced or self._gone.is_set())

    def _on_tether(self) -> None:
        """In the link's thread: segments have been announced, or the worker is gone."""
        try:
            self.exchange.receive_segments()
        except MemoryExhaustedError:  # no descriptor left: it stays to be read, by whoever needs it
            time.sleep(SHORT_S)
            if self._link.death_of(self.facts.incarnation) is not None:
                self._gone.set()
        except (TetherClosedError, GradwireError, OSError) as error:
            self._broken = str(error) if isinstance(error, ProtocolError) else None
            self._link.unwatch(self._tether_fd)
            self._gone.set()

    def _on_death(self) -> None:
        """In the link's thread: the broker says that the worker has ended; a child that it had forked may hold the tether."""
        with contextlib.suppress(TetherClosedError, GradwireError, OSError):
            self.exchange.receive_segments()  # which its last answers may name
        self._link.unwatch(self._tether_fd)
        self._gone.set()

    def replace(self) -> None:
        """Before `close`: another incarnation takes over, and whoever waits here is told that rather than of an end."""
        self.is_replaced = True

    def close(self) -> None:
        """Stop using the worker. Views of its results stay valid. Idempotent."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if self._pipeline is not None:
            self._pipeline.close()
        if not self._gone.is_set():
            self._link.unwatch(self._tether_fd)
        self._lines.close()
        if self._gone.is_set():
            self._tether.close()
            self.exchange.end()
        else:
            self.exchange.leave()
            del self._tether  # closes when the last view of the worker's memory is gone

    def bury(self) -> None:
        """After `close`, once the process is gone: what it had borrowed is free again."""
        self._gone.set()
        if self._pid == os.getpid():
            self.exchange.end()


class _Template(NamedTuple):
    """A call without its tensors."""

    remote: int
    site: Site
    word: Word
    keep: int
    token: Any
    token_ops: int
    chain: list[bytes]

    def key(self, signature: tuple[Any, ...] | None) -> tuple[Any, ...]:
        """What its plan is found by."""
        chain = tuple(self.chain) if self.chain else ()
        return (self.remote, self.site.number, self.word, self.keep, self.token_ops, chain, signature)

    def message(self, call_id: int, headers: list[Any], released: list[int]) -> Call:
        site = self.site
        return Call(
            call_id,
            self.remote,
            site.structure,
            self.word,
            self.keep,
            self.token,
            self.token_ops,
            site.training,
            site.flags,
            site.seed,
            headers,
            released,
            self.chain,
        )
