"""Calls that are submitted: many under way at once, by one lane, to one worker.

Theory of operation. Who submits describes and encodes the call in its own thread, so that small arguments are taken
at once, and puts it behind the others; a single thread per connection, started by the first call, reads the answers::

    submit ─► encode ─► unsent ─► lane ═════► worker        (at most WINDOW calls, NBYTES bytes of arguments)
      │ no room: wait, or                       │
      └──► waiting ─► encoded when there is     │
                                                ▼
    Future.result() ◄── complete ◄── decode ◄── lane        (the pump: one thread, asleep while nothing is under way)

What is unsent goes to a worker that has nothing to do at once, and else in packets of several calls, which a worker serves
without a sleep in between: that is what makes it faster than calls in turn. Answers come in the order of the
calls. ``_lock`` guards the order and the window; nobody waits, sends or runs foreign code while holding it. Who waits for a
future waits on a condition that those of one connection share: many answers at once wake it once. But each future has a lock of
its own, for `concurrent.futures.wait` holds those of many at once, in an order that knows nothing of shared ones. (Locks are
taken in this order: ``_lock``, a future's, ``_finished``.) Callbacks of others than ours run in the background's threads, since
they may wait for what the pump is to bring.

Handlers of signals (Ctrl-C) may raise, or call in here, between any two steps of the main thread. So a call is under way
by one `append`, which is the last that can fail; a packet is sent and noted as sent in one step (`Lane.send_and_note`); the pump is
awake before there is something for it; locks are those of C, and can be taken again by whoever has them.

A call is *waiting* (it can be cancelled), then *under way*, then done. At the end of worker or connection, calls under way fail,
and those that wait are made the ordinary way, which may start the worker again or says why not. A deadline counts
from when the worker could begin: when the call before was answered. A call that passed it keeps its place, so that its
late answer is known for what it is.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from gradwire.answers import check_results
from gradwire.background import Background, is_ours, no_thread, raising
from gradwire.plans import Plan, signature_of
from gradwire.site import Outcome, Site
from gradwire_wire import messages, sockets
from gradwire_wire.batches import MAX_BATCH, batch_of
from gradwire_wire.carriers import Carrier
from gradwire_wire.chain import serving
from gradwire_wire.errors import (
    DeadlineError,
    GradwireError,
    ProtocolError,
    UsageError,
    WorkerDiedError,
)
from gradwire_wire.exchange import NotShared
from gradwire_wire.lane import Lane, TooLong
from gradwire_wire.messages import Done, Failed
from gradwire_wire.plans import MAX_PLANS

if TYPE_CHECKING:
    from gradwire.connection import Connection
    from gradwire.handle import Handle

__all__ = ["CallFuture", "Pipeline", "Submission"]

WINDOW, LOW = 128, 48
"""Calls under way at most; who waits for room is woken when there are so few, and not for each."""
NBYTES = 16 << 20
"""Bytes of arguments under way at most (one call may have more)."""
BATCH, BATCH_NBYTES, SOON = 16, 16 << 10, 1 << 10
"""Calls that go as soon as there are so many; bytes of one packet; bytes of arguments that do not wait for others."""
SMALL = 64 << 10
"""Bytes of an argument that is copied where it waits here."""
LOOK_S = 0.1
"""Seconds between two looks of whoever waits for what may be told elsewhere."""
AT_ONCE = 32
"""Answers that are read before anybody is told of them."""
_RUNNING, _FINISHED = "RUNNING", "FINISHED"
_OVER = frozenset({_FINISHED, "CANCELLED", "CANCELLED_AND_NOTIFIED"})
_RLock: Any = type(threading.RLock())
"""The class in C: to take it by `with` is one step, which no handler of signals interrupts."""


class _Elsewhere(Exception):
    """The call cannot go by the pipeline; nothing was sent or lent."""


class _OwnLock(_RLock):
    """What a `Future` takes for its condition: a lock of its own, and who is to be woken waits elsewhere."""

    finished: threading.Condition

    def notify_all(self) -> None:
        """What was done to the future is seen by whoever waits for any of the connection."""
        with self.finished._lock:  # type: ignore[attr-defined]
            self.finished.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Nobody waits here: see `CallFuture.wait`."""
        return False


