"""What the link's thread has learned from the broker, and waiting for it: answers, deaths, the broker's own end.

One condition guards all of it. The thread tells (`learn`, `note_broker_ended`) and never waits; other threads wait,
each with a limit, and all of them wake when there is news.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from gradwire.worker_records import Death
from gradwire_wire import control
from gradwire_wire.errors import ConnectError, class_named

__all__ = ["BrokerNews", "Request"]

DEATHS_KEPT = 1024


class Request:
    """One that is under way: its number, how far it has come, and its answer once that is there."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.doing = ""
        self.presents: list[control.Present] = []
        self.answer: Any = None


class BrokerNews:
    """``ending``, ``revival``: what it is that ended when the broker is gone, and what to do then, for messages. Methods may be called from any thread."""

    def __init__(self, ending: str, revival: str) -> None:
        self._ending, self._revival = ending, revival
        self._changed = threading.Condition()
        self._attached = False
        self._refusal: control.Refused | None = None
        self._numbers = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._living: dict[bytes, control.Started | control.Present] = {}
        self._deaths: dict[bytes, Death] = {}
        self._to_tell: dict[bytes, weakref.WeakMethod[Callable[[], None]]] = {}
        self._last_words = ""
        self.broker_alive = True

    # ---- Waiting ----

    def wait_attached(self, timeout_s: float) -> bool:
        """Whether the broker took this program in; ConnectError, or what it named, where it refused."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._attached or self._refusal or not self.broker_alive, timeout_s
            )
            refusal = None if self._attached else self._refusal
        if refusal is not None:
            raise class_named(refusal.kind, ConnectError)(refusal.message)
        return self._attached

    @contextlib.contextmanager
    def request(self) -> Iterator[Request]:
        """A request with a number of its own; what is answered to it is taken in until the block ends."""
        request = Request(next(self._numbers))
        self._requests[request.number] = request
        try:
            yield request
        finally:
            with self._changed:
                del self._requests[request.number]

    def wait_answer(self, request: Request, timeout_s: float) -> Any:
        """Its answer; None where the time or the broker ended before it."""
        with self._changed:
            self._changed.wait_for(lambda: request.answer is not None or not self.broker_alive, timeout_s)
            return request.answer

    def wait_death(self, incarnation: bytes, timeout_s: float) -> Death | None:
        """How that worker ended, or None where nothing is known of it by then."""
        with self._changed:
            self._changed.wait_for(lambda: incarnation in self._deaths or not self.broker_alive, timeout_s)
            return self._deaths.get(incarnation)

    def wait_broker_ended(self, timeout_s: float) -> bool:
        """Whether the broker is gone by then."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.broker_alive, timeout_s)

    def broker_gone(self, consequence: str) -> str:
        """The sentence for an error that comes of it."""
        words = f". Its last words:\n{self._last_words}" if self._last_words else ""
        return f"{self._ending}, so {consequence}; {self._revival}{words}"

    # ---- Telling ----

    def note_living(self, present: control.Present) -> None:
        """That worker's death is news from now on."""
        with self._changed:
            if present.incarnation not in self._deaths:
                self._living[present.incarnation] = present

    def tell_of_death(self, incarnation: bytes, act: Callable[[], None]) -> None:
        """Have this method of somebody's called when that worker's end is known, as long as there is the somebody.

        In the link's thread: here, where it is known already, or by what learns of it.
        """
        with self._changed:
            self._to_tell[incarnation] = weakref.WeakMethod(act)
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            known = self._deaths if self.broker_alive else self._to_tell
            due = [
                self._to_tell.pop(incarnation) for incarnation in list(self._to_tell) if incarnation in known
            ]
        for act in (found() for found in due):
            if act is not None:
                act()

    def learn(self, message: Any) -> None:
        """Take in what the broker said (anything but output)."""
        with self._changed:
            self._take(message)
            self._changed.notify_all()
        if isinstance(message, control.Died):
            self._tell()

    def _take(self, message: Any) -> None:
        if isinstance(message, control.Attached):
            self._attached = True
        elif isinstance(message, control.Refused):
            self._refusal = message
        elif isinstance(message, control.Died):
            self._living.pop(message.incarnation, None)
            self._record(message.incarnation, Death(*message[1:]))
        elif isinstance(message, control.HasThreads):
            if message.incarnation in self._living:
                # the same dict as in the `WorkerFacts` that were given out
                self._living[message.incarnation].info["threads"] = message.threads
        elif (request := self._requests.get(getattr(message, "request", -1))) is not None:
            self._take_answer(request, message)

    def _take_answer(self, request: Request, message: Any) -> None:
        if isinstance(message, control.Present):
            request.presents.append(message)
        elif isinstance(message, control.Starting):
            request.doing = message.doing
        else:
            request.answer = message
            if isinstance(message, control.Started):
                self._living[message.incarnation] = message

    def _record(self, incarnation: bytes, death: Death) -> None:
        self._deaths[incarnation] = death
        while len(self._deaths) > DEATHS_KEPT:
            del self._deaths[next(iter(self._deaths))]

    def note_broker_ended(self, last_words: str) -> list[bytes]:
        """The broker is gone, and its workers with it: returns the incarnations of those that were alive."""
        words = f"(the broker ended, and its workers with it; {self._revival})"
        with self._changed:
            orphaned = list(self._living)
            for incarnation in orphaned:
                self._record(incarnation, Death(None, "SIGKILL", words, ""))
            self._living.clear()
        self.note_broker_lost(last_words)
        return orphaned

    def note_broker_lost(self, last_words: str) -> None:
        """There is no news of it any more, nor of its workers, which may live."""
        with self._changed:
            self._last_words, self.broker_alive = last_words, False
            self._changed.notify_all()
        self._tell()

    def note_link_ended(self) -> None:
        """There will be no more news: nobody is to wait for any."""
        with self._changed:
            self.broker_alive = False
            self._changed.notify_all()
