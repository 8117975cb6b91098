"""A desk in a process of its own, and clients that break every rule: it refuses, returns what it was lent, and lives."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from gradwire_wire import messages, plans, sockets
from gradwire_wire.batches import batch_of
from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import dtype_named
from gradwire_wire.exchange import Exchange, Memory, close_all
from gradwire_wire.lane import TooLong, lane_pair
from gradwire_wire.messages import (
    Call,
    Done,
    Failed,
    Forget,
    Hello,
    Load,
    Refused,
    Release,
    Segment,
    Spec,
    State,
    Welcome,
)
from gradwire_wire.page import can_page, page_lane_pair, received_page_lane
from gradwire_wire.segments import Ledger
from gradwire_wire.structures import fill, flatten, positional
from gradwire_wire.tether import Tether, TetherClosedError, connect_tether
from gradwire_workers.desk import MOST_RAISED, Desk
from gradwire_workers.held import MOST, Held
from gradwire_workers.turns import Turns

TOKEN, INCARNATION = b"t" * 16, b"i" * 16
N = 100_000

SERVE = """
import os, sys
import numpy as np
import gradwire_workers.numpy as engine
from gradwire_workers.desk import MOST_RAISED, Desk
folder = sys.argv[1]
sys.path.insert(0, folder)
desk = Desk(name="w", incarnation=b"i" * 16, token=b"t" * 16, endpoint=f"ipc://{folder}/z", tether_path=f"{folder}/t",
            engine=engine)
print("ready", flush=True)
desk.serve(0, lambda: False)
"""
TARGETS = """
import os, sys, time
import numpy as np
kept = []
def double(x): return x * 2
def total(*xs): return [float(x.sum(dtype="f8")) for x in xs]
def keep(x): kept.append(x); return len(kept)
given = []
def give(x): given.append(1); return x
def how_many(): return len(given)
noted = []
def note(x): noted.append(float(x[0])); time.sleep(0.001); return x
def all_noted(): return noted
def sums(): return [float(x.sum(dtype="f8")) for x in kept]
def identity(x): return x
def scribble(x): x[...] = -1; return x
def fail(*xs): raise ValueError("bad 42")
def text(n): return "x" * n
def wait(x):
    open(f"{sys.argv[1]}/begun{x[0]:.0f}", "w").close()
    while x[0] < 0 and not os.path.exists(f"{sys.argv[1]}/{x[0]:.0f}"): time.sleep(0.001)
    return x
wait_too = lambda x: wait(x)
def surrogate(): return "\\ud800"
class Module:
    def __call__(self, x): return x
def module(*xs): return Module()
"""


class Client:
    """Speaks the protocol with its own hands."""

    numbers = itertools.count(1)

    def __init__(self, folder: Path, greet: bool = True) -> None:
        self.folder, self.memory = folder, Memory()
        self.id = b"c" + os.urandom(15)
        self.tether = connect_tether(str(folder / "t"), 60)
        self.dealer = sockets.connect_dealer(f"ipc://{folder}/z", self.id + b"0001", 60_000)
        if greet:
            self.ours = Ledger()
            self.tether.send(Hello(1, TOKEN, self.id, os.getpid()), self.ours.descriptors)
            self.ours.close()
            answer, descriptors = self.tether.receive(60) or (None, [])
            assert type(answer) is Welcome and answer.incarnation == INCARNATION
            self.exchange = Exchange(self.memory, self.tether, Ledger.received(descriptors), self.ours)

    def lend(self, *arrays: np.ndarray) -> tuple[list[Any], list[Any]]:
        frames: list[Any] = []
        carriers = [Carrier(a, dtype_named(a.dtype.name)) for a in arrays]  # type: ignore[arg-type]
        return self.exchange.lend(carriers, frames), frames

    def ask(self, message: Any, frames: Any = ()) -> tuple[Any, list[Any]]:
        """The answer and its tensors."""
        sockets.send_nowait(self.dealer, [messages.pack(message), *frames])
        reply, *rest = sockets.receive(self.dealer)
        answer = messages.unpack(reply)
        if type(answer) is Failed:
            return answer, []
        return answer, [c and c.array for c in self.exchange.borrow_all(answer.headers, rest)]

    def load(self, name: str, kind: str = "function", *arrays: np.ndarray) -> int:
        headers, frames = self.lend(*arrays)
        answer, _ = self.ask(
            Load(next(self.numbers), kind, f"gwt_targets:{name}", positional(len(arrays)), headers), frames
        )
        assert type(answer) is Done, answer
        return fill(answer.structure, [])["remote"]

    def call(self, remote: int, *arrays: np.ndarray, **changes: Any) -> tuple[Any, list[Any]]:
        headers, frames = self.lend(*arrays)
        plain = Call(
            next(self.numbers), remote, positional(len(arrays)), [], 0, 0, 0, None, 0, None, headers, [], []
        )
        return self.ask(plain._replace(**changes), frames)

    def loans(self) -> int:
        gc.collect(0)
        with self.memory.lock:
            self.exchange.settle()
        return len(self.exchange.loans)

    def close(self) -> None:
        self.dealer.close()
        self.tether.close()
        if hasattr(self, "exchange"):
            self.exchange.end()
        self.memory.close()


@contextlib.contextmanager
def desk() -> Iterator[Path]:
    """A desk of its own, and the folder where it listens. Its process must still be there at the end."""
    path = Path(tempfile.mkdtemp(prefix="gwt-", dir="/tmp"))
    (path / "gwt_targets.py").write_text(TARGETS)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin and process.stdout and process.stdout.readline() == b"ready\n"
    yield path
    assert process.poll() is None, "the worker died"
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where a desk listens."""
    with desk() as path:
        yield path


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    made = Client(folder)
    yield made
    remote = made.load("double")
    assert made.call(remote, full(1))[1][0].sum() == 2 * N, "it is still usable"
    assert made.loans() <= 1
    made.close()