class CallFuture(Future[Any]):
    """A future for which one waits on the condition of its connection."""

    def __init__(self, finished: threading.Condition) -> None:
        self._condition = lock = _OwnLock()
        lock.finished = finished
        self._state = "PENDING"
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []

    def result(self, timeout: float | None = None) -> Any:
        """See `concurrent.futures.Future.result`."""
        try:
            if self._state != _FINISHED:
                self.wait(timeout)
            if self._state == _FINISHED and self._exception is None:
                return self._result
            return super().result(0)
        finally:
            del self  # an error that is raised has this frame, and would hold its caller's variables

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `concurrent.futures.Future.exception`."""
        self.wait(timeout)
        return super().exception(0)

    def wait(self, timeout: float | None = None) -> None:
        """Until it is done or cancelled, or the seconds have passed."""
        finished: Any = self._condition.finished  # type: ignore[attr-defined]
        with finished._lock:
            finished.wait_for(self._is_over, timeout)

    def _is_over(self) -> bool:
        """As `done`, without the future's lock, which is not to be taken here."""
        return self._state in _OVER


class Submission:
    """One call: what it needs to be encoded, and then to be told its answer.

    adopt: makes a tensor of a result's carrier. again: makes the call the ordinary way.
    """

    __slots__ = (
        "adopt",
        "again",
        "call_id",
        "carriers",
        "chain",
        "frame",
        "future",
        "handle",
        "is_abandoned",
        "is_fresh",
        "is_new",
        "key",
        "nbytes",
        "number",
        "plan",
        "remote",
        "signature",
        "site",
    )

    def __init__(
        self,
        handle: Handle,
        remote: int,
        site: Site,
        carriers: list[Carrier],
        adopt: Callable[[Carrier], Any],
        again: Callable[[], Any] | None,
    ) -> None:
        self.handle, self.remote, self.site, self.carriers = handle, remote, site, carriers
        self.adopt, self.again = adopt, again
        self.chain = chain = serving()
        self.signature = signature = signature_of(carriers)
        self.key = (remote, site.number, tuple(chain) if chain else (), signature)
        self.nbytes = sum([c.array.nbytes for c in carriers])
        self.is_abandoned = self.is_new = self.is_fresh = False
        self.call_id = self.number = 0
        self.frame = b""
        self.plan: Plan | None = None
        self.future: Any = None


