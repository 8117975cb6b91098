"""Whether the worker at the other end of a connection can be called, as far as this process knows; and what is raised where not.

An incarnation is there until it is *closed* by this program, *replaced* by another incarnation, or *gone*: its tether ended, or
the broker says that its process did. Whoever waits for an answer looks here a few times a second, and need not ask anybody.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from gradwire import exits
from gradwire.broker_link import BrokerLink
from gradwire.endings import died, has_lied, out_of_reach, vanished, was_closed, was_restarted
from gradwire.worker_records import WorkerFacts
from gradwire_wire.chain import check_not_in_chain, serving
from gradwire_wire.errors import (
    ConnectError,
    DeadlineError,
    ForkedError,
    GradwireError,
    MemoryExhaustedError,
    ProtocolError,
)
from gradwire_wire.exchange import Exchange
from gradwire_wire.tether import Tether, TetherClosedError

__all__ = ["Life", "TetherWatch"]

REPORT_S = 1.5
SHORT_S = 0.02  # while descriptors are short the tether is looked at at this pace

_forks = 0
"""Which generation of forked processes this is: a look at it costs less than asking the system for the process's id."""


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)


class Life:
    """Of one incarnation. Any thread may look.

    gone: set once its process has ended, or broke the rules (``broken`` says how).

    Set by the `Worker`: ``advise``: what to do about an end by that exit code, for messages; ``revives``: whether the
    worker is started again by itself; ``follows_death``: whether this incarnation was; ``is_counted``: whether its end was;
    ``is_replaced``: whether another incarnation takes over: whoever waits here is told that rather than of an end;
    ``state_discarded``: whether the program has said that it knows what was lost before this incarnation.
    """

    def __init__(self, link: BrokerLink, facts: WorkerFacts) -> None:
        self.facts, self._link = facts, link
        self.advise: Callable[[int | None], str] = lambda exit_code: "worker.restart() starts it again"
        self.revives = self.follows_death = self.is_counted = self.is_replaced = False
        self.state_discarded = False
        self.is_closed = False
        self.gone = threading.Event()
        self.broken: str | None = None
        self._pid, self._forks = os.getpid(), _forks

    @property
    def is_there(self) -> bool:
        """Whether the worker process was there, and was ours to call, when it was last heard of."""
        return not (self.is_closed or self.is_replaced or self.gone.is_set())

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a forked child of the one that has the connection."""
        return self._pid != os.getpid()

    def check_usable(self) -> list[bytes]:
        """Raises why no call can be made now. Returns the chain that a call made now belongs to (`gradwire_wire.chain`)."""
        if self.is_closed or self.is_replaced or self.gone.is_set() or self._forks != _forks:
            self._raise_unusable()
        chain = serving()
        if chain:
            check_not_in_chain(self.facts.incarnation, self.facts.name, chain)
        return chain

    def _raise_unusable(self) -> NoReturn:
        if self._forks != _forks:
            raise ForkedError(
                "this proxy belongs to the parent process; a forked child opens a bridge of its own with gradwire.connect()"
            )
        if self.is_closed or self.is_replaced:
            self.raise_closed(was_running=False)
        self._raise_dead(was_running=False)

    def look_around(self, deadline: float | None) -> None:
        """No reply yet: is there still somebody to wait for? deadline: of ``time.perf_counter()``."""
        if self.is_closed:  # first: then the worker ends as well, and that is no news
            self.raise_closed(was_running=True)
        if self.gone.is_set():
            self._raise_dead(was_running=True)
        if deadline is not None and time.perf_counter() > deadline:
            raise DeadlineError(
                f"worker {self.facts.name!r} did not answer in time; it was sent an interrupt. Code that loops in C, or has "
                "blocked signals, does not see it: worker.restart() ends it. Give more time with .options(timeout=...)"
            )

    def raise_unreachable(self, was_running: bool = False) -> NoReturn:
        """A line is broken: because the worker is gone or this end was closed, as will be known at once."""
        if not (self.is_replaced or self.is_closed):
            self.gone.wait(REPORT_S)
        if self.is_replaced or self.is_closed:
            self.raise_closed(was_running)
        self._raise_dead(was_running)

    def raise_doorless(self, why: str) -> NoReturn:
        """No further line to it can be opened, for its socket is not there: because it is gone, as will be known at once, or removed."""
        self.gone.wait(REPORT_S)
        if not self.is_there:
            self.raise_unreachable()
        raise ConnectError(
            f"no further line to worker {self.facts.name!r} can be opened: {why}. Did something clean up there? Calls that need none go on. "
            "Start this program again, or gradwire up, with XDG_RUNTIME_DIR set to a folder that stays"
        )

    def raise_closed(self, was_running: bool) -> NoReturn:
        """By this program, or for another incarnation."""
        end = was_restarted if self.is_replaced else was_closed
        raise end(self.facts.name, was_running) from None  # how the line broke says no more

    def _raise_dead(self, was_running: bool) -> NoReturn:
        if self.is_replaced or exits.is_leaving():
            self.raise_closed(was_running)
        if self.broken is not None:
            raise has_lied(self.facts.name, self.broken) from None
        death = self._link.death_of(self.facts.incarnation, REPORT_S)
        lives = self._link.broker_alive
        if death is None and lives:
            raise vanished(self.facts, self.advise(None), was_running) from None
        if death is None:
            gone = self._link.broker_gone("nobody tells what becomes of it")
            raise out_of_reach(self.facts, gone, was_running) from None
        advice = self.advise(death.exit_code) if lives else "its broker has ended as well: connect anew"
        raise died(self.facts, death, advice, was_running) from None

    def interrupt(self) -> None:
        """Have the broker interrupt the worker: what runs there ends if the ledger says that it was cancelled."""
        self._link.interrupt(self.facts.incarnation)


class TetherWatch:
    """The tether, from the handshake to the end: it announces segments, and tells of the worker's end (as the broker does)."""

    def __init__(self, tether: Tether, exchange: Exchange, link: BrokerLink, life: Life) -> None:
        """In the link's thread from now on."""
        self._tether, self._exchange, self._link, self._life = tether, exchange, link, life
        self._fd, self._is_over = tether.fileno(), False
        link.watch(self._fd, self._on_tether)
        link.tell_of_death(life.facts.incarnation, self._on_death)

    def _on_tether(self) -> None:
        """Segments have been announced, or the worker is gone."""
        try:
            self._exchange.receive_segments()
        except MemoryExhaustedError:  # no descriptor left: it stays to be read, by whoever needs it
            time.sleep(SHORT_S)
            if self._link.death_of(self._life.facts.incarnation) is not None:
                self._life.gone.set()
        except (TetherClosedError, GradwireError, OSError) as error:
            self._life.broken = str(error) if isinstance(error, ProtocolError) else None
            self._link.unwatch(self._fd)
            self._life.gone.set()

    def _on_death(self) -> None:
        """The broker says that the worker has ended; a child that it had forked may hold the tether."""
        if not self._is_over:  # else the descriptor is perhaps another connection's by now
            with contextlib.suppress(TetherClosedError, GradwireError, OSError):
                self._exchange.receive_segments()  # which its last answers may name
            self._link.unwatch(self._fd)
        self._life.gone.set()

    def stop(self) -> None:
        """Look no more."""
        self._is_over = True
        if not self._life.gone.is_set():
            self._link.unwatch(self._fd)

    def let_go(self) -> None:
        """After `stop`: views of the worker's memory stay valid."""
        if self._life.gone.is_set():
            self._tether.close()
            self._exchange.end()
        else:
            self._exchange.leave()
            del self._tether  # closes when the last view of the worker's memory is gone