def full(value: float, count: int = N) -> np.ndarray:
    return np.full(count, value, "f4")


# ---- Greetings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hello", "kind", "words"),
    [
        (Hello(2, TOKEN, b"c" * 16, 1), "VersionMismatchError", "same gradwire"),
        (Hello(1, b"wrong", b"c" * 16, 1), "ProtocolError", "token"),
        (Hello(1, b"", b"c" * 16, 1), "ProtocolError", "token"),
        (Hello(1, TOKEN, b"short", 1), "ProtocolError", "16 bytes"),
        (Segment(1, 4096), "ProtocolError", "Hello first"),
        (messages.NewLane(), "ProtocolError", "Hello first"),
    ],
)
def test_R57_a_wrong_greeting_is_refused_and_closed(
    hello: Any, kind: str, words: str, folder: Path, client: Client
) -> None:
    stranger = Client(folder, greet=False)
    ledger = Ledger()
    stranger.tether.send(hello, ledger.descriptors)
    answer, _ = stranger.tether.receive(60) or (None, [])
    assert type(answer) is Refused and answer.kind == kind and words in answer.message
    with pytest.raises(TetherClosedError):
        stranger.tether.receive(60)
    stranger.close()


def test_R57_two_clients_of_one_id(folder: Path, client: Client) -> None:
    stranger, ledger = Client(folder, greet=False), Ledger()
    stranger.tether.send(Hello(1, TOKEN, client.id, 1), ledger.descriptors)
    assert type((stranger.tether.receive(60) or (None,))[0]) is Refused
    stranger.close()


@pytest.mark.parametrize("nbytes", [4096, 65536])
def test_R57_a_ledger_that_is_none(nbytes: int, folder: Path, client: Client) -> None:
    fd = os.memfd_create("gradwire-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    stranger = Client(folder, greet=False)
    stranger.tether.send(Hello(1, TOKEN, stranger.id, 1), [fd])
    assert type((stranger.tether.receive(60) or (None,))[0]) is Refused
    close_all([fd])
    stranger.close()


def test_a_client_that_cannot_share_memory_gets_frames(folder: Path) -> None:
    stranger = Client(folder, greet=False)
    stranger.tether.send(Hello(1, TOKEN, stranger.id, 1))
    _, descriptors = stranger.tether.receive(60) or (None, [])
    stranger.memory.is_shared = False
    stranger.exchange = Exchange(
        stranger.memory, stranger.tether, Ledger.received(descriptors), Ledger.received([])
    )
    answer, results = stranger.call(stranger.load("double"), full(3))
    assert type(answer) is Done and answer.headers[0][0] == [0] and (results[0] == 6).all()
    stranger.close()


def test_R57_random_packets_to_the_tether(folder: Path, client: Client) -> None:
    chance = random.Random(0)
    for _ in range(30):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(folder / "t"))
        sock.send(chance.randbytes(chance.randint(1, 200)))
        sock.close()


def test_a_page_that_is_awake_is_not_forgotten_for_another() -> None:
    """Its client does not ring, and would wait for ever: it stays until it has left off."""
    one, other = (page_lane_pair(100) for _ in range(2))
    lanes = [received_page_lane(theirs.detach(), os.dup(segment.fd)) for _, theirs, segment in (one, other)]
    turns: Any = Turns()
    turns.awake = (lanes[0], None)
    for _ in range(5):
        turns.note(lanes[1], None)
    assert turns.awake[0] is lanes[0]
    turns.awake = None
    turns.note(lanes[1], None)
    assert turns.awake[0] is lanes[1]
    for client, _, segment in (one, other):
        client.close()
        segment.close()
    for lane in lanes:
        lane.close()  # type: ignore[union-attr]


# ---- Messages --------------------------------------------------------------------------------------------------------------


