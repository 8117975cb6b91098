"""Calls that are submitted: many under way at once, by one lane, to one worker.

Theory of operation. Who submits describes and encodes the call in its own thread, so that small arguments are taken
at once, and puts it behind the others; a single thread per connection, started by the first call, reads the answers::

    submit ─► encode ─► unsent ─► lane ═════► worker        (at most WINDOW calls, NBYTES bytes of arguments)
      │ no room: wait, or                       │
      └──► waiting ─► encoded when there is     │
                                                ▼
    Future.result() ◄── complete ◄── decode ◄── lane        (the pump: one thread, asleep while nothing is under way)

What is unsent goes in packets (`gradwire.packets`): that is what makes it faster than calls in turn; and the pump lets answers gather
where many are under way (`gradwire.pauses`). Answers come in the order of the calls. ``_lock`` guards the order and the window; nobody waits,
sends or runs foreign code while holding it. Locks are taken in this order: ``_lock``, a future's, ``finished``, for which whoever wants a
result waits (`gradwire.futures`). Callbacks of others than ours run in the background's threads, since they may wait for what the pump is to
bring.

Handlers of signals (Ctrl-C) may raise, or call in here, between any two steps of the main thread. So a call is under way
by one `append`, which is the last that can fail; the pump is awake before there is something for it; locks are those of C, and can be taken
again by whoever has them.

A call is *waiting* (it can be cancelled), then *under way*, then done. At the end of worker or connection, calls under way fail,
and those that wait are made the ordinary way (`gradwire.anteroom`), which may start the worker again or says why not. A deadline counts
from when the worker could begin: when the call before was answered. A call that passed it keeps its place, so that its
late answer is known for what it is.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from gradwire.background import Background, behind, giving, is_ours, raising
from gradwire.endings import without_frames
from gradwire.futures import OVER, RUNNING, CallFuture, belongs_to, finish
from gradwire.packets import Packets
from gradwire.pauses import PAUSE_S, Pauses
from gradwire.replies import reply_in
from gradwire.submissions import Coder, Elsewhere, Strange, Submission
from gradwire_wire import sockets
from gradwire_wire.errors import DeadlineError, GradwireError, ProtocolError, UsageError, WorkerDiedError
from gradwire_wire.exchange import Ended
from gradwire_wire.lane import Lane
from gradwire_wire.process import no_thread
from gradwire_wire.sockets import PipelineDealer

if TYPE_CHECKING:
    from gradwire.connection import Connection

__all__ = ["Pipeline"]

WINDOW, LOW = 128, 48
"""Calls under way at most; who waits for room is woken when there are so few, and not for each."""
NBYTES = 16 << 20
"""Bytes of arguments under way at most (one call may have more)."""
LOOK_S = 0.1
"""Seconds between two looks of whoever waits for what may be told elsewhere."""
AT_ONCE = 32
"""Answers that are read before anybody is told of them."""


class Pipeline:
    """Of one connection. Its lane is its own; any thread may submit."""

    def __init__(self, connection: Connection, lane: Lane | PipelineDealer, background: Background) -> None:
        """Takes over the lane."""
        self._connection, self._lane, self._background = connection, lane, background
        self._lock = threading.RLock()
        self._coder = Coder(connection, lane, self._lock)
        self._room, self._work = threading.Condition(self._lock), threading.Condition(self._lock)
        self._finished_lock = threading.RLock()
        self.finished = threading.Condition(self._finished_lock)
        self._under_way: deque[Submission] = deque()
        self._packets = Packets(lane, self._under_way)
        self._waiting: deque[Submission] = deque()
        self._nbytes = 0
        self._blocked = 0
        self._is_idle = self._is_over = False
        self._since = 0.0
        self._pauses = Pauses()
        self._thread: threading.Thread | None = None

    submission = Submission

    @property
    def is_over(self) -> bool:
        """Whether nothing can be submitted here any more."""
        return self._is_over

    def new_future(self) -> CallFuture:
        """A future for a call that is submitted later."""
        return CallFuture(self.finished)

    # -- submitting ------------------------------------------------------------------------------

    def submit(
        self, call: Submission, may_wait: bool, future: Any = None, in_turn: bool = False
    ) -> Future[Any] | None:
        """The call's future; None where it cannot go this way. Waits for room if it may. Raises what refuses the arguments.

        in_turn: whether it comes from the anteroom, behind which all others go.
        MemoryExhaustedError where there is no thread to read the answers.
        """
        call.is_fresh = future is None
        call.future = future or CallFuture(self.finished)
        if self._lock._is_owned() or self._packets.are_sent_here:  # type: ignore[attr-defined]
            return None  # a handler of signals has interrupted just this
        with self._lock:
            has_room = self._has_room(call.nbytes) or self._wait_for_room(call.nbytes, may_wait)
            call.is_late = not in_turn and self._background.anteroom.is_occupied
            if self._is_over or call.is_late:
                return None
            if not has_room and call.again is None:
                return None
            if not has_room:
                call.hold()
                self._waiting.append(call)
                return call.future
            self._wake()
            try:
                self._begin(call)
            except Elsewhere:
                call.is_elsewhere = True
                return None
        self._packets.send_soon(call.nbytes)
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

    def _begin(self, call: Submission) -> None:
        """The call is under way, and cannot be cancelled any more (lock held). Raises as `submit`."""
        if call.is_fresh:
            call.future._state = RUNNING
        elif not call.future.set_running_or_notify_cancel():
            return
        is_first, now, packets = not self._under_way, time.perf_counter(), self._packets
        call.frame = self._coder.frame_of(call, len(self._under_way))
        call.carriers, call.again = [], None
        self._nbytes += call.nbytes
        if is_first:
            self._since = now
        call.number = packets.latest = packets.latest + 1
        self._under_way.append(call)  # nothing that can fail comes after this, nor between it and the frame

    def _wake(self) -> None:
        """The pump is there, and will look what is under way (lock held, and before it is)."""
        if self._is_idle:
            self._work.notify_all()  # not notify(): one that a handler interrupts leaves a waiter behind, which takes the next
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

    # -- the pump ------------------------------------------------------------------------------------

    def _pump(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return
        self._lane.begin()
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
        self._packets.flush()
        return True

    def _read(self) -> None:
        """Answers that have come, or a look around where none does. Raises why there will be none any more."""
        try:
            received: Any = self._lane.receive()
        except sockets.Again:
            self._look_around()
            return
        except sockets.Unreachable:
            self._connection.life.raise_unreachable(was_running=True)
        done: list[tuple[Submission, Any, BaseException | None]] = []
        try:
            while received is not None:
                self._note(received, done)
                del received  # a result must not live on here
                received = self._lane.receive_nowait() if len(done) < AT_ONCE else None
        except sockets.Unreachable:
            pass  # told by the next call of `receive`
        except Ended:
            self._connection.life.raise_unreachable(was_running=True)
        finally:
            self._make_room(done)
            self._complete(done)
            answers = len(done)
            done.clear()
        if self._pauses.is_next(answers, len(self._under_way)):
            time.sleep(PAUSE_S)
            self._pauses.took(len(self._under_way))

    def _note(self, received: Any, done: list[Any]) -> None:
        """One answer: whose it is and what it says."""
        if not self._under_way:
            raise ProtocolError("an answer that nobody asked for")
        frames, reply = ((), None) if type(received) is int else reply_in(received, self._connection.exchange)
        call = self._under_way.popleft()
        now = time.perf_counter()
        try:
            result, error = self._coder.result_of(call, received, reply, frames), None
        except Strange:
            self._under_way.appendleft(call)
            raise ProtocolError("an answer to another call than the next") from None
        except Ended:
            self._under_way.appendleft(call)
            raise
        except BaseException as raised:
            result, error = None, raised
            if isinstance(raised, GradwireError):
                raised.__traceback__ = None  # whose frames hold the call, and so the error itself
        self._connection.calls += 1
        self._connection.waited_s += now - self._since
        self._since = now
        done.append((call, result, error))

    def _make_room(self, done: Sequence[Any]) -> None:
        """So many calls fewer are under way: others begin."""
        with self._lock:
            self._nbytes -= sum([call.nbytes for call, _, _ in done])
            if self._waiting:
                self._refill()
            if self._blocked and not self._waiting and len(self._under_way) <= LOW:
                self._room.notify_all()
        self._packets.flush()

    def _refill(self) -> None:
        """Those that wait begin as far as there is room (lock held)."""
        waiting, self._waiting = self._waiting, deque()
        try:
            while waiting and self._has_room(waiting[0].nbytes):
                self._begin_or_tell(waiting[0])
                waiting.popleft()
        except Elsewhere:  # no packet takes the first of them
            self._divert(waiting)
        finally:
            self._waiting = waiting

    def _begin_or_tell(self, call: Submission) -> None:
        """Raises `Elsewhere`."""
        try:
            self._begin(call)
        except Elsewhere:
            raise
        except BaseException as error:
            self._background.start(call.future, raising(error))

    def divert(self) -> None:
        """What waits goes another way, for nothing is to begin here just now."""
        with self._lock:
            self._divert(self._waiting)

    def _divert(self, waiting: deque[Submission]) -> None:
        """Those that wait are made the ordinary way, after what is under way (lock held)."""
        for call in waiting:
            assert call.again is not None, "it was under way"
            self._background.start_in_order(call.future, behind(self.drain, call.again))
        waiting.clear()

    def _complete(self, done: Sequence[tuple[Submission, Any, BaseException | None]]) -> None:
        """Tell the futures, and then their callbacks."""
        for call, result, error in done:
            if not call.is_abandoned and belongs_to(call.future, self.finished):
                finish(call.future, result, error)
        with self._finished_lock:
            self.finished.notify_all()
        for call, result, error in done:
            if call.is_abandoned:  # and told why
                continue
            if error is not None:
                self._note_error(call, error)
            if not belongs_to(call.future, self.finished):  # made before the worker was restarted
                self._background.start(call.future, giving(result) if error is None else raising(error))
            elif call.future._done_callbacks:
                self._call_back(call.future)

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
        self._packets.flush()
        self._connection.life.look_around(None)
        call = next((c for c in self._under_way if not c.is_abandoned), None)
        if call is None or call.site.timeout_s is None:
            return
        try:
            self._connection.life.look_around(self._since + call.site.timeout_s)
        except DeadlineError as error:
            self._connection.ours.cancel(call.call_id)
            self._connection.life.interrupt()
            self._complete([(call, None, error)])
            call.is_abandoned = True
            self._since = time.perf_counter()

    def _end(self, error: BaseException | None) -> None:
        """No answer will come any more, for that reason (None: nothing is under way)."""
        with self._lock:
            under_way = list(self._under_way)
            self._under_way.clear()
            self.give_back()
        if error is not None:
            self._complete([(call, None, _twin_of(error)) for call in under_way])

    def give_back(self) -> None:
        """It is over: those that wait are made the ordinary way, before what is submitted from now on."""
        with self._lock:
            self._is_over = True
            for call in self._waiting:
                assert call.again is not None, "it was under way"
                self._background.start_in_order(call.future, call.again)
            self._waiting.clear()
            self._room.notify_all()

    def drain(self) -> None:
        """Wait until what has been submitted so far is done."""
        self.check_may_wait()
        with self._lock:
            latest = [*self._waiting][-1:] or [*self._under_way][-1:]
        if latest and threading.current_thread() is not self._thread:
            future = latest[0].future  # perhaps of a former connection, with another condition
            with self._finished_lock:
                while future._state not in OVER:
                    if self._is_over and self._background.anteroom.is_served_here:
                        return  # it was given back, and would be made after the one that waits for it here
                    self.finished.wait(LOOK_S)

    def check_may_wait(self) -> None:
        """UsageError for a handler of signals that has interrupted just this."""
        if self._lock._is_owned() or self._packets.are_sent_here:  # type: ignore[attr-defined]
            raise UsageError(
                "a handler of signals has interrupted submit(), and what it asks for waits for what was submitted: do it after that"
            )

    def close(self) -> None:
        """The connection is closed: what is under way is told so, by the pump; the worker need not begin with it."""
        with self._lock:
            self.give_back()
            for call in self._under_way:
                self._connection.ours.cancel(call.call_id)
            if self._thread is None:
                self._lane.close()
            self._work.notify_all()


def _twin_of(error: BaseException) -> BaseException:
    """One like it, for another call that fails for the same reason."""
    return without_frames(error) if isinstance(error, GradwireError) else error


def _in_event_loop() -> bool:
    """Whether this thread runs an event loop, which must not wait."""
    events = sys.modules.get("asyncio.events")
    return events is not None and events._get_running_loop() is not None
