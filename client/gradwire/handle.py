"""A loaded target, seen from the client: the one way from every caller's face to the worker."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradwire import answers
from gradwire.caches import Cached
from gradwire.connection import Connection
from gradwire.site import Outcome, Site, SpecResult
from gradwire.stakes import Stake, Stakes
from gradwire_wire import messages
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.errors import GradwireError, ProtocolError, ResidualLostError, UsageError, WorkerDiedError
from gradwire_wire.interruption import postponed, raise_postponed
from gradwire_wire.structures import flatten
from gradwire_wire.words import Op, Word, linear_count

if TYPE_CHECKING:
    from gradwire.background import Background
    from gradwire.notes import Invocation
    from gradwire.optimizer import Optimizer
    from gradwire.pipeline import Pipeline
    from gradwire.steps import Steps
    from gradwire.submissions import Submission

__all__ = ["Handle"]

_MOVING = frozenset({"step", "load_state_dict", "load"})
"""Verbs after which a forward gives something else."""
_LOADING = frozenset({"load_state_dict", "load"})
"""Verbs that give a module a state, whatever became of the one it had."""


class Handle(Cached):
    """Shared by all proxies of one target. After the worker was restarted, the target is loaded again; it is let go of there when the last
    proxy is gone, and whatever else can name it (a pullback, a compiled program).

    connect: gives the connection to the worker's present incarnation.
    load: the arguments of `messages.Load` after the call id, and the factory's tensors.
    link: of the bridge; whoever records the bridge's calls is found there.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        kind: str,
        target: str,
        structure: bytes,
        carriers: Sequence[Carrier],
    ) -> None:
        self._connect, self._kind, self._target = connect, kind, target
        self._structure = structure
        self._carriers = [Carrier(c.array.copy(order="K"), c.dtype) for c in carriers]
        self._lock = threading.RLock()  # a handler of signals must not wait for what it has interrupted
        self._loaded: Connection | None = None
        self._remote = 0
        self._dropping: weakref.finalize[[int], Handle] | None = None
        self._specs: dict[tuple[Site, tuple[Aval, ...]], SpecResult] = {}
        self.is_module = self.accumulates = self._may_have_rules = self.moves_in_evaluation = False
        self.training: bool | None = None
        self.changes = 0  # how often what a forward gives may have changed: by a step, a load, a new life, a training call
        self.stakes = Stakes()
        self.has_warned = False  # of regularizers
        self.asked: set[str] = set()  # occasions on which the worker was asked for them
        self._freezing: list[bytes] = []  # what `requires_grad` was told, for the next life
        self.link = self._ready().link

    @property
    def name(self) -> str:
        """For messages: worker and target."""
        worker = self._loaded.facts.name if self._loaded is not None else "?"
        return f"{worker}/{self._target}"

    @property
    def framework(self) -> str | None:
        """The worker's."""
        return None if self._loaded is None else self._loaded.facts.info.get("framework")

    def __repr__(self) -> str:
        return f"<remote {self.name}>"

    @property
    def is_dead(self) -> bool:
        """Whether the process in which the target was loaded last has ended by itself. (The next call may start it again.)"""
        life = None if self._loaded is None else self._loaded.life
        return life is not None and not (life.is_there or life.is_replaced)

    def _ready(self) -> Connection:
        """The connection, with the target loaded in the worker at its other end. Raises once where state was lost."""
        if postponed:
            raise_postponed()
        connection = self._connect()
        if connection is self._loaded and not self.stakes.is_lost:
            return connection
        connection = self._there()
        if self.stakes.is_lost:
            self.stakes.settle()
            raise self._loss(connection)
        return connection

    def _there(self) -> Connection:
        """The same without a word about what was lost."""
        connection = self._connect()
        if connection is self._loaded:
            return connection
        with self._lock:
            if connection is not self._loaded:
                self._load(connection)
                self.changes += 1
        return connection

    @property
    def revives(self) -> bool:
        """Whether the worker is started again by itself when it died."""
        return self._loaded is not None and self._loaded.life.revives

    def _loss(self, connection: Connection) -> WorkerDiedError:
        """State went with a process, and no call of ours has met that: going on as if it were there would be silently wrong."""
        how = "died between calls and was started again" if connection.life.follows_death else "was restarted"
        return WorkerDiedError(
            f"worker {connection.facts.name!r} {how}: {self._target} is as new from its factory, and what it had learned, "
            "counted or loaded there is lost (BatchNorm's statistics as well). Load a state that you saved with "
            "load_state_dict() or load(), or go on with the new one: the next call does. worker.restart(discard_state=True) "
            "says beforehand that you know",
            was_running=False,
        )

    def _load(self, connection: Connection) -> None:
        connection.tell_of_dropped()  # there may be no room for another
        reply, _ = connection.request(
            lambda call_id, headers: messages.Load(
                call_id, self._kind, self._target, self._structure, headers
            ),
            self._carriers,
            None,
        )
        facts = answers.loaded(reply.structure)
        self._note_number(connection, facts.remote)
        self.is_module, self.accumulates = facts.is_module, facts.is_module and facts.may_have_parameters
        self._may_have_rules, self.moves_in_evaluation = facts.may_have_rules, facts.moves_in_evaluation
        self._resume_mode(connection, facts.training)
        self._resume_freezing(connection)
        if self.stakes.stake == Stake.BUFFERS and self._has_no_buffers(connection):
            self.stakes.stake = Stake.NOTHING
        self.stakes.begin(connection.life.state_discarded)
        self._specs.clear()
        self._loaded = connection

    def _note_number(self, connection: Connection, number: int) -> None:
        """The target has that number in the worker, and goes there when this object does."""
        if self._dropping is not None:
            self._dropping()  # another process's, or of a load that was interrupted
        self._remote = number
        self._dropping = weakref.finalize(self, connection.dropped_remotes.append, number)
        self._dropping.atexit = False

    def drop_with(self, optimizer: Optimizer, number: int) -> None:
        """That optimizer goes in the worker when its proxy does."""
        if self._loaded is not None:
            weakref.finalize(optimizer, self._loaded.dropped_optimizers.append, number).atexit = False

    def _resume_mode(self, connection: Connection, training: bool | None) -> None:
        """A module that is loaded again gets the mode that its proxies know it to be in."""
        wanted, self.training = self.training, training
        if training is None or wanted is None or wanted == training:
            return
        self._ask(connection, "train", flatten([[wanted], {}], lambda x: False)[0])
        self.training = wanted

    def _resume_freezing(self, connection: Connection) -> None:
        """The same for parameters that `Remote.requires_grad_` has frozen."""
        try:
            for structure in self._freezing:
                self._ask(connection, "requires_grad", structure)
        except UsageError:  # a module that has its parameters only after its first call
            self._freezing.clear()
            self.stakes.raise_to(Stake.ALL)

    def _has_no_buffers(self, connection: Connection) -> bool:
        """Whether forwards of this module have nothing to move (one without parameters may have made nothing yet)."""
        nothing = flatten([[], {}], lambda x: False)[0]
        counts = [len(self._ask(connection, verb, nothing)[1]) for verb in ("buffers", "parameters")]
        return counts[0] == 0 and counts[1] > 0

    def invoke(
        self,
        site: Site,
        word: Word,
        carriers: Sequence[Carrier],
        *,
        keep: int = 0,
        token: int | np.ndarray = 0,
        token_ops: int = 0,
    ) -> Outcome:
        """Evaluate the derived function ``word`` in the worker; blocks without holding the GIL.

        keep: 0, `messages.KEEP` or `messages.KEEP_ROWS`. token: of a kept forward (int), or rows
        (batch, 2) of (token, row). Any thread. Raises what the worker reports, or why it cannot.
        """
        stake, recorder = self.stakes.stake, self.link.recorder
        noted = None if recorder is None else recorder.invocation(self.name)
        try:
            return self._invoke(site, word, carriers, keep, token, token_ops, noted)
        except WorkerDiedError as error:
            if not self._outlives(error, stake, site.retry):
                raise
        return self._invoke(site, word, carriers, keep, token, token_ops, noted)

    def minimize(self, site: Site, op: Op, carriers: Sequence[Carrier]) -> Outcome:
        """A step of an optimizer, and the loss that it was made by: see `gradwire_wire.words`."""
        self._note_step()
        return self.invoke(site, (op,), carriers)

    def _note_step(self) -> None:
        self._ready()  # or a loss would be told of that was none: nothing has moved yet
        self.stakes.raise_to(Stake.ALL)
        self._count_change()

    def submitted_steps(self) -> Steps:
        """Those of this target's worker. Raises what keeps a step from being made."""
        return self._ready().submitted_steps()

    def bring_back(self) -> None:
        """Have the target there for a call that is made next. Raises what that call would."""
        stake = self.stakes.stake
        try:
            self._ready()
        except WorkerDiedError as error:
            if not self._outlives(error, stake, False):
                raise
            self._ready()

    def _outlives(self, error: WorkerDiedError, stake: Stake, retry: bool) -> bool:
        """Whether the call that met this death is made to the next process."""
        goes_on = retry or (not error.was_running and self._goes_on(stake))
        if stake == Stake.NOTHING or not goes_on:  # else nobody has heard of a loss yet: `_ready` tells
            self.note_death()
        return goes_on

    def _goes_on(self, stake: Stake) -> bool:
        """Whether a call that was never sent is made to the next process: `_ready` tells of state that was lost by then."""
        was_replaced = self._loaded is not None and self._loaded.life.is_replaced
        return was_replaced or (self.revives and stake == Stake.NOTHING)

    def _invoke(
        self,
        site: Site,
        word: Word,
        carriers: Sequence[Carrier],
        keep: int,
        token: Any,
        token_ops: int,
        noted: Invocation | None,
    ) -> Outcome:
        is_plain = type(token) is int and not token
        # (a token of a former life tells of its own loss)
        connection = self._ready() if is_plain else self._there()
        if self._may_move(site.training):
            self._note_stake(site, is_plain)
        if is_plain:
            return connection.evaluate(self._remote, site, word, carriers, keep, 0, token_ops, noted)
        rows = token.tolist() if isinstance(token, np.ndarray) else token
        if rows and len(word) == token_ops + 1 and not isinstance(rows, list):
            linear = linear_count(word)
            brief: list[Carrier | None] = [None] * (len(carriers) - linear) + list(
                carriers[len(carriers) - linear :]
            )
            try:
                return connection.evaluate(self._remote, site, word, brief, keep, rows, token_ops, noted)
            except ResidualLostError as error:
                if not getattr(error, "recompute", False):
                    raise
        return connection.evaluate(self._remote, site, word, list(carriers), keep, rows, token_ops, noted)

    def _may_move(self, training: bool | None) -> bool:
        """Whether a call in this mode may move state in the worker: a module without modes may have any."""
        return self.is_module and (training is not False or self.moves_in_evaluation)

    def _note_stake(self, site: Site, is_plain: bool) -> None:
        stake = self._stake_of_call(site)
        self.stakes.raise_to(stake)
        if is_plain and (site.training or self.moves_in_evaluation) and stake:
            self._count_change()

    @property
    def why_it_moves(self) -> str:
        """Why a call moves state, for messages."""
        return "is in training mode" if self.training else "carries state from call to call"

    def _count_change(self) -> None:
        self.changes += 1

    def _stake_of_call(self, site: Site) -> Stake:
        """How much a call that may move something moves."""
        return Stake.ALL if site.training is None else Stake.BUFFERS

    @property
    def is_there(self) -> bool:
        """Whether a call made now finds the target loaded, as far as is known, and has nothing to be told of what was lost."""
        connection = self._loaded
        return connection is not None and connection.life.is_there and not self.stakes.is_lost

    @property
    def keeps_order(self) -> bool:
        """See `Connection.keeps_order`."""
        return self._loaded is not None and self._loaded.keeps_order

    def pipeline(self, background: Background) -> Pipeline | None:
        """What calls of this target are submitted by; None where they are made the ordinary way. Never waits for a worker.

        Raises what any call would, were it made now.
        """
        return self._loaded.pipeline(background) if self._loaded is not None and self.is_there else None

    def pipeline_or_none(self, background: Background) -> Pipeline | None:
        """As `pipeline`; None, too, where a call now would raise."""
        try:
            return self.pipeline(background)
        except GradwireError:
            return None

    def submission(
        self,
        pipeline: Pipeline,
        site: Site,
        carriers: list[Carrier],
        adopt: Callable[[Carrier], Any],
        again: Callable[[], Any],
    ) -> Submission:
        """A call for the pipeline. See `gradwire.submissions.Submission`."""
        if self._may_move(site.training):
            self._note_stake(site, True)
        return pipeline.submission(self, self._remote, site, carriers, adopt, again)

    def step_submission(self, pipeline: Pipeline, step: Any, optimizer: Optimizer) -> Submission:
        """A step for the pipeline, as `gradwire.minimizing` has it. The optimizer stays in the worker until it is made."""
        self._note_step()
        made = pipeline.submission(self, self._remote, step.site, step.carriers, step.adopt, None, (step.op,))
        made.holds, made.may_gather = optimizer, step.site.timeout_s is None
        return made

    def note_death(self) -> None:
        """A call of this target has met its worker's death."""
        if self._loaded is not None and not self._loaded.life.is_there:
            self.stakes.note_death()

    def give_back(self) -> None:
        """The worker is gone: what waits to go to it goes to the anteroom, before anything else does."""
        if self._loaded is not None and not self._loaded.life.is_there:
            self._loaded.give_back()

    def drain(self) -> None:
        """Wait until what was submitted to this target's worker before is done."""
        if self._loaded is not None:
            self._loaded.drain()

    def spec(self, site: Site, avals: tuple[Aval, ...]) -> SpecResult:
        """Shapes, dtypes and tree of the results, without a real run. Cached by site and avals."""
        if site.out_spec is not None:
            return site.out_spec._replace(has_rules=self._may_have_rules)
        connection = self._ready()
        known = self._specs.get((site, avals))
        if known is not None:
            return known
        asked = [[list(a.shape), list(a.dtype)] for a in avals]
        reply, _ = connection.request(
            lambda call_id, _: messages.Spec(
                call_id, self._remote, site.structure, site.training, site.flags, asked
            ),
            [],
            site.timeout_s,
        )
        result = self._specs[site, avals] = answers.spec_result(reply.structure)
        return result

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """`Bridge.empty`, of this remote's bridge."""
        return self._ready().exchange.empty(shape, dtype)

    def release(self, token: int) -> None:
        """This token will not be named again. Safe in finalizers and any thread; told with the next message."""
        connection = self._loaded
        if connection is not None and token:
            connection.released.append(token)

    def change_state(
        self, verb: str, structure: bytes, carriers: Sequence[Carrier], timeout_s: float | None = None
    ) -> tuple[bytes, list[Carrier]]:
        """Ask for a verb about the module's state; returns a tree and its leaves."""
        connection = self._there() if verb in _LOADING else self._ready()
        if verb in _MOVING:
            self.stakes.raise_to(Stake.ALL)
            self.changes += 1
        found = self._ask(connection, verb, structure, carriers, timeout_s)
        if verb in _LOADING:
            self.stakes.settle()
        if verb == "requires_grad":
            self._freezing = [*[done for done in self._freezing if done != structure], structure]
        return found

    def _ask(
        self,
        connection: Connection,
        verb: str,
        structure: bytes,
        carriers: Sequence[Carrier] = (),
        timeout_s: float | None = None,
    ) -> tuple[bytes, list[Carrier]]:
        reply, frames = connection.request(
            lambda call_id, headers: messages.State(call_id, self._remote, verb, structure, headers),
            carriers,
            timeout_s,
        )
        leaves = [c for c in connection.borrow_all(reply.headers, frames) if c is not None]
        if len(leaves) != len(reply.headers):
            raise ProtocolError(f"{verb}: a leaf is missing from the reply")
        return reply.structure, leaves