def test_what_is_forgotten_is_gone_and_nothing_else(folder: Path, client: Client) -> None:
    other = Client(folder)
    mine, kept, theirs = client.load("double"), client.load("double"), other.load("double")
    for remotes, optimizers in (([theirs, 0, 10**9], [1, 2**60]), ([mine, mine], []), ([], [])):
        sockets.send_nowait(client.dealer, [messages.pack(Forget(remotes, optimizers))])
    answer, _ = client.call(mine, full(1))
    assert type(answer) is Failed and f"has no remote {mine}" in answer.message
    assert client.call(kept, full(1))[1][0].sum() == 2 * N
    assert other.call(theirs, full(1))[1][0].sum() == 2 * N, "another client's"
    assert client.load("double") > theirs, "no number is given again"
    other.close()
    answer, _ = client.call(theirs, full(1))
    while type(answer) is not Failed:  # until the worker has seen that it is gone
        answer, _ = client.call(theirs, full(1))
    assert f"has no remote {theirs}" in answer.message


def test_a_plan_is_forgotten_with_its_program(folder: Path, client: Client) -> None:
    ours, theirs = lane_pair(60_000)
    assert client.exchange.pass_lane(theirs.fileno())
    theirs.close()
    remote, lent = client.load("identity"), client.lend(np.ones(4, "f4"))[0]
    call = Call(next(client.numbers), remote, positional(1), [], 0, 0, 0, None, 0, None, lent, [], [])
    ours.send_nowait([messages.pack(messages.Plan(*call, 7, ours.inlined, ours.room))])
    received = ours.receive()
    assert type(received) is list and type(messages.unpack(received[0])) is Done
    layout = plans.layout_of(plans.avals_of(lent), ours.inlined, ours.room)
    assert layout is not None
    ours.send_nowait([messages.pack(Forget([remote], []))])
    plans.CALL.pack_into(ours.outgoing, 0, plans.SHORT_CALL, 0, 7, 0, next(client.numbers), 0, *[0] * 8)
    ours.send_short_nowait(layout.nbytes)
    received = ours.receive()
    assert type(received) is list
    answer = messages.unpack(received[0])
    assert type(answer) is Failed and "a plan that is unknown" in answer.message
    ours.close()


def test_what_a_handler_raises_while_a_page_is_looked_at_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    desk, lane = Mock(_raised=0), Mock()
    desk._note_raised = partial(Desk._note_raised, desk)
    lane.is_next_here.side_effect = TimeoutError("a late alarm")
    for _ in range(MOST_RAISED):
        assert Desk._serve_awake(desk, lane, Mock()) is True
    assert not lane.next.called and "TimeoutError: a late alarm" in capfd.readouterr().err
    with pytest.raises(TimeoutError):  # nothing else could be done in between: that is no handler's
        Desk._serve_awake(desk, lane, Mock())
    lane.is_next_here.side_effect = sockets.Unreachable("gone")
    assert Desk._serve_awake(desk, lane, Mock()) is False and desk._reception.close_lane.called


def test_R57_random_frames_are_answered_or_dropped(client: Client) -> None:
    chance = random.Random(1)
    for _ in range(200):
        frames = [chance.randbytes(chance.randint(0, 100)) for _ in range(chance.randint(1, 3))]
        sockets.send_nowait(client.dealer, frames)
        answer = messages.unpack(sockets.receive(client.dealer)[0])
        assert type(answer) is Failed and answer.kind == "ProtocolError" and answer.call_id == 0


def test_R57_a_stranger_without_a_greeting_is_refused(folder: Path, client: Client) -> None:
    dealer = sockets.connect_dealer(f"ipc://{folder}/z", b"c" + os.urandom(19), 60_000)
    sockets.send_nowait(dealer, [messages.pack(Load(1, "function", "os:system", positional(0), []))])
    answer = messages.unpack(sockets.receive(dealer)[0])
    assert answer.kind == "ProtocolError" and "Hello" in answer.message
    dealer.close()


@pytest.mark.parametrize(
    "message", [Done(1, b"", [], 0, 0), Welcome(1, b"", 1, True, True), Segment(1, 1), messages.Collect()]
)
def test_R57_what_a_worker_is_not_told(message: Any, client: Client) -> None:
    answer, _ = client.ask(message)
    assert answer.kind == "ProtocolError" and type(message).__name__ in answer.message


