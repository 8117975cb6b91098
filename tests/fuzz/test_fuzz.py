"""Wrong bytes at every door: worker, broker and client refuse them and live on; nobody reads past a segment (R57).

Each target gets its share of ``GRADWIRE_FUZZ_S`` seconds (``make fuzz``: 600), from the seed ``GRADWIRE_FUZZ_SEED`` (new
each time, and printed). Where neither is given, as in ``make test``, it is half a minute of one seed: what a change
breaks is found, and what only chance would find is looked for by ``make fuzz``. However slow the machine is, so many are
sent as show something. A new door is a new test here that sends what `mutator` makes of its right frames.
"""

from __future__ import annotations

import array
import contextlib
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
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from lying import Liar, odd_descriptors  # noqa: E402
from mutator import mutated, other_value  # noqa: E402

from gradwire.plans import Plan, signature_of  # noqa: E402
from gradwire.private_broker import PrivateBroker  # noqa: E402
from gradwire_wire import control, messages, sockets  # noqa: E402
from gradwire_wire.carriers import Carrier  # noqa: E402
from gradwire_wire.dtypes import BY_NAME  # noqa: E402
from gradwire_wire.errors import GradwireError  # noqa: E402
from gradwire_wire.exchange import Exchange, Memory, NotShared, close_all  # noqa: E402
from gradwire_wire.lane import Lane, TooLong, lane_pair  # noqa: E402
from gradwire_wire.page import ClientPage, can_page, page_lane_pair  # noqa: E402
from gradwire_wire.segments import Ledger  # noqa: E402
from gradwire_wire.structures import fill, positional  # noqa: E402
from gradwire_wire.tether import connect_tether  # noqa: E402

TARGETS = 7
SECONDS = float(os.environ.get("GRADWIRE_FUZZ_S", "28")) / TARGETS
NEW_SEED = random.SystemRandom().randrange(1, 1 << 32) if "GRADWIRE_FUZZ_S" in os.environ else 1
SEED = int(os.environ.get("GRADWIRE_FUZZ_SEED", "0")) or NEW_SEED
LEAST = 300
"""So many are sent at the least."""

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(SECONDS + 100)]


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    print(f"GRADWIRE_FUZZ_SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gwt-", dir="/tmp"))  # short, for sockets
    yield path
    shutil.rmtree(path)


# ---- A worker ----------------------------------------------------------------------------------------------------------