class Pipeline:
    """Of one connection. Its lane is its own; any thread may submit."""

    def __init__(self, connection: Connection, lane: Lane, background: Background) -> None:
        """Takes over the lane."""
        self._connection, self._lane, self._background = connection, lane, background
        self._most = lane.largest_packet()
        self._exchange = connection.exchange
        self._lock = threading.RLock()
        self._room, self._work = threading.Condition(self._lock), threading.Condition(self._lock)
        self._finished_lock = threading.RLock()
        self._finished = threading.Condition(self._finished_lock)
        self._under_way: deque[Submission] = deque()
        self._number = 0  # of the last call that is under way; they are numbered from 1
        self._sent = deque([0], maxlen=1)  # the number of the last one that was sent
        self._sending = threading.Lock()  # who has it sends
        self._sender = 0  # that thread
        self._waiting: deque[Submission] = deque()
        self._nbytes = 0
        self._blocked = 0
        self._is_idle = self._is_over = False
        self._plans: dict[Any, Plan] = {}
        self._numbered: dict[int, Any] = {}
        self._next_number = 0
        self._making: set[Any] = set()
        self._seen: set[Any] = set()
        self._since = 0.0
        self._thread: threading.Thread | None = None

    submission = Submission

    @property
    def is_over(self) -> bool:
        """Whether nothing can be submitted here any more."""
        return self._is_over

    def new_future(self) -> CallFuture:
        """A future for a call that is submitted later."""
        return CallFuture(self._finished)

    # -- submitting ------------------------------------------------------------------------------

    def submit(self, call: Submission, may_wait: bool, future: Any = None) -> Future[Any] | None:
        """The call's future; None where it cannot go this way. Waits for room if it may. Raises what refuses the arguments.

        MemoryExhaustedError where there is no thread to read the answers.
        """
        call.is_fresh = future is None
        call.future = future or CallFuture(self._finished)
        if self._lock._is_owned() or self._sender == threading.get_ident():  # type: ignore[attr-defined]
            return None  # a handler of signals has interrupted just this
        with self._lock:
            has_room = self._has_room(call.nbytes) or self._wait_for_room(call.nbytes, may_wait)
            if self._is_over:
                return None
            if not has_room:
                self._put_off(call)
                return call.future
            self._wake()
            try:
                self._begin(call)
            except _Elsewhere:
                return None
        unsent = self._number - self._sent[-1]
        if unsent >= BATCH or call.nbytes > SOON or unsent >= len(self._under_way):
            self._flush()
        return call.future

    def _has_room(self, nbytes: int) -> bool:
        """Whether the next call may begin at once (lock held)."""
        there = len(self._under_way)
        return there < WINDOW and (self._nbytes + nbytes <= NBYTES or not there) and not self._waiting

    def _wait_for_room(self, nbytes: int, may_wait: bool) -> bool:
        """Wait until it may, or the end, if this thread may wait (lock held). Whether it may."""
        if not may_wait or _in_event_loop():
            return False
        self._blocked += 1
        try:
            self._room.wait_for(lambda: self._is_over or self._has_room(nbytes))
        finally:
            self._blocked -= 1
        return True

    def _put_off(self, call: Submission) -> None:
        """It has to wait its turn (lock held)."""
        call.carriers = [
            Carrier(c.array.copy(order="K"), c.dtype) if c.array.nbytes <= SMALL else c for c in call.carriers
        ]
        call.is_fresh = False
        self._waiting.append(call)

    def _begin(self, call: Submission) -> None:
        """The call is under way, and cannot be cancelled any more (lock held). Raises as `submit`."""
        if call.is_fresh:
            call.future._state = _RUNNING
        elif not call.future.set_running_or_notify_cancel():
            return
        is_first, now = not self._under_way, time.perf_counter()
        call.frame = self._encoded(call)
        call.carriers, call.again = [], None
        self._nbytes += call.nbytes
        if is_first:
            self._since = now
        call.number = self._number = self._number + 1
        self._under_way.append(call)  # nothing that can fail comes after this, nor between it and the frame

    def _wake(self) -> None:
        """The pump is there, and will look what is under way (lock held, and before it is)."""
        if self._is_idle:
            self._work.notify()
        elif self._thread is None:
            name = f"gradwire-{self._connection.facts.name}-answers"
            self._thread = threading.Thread(target=self._pump, name=name, daemon=True)
            try:
                self._thread.start()
            except BaseException as error:
                self._thread = None  # and should it have been started all the same, it ends: see `_pump`
                if isinstance(error, (RuntimeError, MemoryError)):
                    raise no_thread(error) from error
                raise

    def _flush(self) -> None:
        """Send what the lane takes of what is unsent; the rest goes when answers have come. One thread at a time (no lock held)."""
        while self._sent[-1] < self._number and not self._sending.locked():
            with self._sending:
                self._sender = threading.get_ident()
                try:
                    if not self._send_packet():
                        return
                finally:
                    self._sender = 0

    def _send_packet(self) -> bool:
        """Send the first frames that are unsent. Whether the lane took them."""
        calls = list(self._under_way)
        first = self._sent[-1] + 1 - calls[0].number if calls else 0
        frames = _of_one_packet([call.frame for call in calls[first : first + MAX_BATCH]])
        try:
            return bool(frames) and self._send_frames(frames)
        except sockets.Unreachable:
            return False  # whoever reads answers will see it, and why

    def _send_frames(self, frames: list[bytes]) -> bool:
        lane, note, sent = self._lane, self._sent.append, self._sent[-1]
        try:
            packet = frames[0] if len(frames) == 1 else batch_of(frames)
            return lane.send_and_note(packet, note, sent + len(frames))
        except TooLong:  # the system is short of buffers, or has small ones
            pass
        with contextlib.suppress(TooLong):
            return lane.send_and_note(frames[0], note, sent + 1)
        return False

    # -- encoding (lock held) ----------------------------------------------------------------------

    def _encoded(self, call: Submission) -> bytes:
        lane = self._lane
        call.call_id = next(self._connection._call_ids)
        plan = None if call.signature is None else self._plans.get(call.key)
        if plan is not None and plan.nbytes <= self._most:
            with contextlib.suppress(NotShared):
                plan.put(call.carriers, call.call_id, 0, ())
                call.plan = plan
                return bytes(lane.outgoing[: plan.nbytes])
        return self._long(call)

    def _long(self, call: Submission) -> bytes:
        """A message; a Plan where such a call was made before."""
        further: list[Any] = []
        headers = self._exchange.lend(call.carriers, further)
        try:
            if further:
                raise _Elsewhere
            site = call.site
            message = messages.Call(
                *(
                    call.call_id,
                    call.remote,
                    site.structure,
                    (),
                    0,
                    0,
                    0,
                    site.training,
                    site.flags,
                    site.seed,
                ),
                *(headers, [], call.chain),
            )
            frame = self._planned(call, message) if self._is_to_be_planned(call) else None
            frame = frame or messages.pack(message)
            if len(frame) > self._most:
                raise _Elsewhere
        except BaseException:
            self._exchange.take_back(headers)
            if call.is_new:
                call.plan, call.is_new = None, False
                self._making.discard(call.key)
            raise
        return frame

    def _is_to_be_planned(self, call: Submission) -> bool:
        key = call.key
        if call.signature is None or key in self._making:
            return False
        was_seen = key in self._seen
        if len(self._seen) > 16 * MAX_PLANS:
            self._seen.clear()
        self._seen.add(key)
        return was_seen

    def _planned(self, call: Submission, message: messages.Call) -> bytes | None:
        number, lane = self._next_number, self._lane
        assert call.signature is not None
        try:
            plan = Plan(number, lane, call.signature, self._exchange)
            frame = messages.pack(messages.Plan(*message, number, lane.inlined, lane.room))
        except (ProtocolError, UsageError):
            return None
        if len(frame) > self._most:
            return None
        self._next_number = (number + 1) % MAX_PLANS
        self._plans.pop(self._numbered.pop(number, None), None)  # the worker forgets it now
        call.plan, call.is_new = plan, True
        self._making.add(call.key)
        return frame

    # -- the pump ------------------------------------------------------------------------------------

    def _pump(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return
        try:
            while self._wait_for_work():
                self._read()
        except BaseException as error:
            self._end(error)
        else:
            self._end(None)
        self._lane.close()

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not self._under_way:
                if self._is_over:
                    return False
                if self._waiting:
                    self._refill()
                    continue
                self._is_idle = True
                self._work.wait()
                self._is_idle = False
        self._flush()
        return True

    def _read(self) -> None:
        """Answers that have come, or a look around where none does. Raises why there will be none any more."""
        try:
            received: Any = self._lane.receive()
        except sockets.Again:
            self._look_around()
            return
        except sockets.Unreachable:
            self._connection._raise_unreachable(was_running=True)
        done: list[tuple[Submission, Any, BaseException | None]] = []
        try:
            while received is not None:
                self._note(received, done)
                del received  # a result must not live on here
                received = self._lane.receive_nowait() if len(done) < AT_ONCE else None
        except sockets.Unreachable:
            pass  # told by the next call of `receive`
        finally:
            self._make_room(done)
            self._complete(done)
            done.clear()

    def _note(self, received: Any, done: list[Any]) -> None:
        """One answer: whose it is and what it says."""
        if not self._under_way:
            raise ProtocolError("an answer that nobody asked for")
        frames, reply = ((), None) if type(received) is int else self._connection._read(received)
        call = self._under_way.popleft()
        now = time.perf_counter()
        try:
            result, error = self._outcome(call, received, reply, frames), None
        except _Strange:
            self._under_way.appendleft(call)
            raise ProtocolError("an answer to another call than the next") from None
        except BaseException as raised:
            result, error = None, raised
            if isinstance(raised, GradwireError):
                raised.__traceback__ = None  # whose frames hold the call, and so the error itself
        self._connection.calls += 1
        self._connection.waited_s += now - self._since
        self._since = now
        done.append((call, result, error))

    def _outcome(self, call: Submission, received: Any, reply: Any, frames: Sequence[bytes]) -> Any:
        connection, plan = self._connection, call.plan
        if reply is None:
            if plan is None:
                raise _Strange
            head = plan.head(received)
            if head.call_id != call.call_id:
                raise _Strange
            connection.compute_ns += head.compute_ns
            connection._give_back(head.token)
            if call.is_abandoned:
                plan.decline()
                return None
            return _tree(call, Outcome(plan.take(), plan.structure, 0))
        if reply.call_id != call.call_id and not (type(reply) is Failed and reply.call_id == 0):
            raise _Strange
        self._making.discard(call.key)
        if type(reply) is Failed:
            if self._is_over and reply.type_name == "KeyboardInterrupt":  # by `close`, which has cancelled it
                connection._raise_closed(was_running=True)
            raise connection.error_of(reply)
        return self._long_outcome(call, reply, frames)

    def _long_outcome(self, call: Submission, reply: Done, frames: Sequence[bytes]) -> Any:
        connection, plan = self._connection, call.plan
        connection.compute_ns += reply.compute_ns
        connection._give_back(reply.token)
        if plan is not None:
            plan.note_done(reply, self._exchange)
            if call.is_new:
                with self._lock:
                    self._plans[call.key] = plan
                    self._numbered[plan.number] = call.key
        if call.is_abandoned:
            self._exchange.decline(reply.headers)
            return None
        check_results((), reply.headers)
        carriers = self._exchange.borrow_all(reply.headers, frames[1:])
        return _tree(call, Outcome(carriers, reply.structure, 0))

    def _make_room(self, done: Sequence[Any]) -> None:
        """So many calls fewer are under way: others begin."""
        with self._lock:
            self._nbytes -= sum([call.nbytes for call, _, _ in done])
            if self._waiting:
                self._refill()
            if self._blocked and not self._waiting and len(self._under_way) <= LOW:
                self._room.notify_all()
        self._flush()

    def _refill(self) -> None:
        """Those that wait begin as far as there is room (lock held)."""
        waiting, self._waiting = self._waiting, deque()
        try:
            while waiting and self._has_room(waiting[0].nbytes):
                self._begin_or_tell(waiting.popleft())
        finally:
            self._waiting = waiting

    def _begin_or_tell(self, call: Submission) -> None:
        try:
            self._begin(call)
        except _Elsewhere:
            self._make_again(call)
        except BaseException as error:
            self._background.start(call.future, raising(error))

    def _make_again(self, call: Submission) -> None:
        assert call.again is not None, "it was under way"
        self._background.start(call.future, call.again)

    def _complete(self, done: Sequence[tuple[Submission, Any, BaseException | None]]) -> None:
        """Tell the futures, and then their callbacks."""
        for call, result, error in done:
            if not call.is_abandoned and self._is_ours(call.future):
                _finish(call.future, result, error)
        with self._finished_lock:
            self._finished.notify_all()
        for call, result, error in done:
            if call.is_abandoned:  # and told why
                continue
            if error is not None:
                self._note_error(call, error)
            if not self._is_ours(call.future):  # made before the worker was restarted
                self._background.start(call.future, _giving(result) if error is None else raising(error))
            elif call.future._done_callbacks:
                self._call_back(call.future)

    def _is_ours(self, future: Any) -> bool:
        return getattr(future._condition, "finished", None) is self._finished

    def _note_error(self, call: Submission, error: BaseException) -> None:
        if isinstance(error, WorkerDiedError):
            call.handle.note_death()
        if isinstance(error, GradwireError):
            self._connection.note_error(error)

    def _call_back(self, future: Any) -> None:
        if all(map(is_ours, future._done_callbacks)):
            future._invoke_callbacks()
        else:
            self._background.start(None, future._invoke_callbacks)

    # -- no answer -------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Is there still somebody to wait for? Is it the next call's time?"""
        self._flush()
        self._connection._look_around(None)
        call = next((c for c in self._under_way if not c.is_abandoned), None)
        if call is None or call.site.timeout_s is None:
            return
        try:
            self._connection._look_around(self._since + call.site.timeout_s)
        except DeadlineError as error:
            self._connection._ours.cancel(call.call_id)
            self._connection._link.interrupt(self._connection.facts.incarnation)
            self._complete([(call, None, error)])
            call.is_abandoned = True
            self._since = time.perf_counter()

    def _end(self, error: BaseException | None) -> None:
        """No answer will come any more, for that reason (None: nothing is under way)."""
        with self._lock:
            self._is_over = True
            under_way, waiting = list(self._under_way), list(self._waiting)
            self._under_way.clear()
            self._waiting.clear()
            self._room.notify_all()
        if error is not None:
            self._complete([(call, None, self._connection.twin_of(error)) for call in under_way])
        for call in waiting:
            self._make_again(call)

    def drain(self) -> None:
        """Wait until what has been submitted so far is done."""
        with self._lock:
            latest = [*self._waiting][-1:] or [*self._under_way][-1:]
        if latest and threading.current_thread() is not self._thread:
            future = latest[0].future  # perhaps of a former connection, with another condition
            with self._finished_lock:
                while future._state not in _OVER:
                    self._finished.wait(LOOK_S)

    def close(self) -> None:
        """The connection is closed: what is under way is told so, by the pump; the worker need not begin with it."""
        with self._lock:
            self._is_over = True
            for call in self._under_way:
                self._connection._ours.cancel(call.call_id)
            if self._thread is None:
                self._lane.close()
            self._room.notify_all()
            self._work.notify_all()


class _Strange(Exception):
    """Not the answer to the call whose turn it is."""


def _tree(call: Submission, outcome: Outcome) -> Any:
    return outcome.tree(call.adopt)


def _finish(future: Any, result: Any, error: BaseException | None) -> None:
    """Whoever waits for it is woken later, and callbacks are called later."""
    with future._condition:
        if future._state == _FINISHED:  # somebody's who interrupted its submission
            return
        future._result, future._exception, future._state = result, error, _FINISHED
        for waiter in future._waiters:
            if error is None:
                waiter.add_result(future)
            else:
                waiter.add_exception(future)


def _of_one_packet(unsent: list[bytes]) -> list[bytes]:
    """The first frames: as many as go into one packet."""
    frames: list[bytes] = []
    nbytes = 0
    for frame in unsent[:MAX_BATCH]:
        nbytes += 4 + len(frame)
        if frames and nbytes > BATCH_NBYTES:
            break
        frames.append(frame)
    return frames


def _giving(result: Any) -> Callable[[], Any]:
    return lambda: result


def _in_event_loop() -> bool:
    """Whether this thread runs an event loop, which must not wait."""
    events = sys.modules.get("asyncio.events")
    return events is not None and events._get_running_loop() is not None