def test_whatever_goes_wrong_every_tensor_is_returned(client: Client) -> None:
    """Or a program that catches an error in a loop would lose a slot each time."""
    double, module = client.load("double"), client.load("module", "module", full(1), full(2))
    assert client.loans() == 0
    xs = (full(1), full(2), full(3))
    faults = [
        (client.call(9999, *xs), "ProtocolError"),
        (client.call(double, *xs, training=True), "UsageError"),
        (client.call(double, *xs, chain=[INCARNATION]), "UsageError"),
        (client.call(double, *xs, word=[["X"]]), "ProtocolError"),
        (client.call(double, *xs, structure=b"\xc1"), "ProtocolError"),
        (client.call(double, *xs, structure=positional(2)), "ProtocolError"),
        (client.call(double, *xs), "RemoteError"),  # too many arguments
        (client.call(client.load("fail"), *xs), "RemoteError"),
        (client.call(double, *xs, token=7, token_ops=0, word=[["T", [0], 1]]), "UsageError"),
        (client.call(double, *xs, keep=1), None),
        (client.call(module, *xs), "RemoteError"),
    ]
    for i, ((answer, _), kind) in enumerate(faults):
        assert kind is None or (type(answer) is Failed and answer.kind == kind), (i, answer)
    for make in (
        lambda h: State(next(client.numbers), module, "no_such_verb", positional(3), h),
        lambda h: State(next(client.numbers), 9999, "train", positional(3), h),
        lambda h: Load(next(client.numbers), "function", "gwt_targets:no_such", positional(3), h),
        lambda h: Load(next(client.numbers), "function", "no target", b"\xc1", h),
        lambda h: Load(next(client.numbers), "module", "gwt_targets:fail", positional(3), [*h[:2], None]),
    ):
        answer, _ = client.ask(make(client.lend(*xs)[0]))
        assert type(answer) is Failed, answer
    headers, _ = client.lend(*xs)
    headers[0] = [*headers[0][:3], (2**40,), *headers[0][4:]]
    bad = Call(next(client.numbers), double, positional(3), [], 0, 0, 0, None, 0, None, headers, [], [])
    assert client.ask(bad)[0].kind == "ProtocolError"
    assert client.loans() == 2, (
        "only those of the refused header and of the one that was left out may be lost"
    )
    with client.memory.lock:
        client.exchange.loans._lent.clear()


@pytest.mark.parametrize(
    "avals", [[7], [[[1], [2, 32]]], [[[-1], [2, 32, 1]]], [[[1], [2, 33, 1]]], [[None, None]]]
)
def test_R57_what_is_no_abstract_value(avals: list[Any], client: Client) -> None:
    answer, _ = client.ask(Spec(next(client.numbers), client.load("double"), positional(1), None, 0, avals))
    assert answer.kind == "ProtocolError"


def test_an_answer_too_long_to_be_read_is_an_error(client: Client) -> None:
    text = client.load("text")
    structure = flatten([[messages.MAX_MESSAGE + 1], {}], callable)[0]
    answer, _ = client.call(text, structure=structure)
    assert type(answer) is Failed and answer.kind == "UsageError"
    answer, _ = client.call(client.load("surrogate"))
    assert type(answer) is Failed


def test_tokens_of_others_and_of_nobody_are_let_be(client: Client) -> None:
    sockets.send_nowait(client.dealer, [messages.pack(Release([1, 2, 2**40]))])
    assert type(client.call(client.load("double"), full(1), released=[5, 6])[0]) is Done


# ---- Memory ---------------------------------------------------------------------------------------------------------------------


def test_R16_kept_scribbled_and_passed_back(client: Client) -> None:
    keep, sums, identity, scribble = map(client.load, ("keep", "sums", "identity", "scribble"))
    x = full(3)
    buffer = client.memory.empty(N, "f4")
    buffer[...] = 5
    client.call(keep, x)
    for value in range(20):
        _, (y,) = client.call(identity, full(value))
        _, (z,) = client.call(scribble, buffer)
        assert (y == value).all() and (z == -1).all() and (buffer == 5).all()
    _, (w,) = client.call(identity, buffer)
    buffer[...] = 6
    assert (w == 5).all(), "a result is not its argument"
    answer, _ = client.call(sums, structure=positional(0))
    assert fill(answer.structure, []) == [3.0 * N]
    del y, z, w
    client.call(sums, structure=positional(0))
    assert client.loans() == 1  # x is kept in the worker for good


def test_a_dead_client_leaves_nothing(folder: Path, client: Client) -> None:
    for _ in range(3):
        other = Client(folder)
        _, results = other.call(other.load("double"), full(1))
        assert (results[0] == 2).all()
        other.close()  # without a word, with a view of the result
        _, mine = client.call(client.load("double"), full(4))
        assert (mine[0] == 8).all()


def test_a_client_that_does_not_read_holds_nobody_up(folder: Path, client: Client) -> None:
    deaf = Client(folder)
    double, x = deaf.load("double"), full(1, 900)
    headers, _ = deaf.lend(x)
    for _ in range(3000):
        call = Call(next(deaf.numbers), double, positional(1), [], 0, 0, 0, None, 0, None, headers, [], [])
        try:
            sockets.send_nowait(deaf.dealer, [messages.pack(call)])
        except sockets.Unreachable:
            break
    assert (client.call(client.load("double"), full(4))[1][0] == 8).all()
    deaf.close()


# ---- Lanes ------------------------------------------------------------------------------------------------------------------------