class Served:
    """The worker under fuzz."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `end`
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "served.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )
        assert self.process.stdout and self.process.stdout.readline() == b"ready\n", self.said()

    def said(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-4000:]

    def end(self) -> None:
        assert self.process.poll() is None, f"the worker died: {self.process.returncode}\n{self.said()}"
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        code = self.process.wait(60)
        self.process.stdout.close()
        self.errors.close()
        assert code == 0


class Intruder:
    """A client that knows how to greet."""

    numbers = itertools.count(1)

    def __init__(self, folder: Path) -> None:
        self.memory, self.id = Memory(), b"c" + os.urandom(15)
        self.tether = connect_tether(str(folder / "t"), 60)
        ours = Ledger()
        self.tether.send(messages.Hello(messages.PROTOCOL, b"t" * 16, self.id, os.getpid()), ours.descriptors)
        ours.close()
        received = self.tether.receive(60)
        assert received is not None
        self.exchange = Exchange(self.memory, self.tether, Ledger.received(received[1]), ours)
        self.dealer = sockets.connect_dealer(f"ipc://{folder}/z", self.id + b"0001", 60_000)
        self.lane: Lane
        self.open_lane()
        self.page: ClientPage | None = None
        self.carriers = [Carrier(np.ones(n), BY_NAME["float64"]) for n in (1000, 20_000, 3)]
        self.headers = self.exchange.lend(self.carriers, [])

    def open_lane(self) -> None:
        self.lane, theirs = lane_pair(60_000)
        assert self.exchange.pass_lane(theirs.fileno())
        theirs.close()

    def open_page(self) -> ClientPage:
        if self.page is not None:
            self.page.close()
        self.page, theirs, segment = page_lane_pair(60_000)
        assert self.exchange.pass_lane(theirs.fileno(), segment.fd)
        theirs.close()
        segment.close()
        return self.page

    def planned(self, line: Lane, remote: int, number: int) -> tuple[Plan, bytes]:
        """A plan of this line, and the message that makes it."""
        call = (next(self.numbers), remote, positional(3), [], 0, 0, 0, None, 0, None, self.headers, [], [])
        plan = Plan(number, line, signature_of(self.carriers), self.exchange)  # type: ignore[arg-type]
        return plan, messages.pack(messages.Plan(*call, number, line.inlined, line.room))

    def ask(self, message: Any) -> Any:
        sockets.send_nowait(self.dealer, [messages.pack(message)])
        while True:
            answer = messages.unpack(sockets.receive(self.dealer)[0])
            if answer.call_id == message.call_id:
                return answer

    def load(self) -> int:
        load = messages.Load(next(self.numbers), "function", "served:total", positional(0), [])
        return int(fill(self.ask(load).structure, [])["remote"])

    def close(self) -> None:
        if self.page is not None:
            self.page.close()
        self.lane.close()
        self.dealer.close()
        self.tether.close()
        self.exchange.end()
        self.memory.close()


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    made = Served(folder)
    yield made
    made.end()


def assert_usable(served: Served) -> None:
    """A client of good manners is served, and right."""
    assert served.process.poll() is None, f"the worker died: {served.process.returncode}\n{served.said()}"
    client = Intruder(served.folder)
    remote = client.load()
    call = messages.Call(
        next(client.numbers), remote, positional(2), [], 0, 0, 0, None, 0, None, client.headers[:2], [], []
    )
    answer = client.ask(call)
    assert type(answer) is messages.Done, answer
    assert fill(answer.structure, []) == 21_000.0 or answer.headers, answer
    client.close()


def right_message(client: Intruder, remote: int, chance: random.Random) -> Any:
    """A message that the worker would accept, but for one number in one header perhaps."""
    number = next(client.numbers)
    headers = [list(h) for h in client.headers]
    if chance.random() < 0.7:
        header = chance.choice(headers)
        at = chance.randrange(8)
        header[at] = other_value(chance, header[at])
    kind = chance.randrange(10)
    tree = positional(len(headers))
    if kind == 0:
        return messages.Load(number, chance.choice(["function", "module"]), "served:total", tree, headers)
    if kind == 1:
        return messages.Spec(number, remote, positional(1), None, 0, [[[2, 3], [2, 32, 1]]])
    if kind == 2:
        return messages.State(number, remote, "load_state_dict", tree, headers)
    if kind == 3:
        if chance.random() < 0.5:
            return messages.Release([1, 2, 2**32 - 1])
        return messages.Forget([0, 10**6, 2**60], [1, 2**60])
    if kind == 8:
        return messages.Trace(number, chance.choice([0, 1, 100, 2**40]))
    step = ["M", chance.choice([0, 7, 2**48]), chance.choice([None, 0.5, -1.0])]
    word = {4: [["T", [0], 1]], 5: [["V", [True, True, False]]], 6: [step]}.get(kind, [])
    token = chance.choice([0, 0, 0, 1, [[1, 0]]])
    call = messages.Call(
        number, remote, tree, word, chance.randrange(3), token, 0, None, 0, None, headers, [], [b"x" * 16]
    )
    if kind == 9:
        rooms = [0, 64, 16 << 10, 64 << 10, 256 << 10, (256 << 10) + 1]
        return messages.Plan(*call, chance.randrange(258), chance.choice(rooms), chance.choice(rooms))
    return call


def is_harmless(frame: bytes) -> bool:
    """Whatever a Load names is imported, which is what it is for: other names than ours are not sent."""
    try:
        message = messages.unpack(frame)
    except GradwireError:
        return True
    return type(message) is not messages.Load or message.target.startswith("served:")


def until(seconds: float, least: int = LEAST) -> Iterator[int]:
    """Counts until both are over."""
    end = time.monotonic() + seconds
    for i in itertools.count():
        if time.monotonic() > end and i >= least:
            return
        yield i


def fuzz_worker(served: Served, chance: random.Random, send: Callable[[Intruder, bytes], None]) -> int:
    client = Intruder(served.folder)
    remote = client.load()
    sent = 0
    for i in until(SECONDS):
        try:
            frame = messages.pack(right_message(client, remote, chance))
        except (OverflowError, UnicodeEncodeError):  # a number that msgpack has no place for
            continue
        if chance.random() < 0.6:
            frame = mutated(chance, frame)
        if is_harmless(frame):
            send(client, frame)
            sent += 1
        if i % 500 == 499:
            assert_usable(served)
            client.close()
            client = Intruder(served.folder)
    client.close()
    assert_usable(served)
    return sent


def test_r57_a_worker_by_zeromq(served: Served, chance: random.Random) -> None:
    def send(client: Intruder, frame: bytes) -> None:
        further = [
            chance.randbytes(chance.choice([0, 3, 5000])) for _ in range(chance.choice([0, 0, 0, 1, 3]))
        ]
        with contextlib.suppress(sockets.Unreachable):  # its queue is full: it is to catch up
            sockets.send_nowait(client.dealer, [frame, *further])
        while sockets.receive_nowait(client.dealer) is not None:
            pass

    assert fuzz_worker(served, chance, send) > 100


def test_r57_a_worker_by_lane(served: Served, chance: random.Random) -> None:
    def send(client: Intruder, frame: bytes) -> None:
        try:
            if chance.random() < 0.3:
                lie_shortly(client, client.lane, chance)
            else:
                client.lane.send_nowait([frame])
            drain(client.lane)
        except TooLong:  # full
            time.sleep(0.001)
        except sockets.Unreachable:  # closed by the worker for its length
            client.open_lane()

    assert fuzz_worker(served, chance, send) > 100


@pytest.mark.skipif(not can_page(), reason="pages are for x86")
def test_r57_a_worker_by_page(served: Served, chance: random.Random) -> None:
    """Words that lie, frames that change while they are read, packets that nobody has announced."""

    def send(client: Intruder, frame: bytes) -> None:
        line = client.page or client.open_page()
        try:
            how = chance.random()
            if how < 0.4:
                lie_shortly(client, line, chance)
            elif how < 0.6:
                line.outgoing[: len(frame)] = frame
                line._looks = chance.randrange(2)
                line.send_short_nowait(len(frame))
            else:
                line.send_nowait([frame])
            if how < 0.2:
                lie_in_page(line, chance)
            drain(line)
        except TooLong:
            time.sleep(0.001)
        except sockets.Unreachable:
            client.open_page()

    assert fuzz_worker(served, chance, send) > 100


def drain(line: Lane) -> None:
    """Answers are not looked at."""
    while line.receive_nowait() is not None:
        pass


def lie_shortly(client: Intruder, line: Lane, chance: random.Random) -> None:
    """A short call of a plan that is known perhaps, with something wrong about it perhaps."""
    plans: dict[int, Plan] = line.plans
    if not plans or chance.random() < 0.1:
        number = chance.randrange(3)
        plans[number], frame = client.planned(line, 1, number)
        line.send_nowait([frame])
    plan = chance.choice(list(plans.values()))
    with contextlib.suppress(NotShared):
        together = chance.choice([0, 0, 2, 9, 2**32 - 1])
        loans = plan.put(client.carriers, next(client.numbers), chance.choice([0, 0, 1]), [], together)
        client.exchange.take_back_loans(loans)  # sooner than the worker could
        length = plan.nbytes
        if chance.random() < 0.6:
            for _ in range(chance.randrange(1, 4)):
                line.outgoing[chance.randrange(min(length, 200))] = chance.randrange(256)
        if chance.random() < 0.1:
            length = chance.choice([1, 2, 63, 64, length - 1, length + 1, line.room])
        line.send_short_nowait(length)


def lie_in_page(line: ClientPage, chance: random.Random) -> None:
    """What the rules of docs/protocol.md forbid: any word, any byte, at any time."""
    for _ in range(chance.randrange(1, 5)):
        how = chance.randrange(4)
        if how == 0:
            word = chance.choice([0, line._number << 24, (line._number + 1) << 24, chance.getrandbits(64)])
            line._words[chance.choice([0, 0, 0, 8, 16, 24])] = word | chance.choice([0, 1, 64, 4096, 262144])
        elif how == 1:
            at = chance.randrange(1, 300)
            line.outgoing[at : at + 8] = chance.randbytes(8)
        elif how == 2:
            line.incoming[chance.randrange(300)] = chance.randrange(256)
        else:
            line._ring()


def test_r57_a_worker_by_its_tether(served: Served, chance: random.Random) -> None:
    """Before and after the greeting, with descriptors of every kind."""
    hello = messages.Hello(messages.PROTOCOL, b"t" * 16, b"c" * 16, os.getpid())
    examples = [hello, messages.Segment(7, 4096), messages.Collect(), messages.NewLane()]
    for i in until(SECONDS, LEAST // 3):
        if chance.random() < 0.5:
            client = Intruder(served.folder)
            tether = client.tether
        else:
            client, tether = None, connect_tether(str(served.folder / "t"), 60)
        for _ in range(chance.randrange(1, 5)):
            packet = messages.pack(chance.choice(examples))
            odd = odd_descriptors(chance, chance.choice([0, 1, 1, 2, 5]))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", odd))] if odd else []
            with contextlib.suppress(OSError):
                bytes_ = mutated(chance, packet) if chance.random() < 0.7 else packet
                tether._socket.settimeout(1)
                tether._socket.sendmsg([bytes_], rights, socket.MSG_NOSIGNAL)
            close_all(odd)
        if client is not None:
            client.close()
        else:
            tether.close()
        if i % 100 == 99:
            assert_usable(served)
    assert_usable(served)
    pid = served.process.pid
    deadline = time.monotonic() + 60
    while len(os.listdir(f"/proc/{pid}/fd")) > 60:  # nothing that was sent along is kept
        assert time.monotonic() < deadline, os.listdir(f"/proc/{pid}/fd")
        time.sleep(0.05)


# ---- A broker -----------------------------------------------------------------------------------------------------------


def test_r57_a_broker(chance: random.Random) -> None:
    broker = PrivateBroker(30.0)
    try:
        dealer = sockets.connect_dealer(broker.address, os.urandom(16), 60_000)
        attach = control.Attach(control.PROTOCOL, broker.token, os.getpid())
        sockets.send_nowait(dealer, [control.pack(attach)])
        assert type(control.unpack(sockets.receive(dealer)[0])) is control.Attached
        start = control.Start(
            *(1, "numpy", "", "/no/such/python", {b"PATH": b"/bin"}, {}, ["/"], "/", None, None, None, 5.0),
            *({"net": {"kind": "module", "target": "m:f", "args": [], "kwargs": {}}}, False, "never"),
        )
        examples = [
            attach,
            start,
            control.Cancel(1),
            control.Interrupt(b"i" * 16),
            control.Stop(b"i" * 16, 1.0),
            control.Heard(100),
            control.Look(2),
            control.Show("numpy", True),
            control.ReadLog(3, "numpy", True),
            control.Restart(4, b"i" * 16),
        ]
        frames = [control.pack(e) for e in examples]
        for i in until(SECONDS):
            frame = mutated(chance, chance.choice(frames), frames)
            if _would_start(frame):
                continue
            further = [b"more"] if chance.random() < 0.05 else []
            with contextlib.suppress(sockets.Unreachable):
                sockets.send_nowait(dealer, [frame, *further])
            while sockets.receive_nowait(dealer) is not None:
                pass
            if i % 500 == 499:
                _assert_broker_answers(broker)
        _assert_broker_answers(broker)
        dealer.close()
    finally:
        broker.kill()
        broker.close()
        shutil.rmtree(broker.folder, ignore_errors=True)


def _would_start(frame: bytes) -> bool:
    """A start of what exists, or the end of it all, would be obeyed rightly: not sent."""
    try:
        message = control.unpack(frame)
    except GradwireError:
        return False
    starts = type(message) is control.Start and message.python != "/no/such/python"
    return starts or type(message) is control.ShutDown


def _assert_broker_answers(broker: PrivateBroker) -> None:
    assert not broker.wait_ended(0.0), broker.last_words()
    dealer = sockets.connect_dealer(broker.address, os.urandom(16), 60_000)
    sockets.send_nowait(dealer, [control.pack(control.Attach(control.PROTOCOL, broker.token, os.getpid()))])
    assert type(control.unpack(sockets.receive(dealer)[0])) is control.Attached
    sockets.send_nowait(dealer, [control.pack(control.Stop(b"n" * 16, 1.0))])
    assert type(control.unpack(sockets.receive(dealer)[0])) is control.Died
    dealer.close()


# ---- A client -----------------------------------------------------------------------------------------------------------


def test_r57_a_client_of_a_worker_that_lies(folder: Path, chance: random.Random) -> None:
    liar = Liar(folder, chance.randrange(1 << 32))
    liar.start()
    program = subprocess.Popen(
        [sys.executable, str(HERE / "calling.py"), str(folder), str(SECONDS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = program.communicate(timeout=SECONDS + 95)
    finally:
        program.kill()
        liar.stop()
    assert program.returncode == 0, f"{program.returncode}\n{output}\n{errors[-6000:]}"
    print(liar.said, output)
    assert liar.said > 50 and "answered" in output, (liar.said, output)


# ---- Headers -------------------------------------------------------------------------------------------------------------


def test_r57_headers_between_guard_pages() -> None:
    """hypothesis looks for a header that reaches past its segment: that would be a SIGSEGV."""
    examples = int(200 * SECONDS)
    ended = subprocess.run(
        [sys.executable, str(HERE / "borrowing.py"), str(examples), str(SEED)],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS + 90,
    )
    assert ended.returncode == 0, f"{ended.returncode}\n{ended.stdout}\n{ended.stderr[-4000:]}"
    assert int(ended.stdout) > examples // 50, "too few headers were accepted for this to show anything"


def test_the_guards_do_guard() -> None:
    """A read just past a segment ends the process."""
    code = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import guards
guards.install()
from gradwire_wire.segments import OwnSegment
own = OwnSegment(1, 4096)
ctypes.string_at(own.address + 4095, 1)
print("inside", flush=True)
ctypes.string_at(own.address + int(sys.argv[2]), 1)
"""
    for past in (4096, -1):
        ended = subprocess.run(
            [sys.executable, "-c", code, str(HERE), str(past)], capture_output=True, check=False
        )
        assert (ended.returncode, ended.stdout) == (-11, b"inside\n")