def test_a_lane_that_came_while_a_header_was_read_is_served(client: Client) -> None:
    """The worker reads its tether when it meets an unknown segment; what else lay there must not be forgotten."""
    double = client.load("double")
    for round in range(30):
        lane, theirs = lane_pair(60_000)
        client.memory.arena._chunk = None  # so that the call needs a new segment
        client.memory.arena._free.clear()
        headers, _ = client.lend(full(round, 2000))
        call = Call(next(client.numbers), double, positional(1), [], 0, 0, 0, None, 0, None, headers, [], [])
        sockets.send_nowait(client.dealer, [messages.pack(call)])
        assert client.exchange.pass_lane(theirs.fileno())
        theirs.close()
        by_lane = call._replace(call_id=next(client.numbers), headers=client.lend(full(1, 10))[0])
        lane.send_nowait([messages.pack(by_lane)])
        assert messages.unpack(lane.receive()[0]).call_id == by_lane.call_id
        answer = messages.unpack(sockets.receive(client.dealer)[0])
        client.exchange.borrow_all(answer.headers, [])
        lane.close()


def test_R57_random_packets_on_a_lane(client: Client) -> None:
    chance = random.Random(2)
    lane, theirs = lane_pair(60_000)
    assert client.exchange.pass_lane(theirs.fileno())
    theirs.close()
    for _ in range(50):
        lane.send_nowait([chance.randbytes(chance.randint(1, 100))])
        answer = messages.unpack(lane.receive()[0])
        assert type(answer) is Failed and answer.kind == "ProtocolError"
    lane.send_nowait([bytes(70_000)])
    with pytest.raises((sockets.Unreachable, sockets.Again)):
        lane.receive()
    lane.close()


# ---- Plans ----------------------------------------------------------------------------------------------------------------


def plan_of(remote: int, header: Any, **changes: Any) -> messages.Plan:
    number = next(Client.numbers)
    plain = messages.Plan(
        number, remote, positional(1), [], 0, 0, 0, None, 0, None, [header], [], [], 3, 4096, 65536
    )
    return plain._replace(**changes)


def short_call(call_id: int, x: np.ndarray, plan: int = 3, token: int = 0, together: int = 0) -> bytes:
    frame = bytearray(plans.HEAD + plans.ALIGNMENT + x.nbytes)
    plans.CALL.pack_into(frame, 0, plans.SHORT_CALL, 0, plan, together, call_id, token, *(0,) * 8)
    frame[plans.HEAD : plans.HEAD + x.nbytes] = x.tobytes()
    return bytes(frame[: plans.HEAD + x.nbytes])


def answer_on(dealer: Any) -> bytes:
    (frame,) = sockets.receive(dealer)
    return frame


def test_a_planned_call_and_its_answer_byte_by_byte(client: Client) -> None:
    double, x = client.load("double"), full(1, 10)
    assert type(client.ask(plan_of(double, client.lend(x)[0][0]))[0]) is Done
    for i in range(3):
        sockets.send_nowait(client.dealer, [short_call(1000 + i, x + i)])
        frame = answer_on(client.dealer)
        kind, _, plan, _, call_id, token, _ = plans.ANSWER.unpack_from(frame)
        assert (kind, plan, call_id, token) == (plans.SHORT_ANSWER, 3, 1000 + i, 0)
        np.testing.assert_array_equal(np.frombuffer(frame, "f4", offset=plans.HEAD), 2 * (x + i))


@pytest.mark.parametrize(
    "change",
    [
        {"plan": plans.MAX_PLANS},
        {"room": sockets.ROOM + 1},
        {"room": 60},
        {"token": [[1, 0]]},
        {"flags": messages.SEEDED},
        {"headers": [[b"\0" * 16, 0, 0, [2, 2], [1, 2], [2, 32, 1], [1, 0], 2]]},
        {"headers": [[b"\0" * 4, 0, 0, [1] * 33, None, [2, 32, 1], [1, 0], 2]]},
    ],
)
def test_R57_a_plan_that_cannot_be_is_refused_and_not_run(change: dict[str, Any], client: Client) -> None:
    keep, sums = client.load("keep"), client.load("sums")
    before = client.call(sums)[0].structure
    answer, _ = client.ask(plan_of(keep, client.lend(full(1, 4))[0][0], **change))
    assert type(answer) is Failed and answer.kind == "ProtocolError"
    assert client.call(sums)[0].structure == before


def test_R57_short_calls_that_no_plan_fits(client: Client) -> None:
    double, x = client.load("double"), full(1, 10)
    good = short_call(77, x)
    unknown = [good, good[:70], b"\1", good[:30], b"\1" + bytes(63)]
    for frame in unknown:  # a line without plans
        sockets.send_nowait(client.dealer, [frame])
        assert messages.unpack(answer_on(client.dealer)).kind == "ProtocolError"
    assert type(client.ask(plan_of(double, client.lend(x)[0][0]))[0]) is Done
    bad = [good[:-1], good + b"\0", short_call(77, x, plan=4), b"\2" + good[1:], b"\1\x09" + good[2:], b"\0"]
    for frame in bad:
        sockets.send_nowait(client.dealer, [frame])
        failed = messages.unpack(answer_on(client.dealer))
        assert type(failed) is Failed and failed.kind == "ProtocolError", frame
    sockets.send_nowait(client.dealer, [good])
    assert answer_on(client.dealer)[0] == plans.SHORT_ANSWER


def test_R57_random_short_calls_on_a_lane(client: Client) -> None:
    identity, chance = client.load("identity"), random.Random(4)
    lane, theirs = lane_pair(60_000)
    assert client.exchange.pass_lane(theirs.fileno())
    theirs.close()
    for x, room in ((full(1, 10), 65536), (full(1, 3000), 65536)):
        lane.send_nowait([messages.pack(plan_of(identity, client.lend(x)[0][0], room=room))])
        answer = messages.unpack(lane.receive()[0])
        client.exchange.borrow_all(answer.headers, [])
        length = plans.HEAD + (plans.ENTRY.size if x.nbytes > 4096 else x.nbytes)
        for _ in range(60):
            frame = bytearray(chance.randbytes(length))
            frame[0:2], frame[2:4] = b"\1\0", b"\3\0"
            lane.outgoing[:length] = frame
            lane.send_short_nowait(length)
            received = lane.receive()
            assert received == length or messages.unpack(received[0]).kind in {
                "ProtocolError",
                "ResidualLostError",
            }
    lane.close()


def test_a_plan_ends_with_its_number_and_is_not_anothers(client: Client, folder: Path) -> None:
    double, identity, x = client.load("double"), client.load("identity"), full(3, 4)
    for remote, factor in ((double, 2), (identity, 1), (double, 2)):
        assert type(client.ask(plan_of(remote, client.lend(x)[0][0]))[0]) is Done
        sockets.send_nowait(client.dealer, [short_call(5, x)])
        np.testing.assert_array_equal(
            np.frombuffer(answer_on(client.dealer), "f4", offset=plans.HEAD), factor * x
        )
    other = Client(folder)
    sockets.send_nowait(other.dealer, [short_call(5, x)])
    assert messages.unpack(answer_on(other.dealer)).kind == "ProtocolError"
    other.close()


LET_GO, HELD_UP, BUSY = full(1, 4), full(-1, 4), full(-2, 4)
"""Arguments of `wait`: what is negative waits for a file of that name."""


@pytest.fixture(params=["lane", "ZeroMQ"])
def waiting(request: Any) -> Iterator[tuple[Path, Callable[..., None], Any]]:
    """Where a desk listens that serves nobody else; how to send frames that are all there when the first of them has been served; and who receives.

    Plans 3 and 4 wait for a file where they are told to. By ZeroMQ nobody can see whether they are there: they have so many seconds to come.
    """
    with desk() as folder:
        client = Client(folder)
        line, theirs = lane_pair(200)
        assert client.exchange.pass_lane(theirs.fileno())
        theirs.close()
        by_zmq = request.param == "ZeroMQ"
        receiver = sockets.Dealer(f"ipc://{folder}/z", client.id + b"0002", 200) if by_zmq else line
        for number, target in ((3, "wait"), (4, "wait_too")):
            plan = plan_of(client.load(target), client.lend(LET_GO)[0][0], plan=number)
            receiver.send_nowait([messages.pack(plan)])
            client.exchange.borrow_all(messages.unpack(received_by(receiver)).headers, [])

        def send(frames: list[bytes], seconds: float = 0.1) -> None:
            if not by_zmq:
                line.send_nowait([batch_of(frames)])
                return
            call = Call(1, client.load("wait"), positional(1), [], 0, 0, 0, None, 0, None, [], [], [])
            headers, _ = client.lend(BUSY)
            line.send_nowait([messages.pack(call._replace(headers=headers))])  # the worker is busy meanwhile
            begun = folder / "begun-2"
            while not begun.exists():
                time.sleep(0.001)
            begun.unlink()
            for frame in frames:
                receiver.send_nowait([frame])
            time.sleep(seconds)
            (folder / "-2").touch()
            client.exchange.borrow_all(messages.unpack(received_by(line)).headers, [])
            (folder / "-2").unlink()

        yield folder, send, receiver
        signs = [folder / "-1", folder / "-2"]
        for sign in signs:
            sign.touch()  # a test that has failed leaves nobody waiting
        client.load("double")
        for sign in signs:
            sign.unlink()
        line.close()
        if by_zmq:
            receiver.close()
        client.close()


def received_by(line: Any) -> bytes:
    for _ in range(300):
        with contextlib.suppress(sockets.Again):
            received = line.receive()
            return bytes(line.incoming[:received]) if type(received) is int else received[0]
    raise AssertionError("no answer")


def number_of(frame: bytes) -> int:
    return int(plans.ANSWER.unpack_from(frame)[4])


def test_an_answer_waits_for_the_next_that_is_there(waiting: Any) -> None:
    folder, send, line = waiting
    arguments = (LET_GO, HELD_UP, LET_GO, LET_GO)
    for i in range(7):
        send([short_call(11 + k, x, together=3) for k, x in enumerate(arguments)], 0.1 * 2**i)
        came = is_there(line)
        (folder / "-1").touch()
        rest = [11, 12, 13, 14][1 if came else 0 :]
        assert [number_of(received_by(line)) for _ in rest] == rest
        if not came:
            return
        (folder / "-1").unlink()
    pytest.fail("it never waited")


def is_there(line: Any) -> bool:
    """Whether an answer comes within the line's time."""
    try:
        line.receive()
    except sockets.Again:
        return False
    return True


@pytest.mark.parametrize(
    ("together", "plan"), [(0, 3), (1, 3), (2, 4)], ids=["not asked for", "of one", "another plan"]
)
def test_an_answer_does_not_wait(together: int, plan: int, waiting: Any) -> None:
    folder, send, line = waiting
    send([short_call(11, LET_GO, together=together), short_call(12, HELD_UP, plan)])
    assert number_of(received_by(line)) == 11
    assert not is_there(line)
    (folder / "-1").touch()
    assert number_of(received_by(line)) == 12


def test_so_many_answers_come_together_and_no_more(waiting: Any) -> None:
    folder, send, line = waiting
    send([short_call(11 + i, LET_GO, together=2) for i in range(2)] + [short_call(13, HELD_UP, together=2)])
    assert [number_of(received_by(line)) for _ in range(2)] == [11, 12]
    (folder / "-1").touch()
    assert number_of(received_by(line)) == 13, "there is nothing it could wait for"


def test_an_error_comes_after_the_answers_before_it(waiting: Any) -> None:
    _, send, line = waiting
    send([short_call(11, LET_GO, together=9), short_call(12, LET_GO, together=9)[:-1]])
    assert number_of(received_by(line)) == 11
    assert messages.unpack(received_by(line)).kind == "ProtocolError"


@contextlib.contextmanager
def lane_of(client: Client, target: str, x: np.ndarray, sends_bytes: int) -> Iterator[Any]:
    """A lane with plan 3 of that target, whose worker's socket has room for so many bytes."""
    line, theirs = lane_pair(200)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sends_bytes // 2)  # the kernel doubles it
    assert client.exchange.pass_lane(theirs.fileno())
    theirs.close()
    plan = plan_of(client.load(target), client.lend(x)[0][0], inlined=16384)
    line.send_nowait([messages.pack(plan)])
    client.exchange.borrow_all(messages.unpack(received_by(line)).headers, [])
    yield line
    line.close()


def test_answers_that_waited_and_find_no_room_come_when_there_is_some(client: Client) -> None:
    """The worker has nothing to do then, and looks for nothing but that room."""
    x = full(1, 2000)
    how_many = client.load("how_many")
    with lane_of(client, "give", x, 20_000) as line:
        before = fill(client.call(how_many)[0].structure, [])
        line.send_nowait([batch_of([short_call(11 + i, x, together=9) for i in range(7)])])
        while fill(client.call(how_many)[0].structure, []) < before + 7:
            pass  # until it has made them all, and its socket is full
        client.load("double")
        assert [number_of(received_by(line)) for _ in range(7)] == [*range(11, 18)]


def test_who_waits_is_not_kept_waiting_for_answers_to_come_together(client: Client, folder: Path) -> None:
    """A call of `note` takes longer than a turn."""
    other = Client(folder)
    with lane_of(client, "note", LET_GO, 200_000) as line, lane_of(other, "note", LET_GO, 200_000) as another:
        headers, wait = client.lend(BUSY)[0], client.load("wait")
        busy = Call(1, wait, positional(1), [], 0, 0, 0, None, 0, None, headers, [], [])
        sockets.send_nowait(client.dealer, [messages.pack(busy)])
        while not (folder / "begun-2").exists():
            time.sleep(0.001)
        line.send_nowait([batch_of([short_call(i, full(i, 4), together=9) for i in range(11, 17)])])
        another.send_nowait([short_call(1, full(99, 4))])
        (folder / "-2").touch()
        client.exchange.borrow_all(messages.unpack(answer_on(client.dealer)).headers, [])
        assert [number_of(received_by(line)) for _ in range(6)] == [*range(11, 17)]
        assert number_of(received_by(another)) == 1
        noted = fill(client.call(client.load("all_noted"))[0].structure, [])
        assert 99 in noted[:-1] and [x for x in noted if 10 < x < 20] == [*range(11, 17)]
    other.close()
    for sign in ("-2", "begun-2"):
        (folder / sign).unlink()


def test_who_is_alone() -> None:
    """Nobody else's call can be there: neither by the poller, nor left of a batch, nor on a page that does not ring."""
    desk = Mock(_turns=Turns())
    desk._poller.poll.return_value = [(7, 1)]
    assert Desk._is_alone(desk, 7) and not Desk._is_alone(desk, 8)
    desk._turns.unread.add(7)
    assert Desk._is_alone(desk, 7)
    desk._turns.unread.add(9)
    assert not Desk._is_alone(desk, 7)
    desk._turns.unread.clear()
    desk._turns.awake = (Mock(), Mock())
    assert not Desk._is_alone(desk, 7)


def test_an_answer_that_the_lane_never_takes_does_not_wait(client: Client) -> None:
    x = full(1, 2000)
    with lane_of(client, "identity", x, 2000) as line:
        line.send_nowait([batch_of([short_call(11 + i, x, together=2) for i in range(2)])])
        for _ in range(2):
            answer = messages.unpack(received_by(line))
            assert type(answer) is Done
            client.exchange.borrow_all(answer.headers, [])


def test_answers_that_waited_come_before_the_lane_is_closed(client: Client, folder: Path) -> None:
    with lane_of(client, "wait", LET_GO, 200_000) as line:
        line.send_nowait(
            [batch_of([short_call(11, LET_GO, together=9), short_call(12, HELD_UP, together=9)])]
        )
        line.send_nowait([batch_of([b"cut short"])[:-1]])
        (folder / "-1").touch()
        assert [number_of(received_by(line)) for _ in range(2)] == [11, 12]
        with pytest.raises(sockets.Unreachable):
            received_by(line)
        (folder / "-1").unlink()


@pytest.mark.skipif(not can_page(), reason="pages are for x86")
def test_nothing_waits_on_a_page(client: Client) -> None:
    """Its next call comes after the answer, and its worker looks for that call."""
    x, (page, theirs, segment) = full(1, 8000), page_lane_pair(60_000)
    assert client.exchange.pass_lane(theirs.fileno(), segment.fd)
    theirs.close()
    segment.close()
    plan = plan_of(client.load("identity"), client.lend(x)[0][0], inlined=page.inlined, room=page.room)
    page.send_nowait([messages.pack(plan)])
    client.exchange.borrow_all(messages.unpack(received_by(page)).headers, [])
    for i in range(11, 31):
        frame = short_call(i, x, together=9)
        page.outgoing[: len(frame)] = frame
        page.send_short_nowait(len(frame))
        received = page.receive()
        assert type(received) is int and number_of(bytes(page.incoming[:received])) == i
    page.close()


def test_what_a_handler_raises_while_answers_are_sent_loses_none() -> None:
    line, held = Mock(), Held(Mock())
    line.send_nowait.side_effect = [None, TimeoutError("a late alarm"), None, None]
    with pytest.raises(TimeoutError):
        for frame in (b"a", b"b", b"c"):
            held.put(line, 3, frame, 3)
    assert held and held.go_on(line, 3)
    held.release()
    sent = [call.args[0] for call in line.send_nowait.call_args_list]
    assert sent == [[b"a"], [b"b"], [b"b"], [b"c"]] and not held


def test_whatever_a_client_says_answers_are_not_held_for_ever() -> None:
    line, held = Mock(), Held(Mock())
    for i in range(MOST):
        assert not line.send_nowait.called
        held.put(line, 3, bytes([i]), 1 << 31)
    assert [call.args[0] for call in line.send_nowait.call_args_list] == [[bytes([i])] for i in range(MOST)]
    assert not held


def test_an_answer_that_the_lane_does_not_take_is_kept_and_the_others_after_it() -> None:
    line, held = Mock(), Held(Mock())
    line.send_nowait.side_effect = [TooLong, None]
    held.put(line, 3, b"a", 2)
    held.put(line, 3, b"b", 2)
    line.keep.assert_called_once_with(b"a")
    line.send_nowait.side_effect = sockets.Unreachable
    held.put(line, 3, b"c", 2)
    held.release()
    assert not held and line.send_nowait.call_count == 3


def test_a_plan_that_failed_is_none(client: Client) -> None:
    fail, x = client.load("fail"), full(3, 4)
    assert client.ask(plan_of(fail, client.lend(x)[0][0], plan=9))[0].kind == "RemoteError"
    sockets.send_nowait(client.dealer, [short_call(5, x, plan=9)])
    assert messages.unpack(answer_on(client.dealer)).kind == "ProtocolError"


def test_what_is_no_lane_is_closed_and_the_session_goes_on(client: Client) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    assert client.exchange.pass_lane(fd)
    os.close(fd)


def test_the_tether_of_one_client_is_not_anothers(folder: Path, client: Client) -> None:
    other = Client(folder)
    double = client.load("double")
    headers, _ = client.lend(full(7))  # a segment that only client has announced
    call = Call(next(other.numbers), double, positional(1), [], 0, 0, 0, None, 0, None, headers, [], [])
    assert other.ask(call)[0].kind == "ProtocolError"
    client.exchange.take_back(headers)
    other.close()


def test_a_tether_that_says_nonsense_ends_its_session_alone(folder: Path, client: Client) -> None:
    other = Client(folder)
    assert isinstance(other.tether, Tether)
    other.tether.send(Welcome(1, b"", 1, True, True))
    with pytest.raises(TetherClosedError):
        other.tether.receive(60)
    other.close()
