"""Who may do what: restricted targets, keys over tcp, and nothing in the clear."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zmq

import gradwire as gw
from gradwire import far as far_connection
from gradwire import lines, shared_worker
from gradwire.commands import main
from gradwire.shared_broker import card_of
from gradwire_wire import control, keys, sockets
from gradwire_wire.errors import UsageError

OPS = """
import os
import numpy as np
from subprocess import Popen

def double(x):
    return 2 * x

def sleep(seconds):
    import time
    time.sleep(seconds)

def stay(begun, end):
    import time
    open(begun, "w").close()
    while not os.path.exists(end):
        time.sleep(0.01)

class Sum:
    def __init__(self):
        self.total = 0.0
    def __call__(self, x):
        self.total = self.total + np.sum(x)
        return self.total
"""

FILE = """
name = "{name}"
allow = ["far_ops.*"]
[workers.w]
framework = "numpy"
modules.sum = "private_ops.py:Sum"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("security")
    (made / "far_ops.py").write_text(OPS)
    (made / "private_ops.py").write_text(OPS)
    return made


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gradwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def far(folder: Path) -> Iterator[str]:
    """The tcp address of a broker whose clients' keys are in folder/keys/clients."""
    assert main(["keys", "create", str(folder / "keys"), "--client", "alice"]) == 0
    (folder / "far.toml").write_text(FILE.format(name="tests-far"))
    address = f"tcp://127.0.0.1:{free_port()}"
    done = gradwire("up", str(folder / "far.toml"), "--listen", address, "--keys", str(folder / "keys"))
    assert done.returncode == 0, done.stderr
    yield address
    assert gradwire("stop", "--all", "--broker", "tests-far").returncode == 0


@pytest.fixture
def alice(folder: Path, far: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a client's keys, named in the environment."""
    monkeypatch.setenv("GRADWIRE_KEYS", str(folder / "keys" / "clients" / "alice"))
    return folder / "keys" / "clients" / "alice"


# ---- Restricted targets --------------------------------------------------------------------------------------------


def test_a_restricted_broker_calls_what_it_allows(far: str) -> None:
    with gw.connect("tests-far") as bridge:
        worker = bridge["w"]
        np.testing.assert_array_equal(worker.function("far_ops:double")(np.ones(3)), [2, 2, 2])
        assert worker.module("far_ops:Sum")(np.ones(3)) == 3
        assert isinstance(float(worker.module("sum")(0)), float), "what its file loads, wherever it is from"
        for target in (
            "os:system",
            "far_ops:Popen",
            "far_ops:os.system",
            "private_ops.py:double",
            "private_ops:double",
        ):
            with pytest.raises(gw.UnknownTargetError, match=r"may not be called here.*far_ops\.\*"):
                worker.function(target)
        with pytest.raises(gw.UnknownTargetError, match="may not be called here"):
            worker.module("sum").optimizer("os:system")


def test_nobody_starts_another_worker_to_get_around_it(far: str) -> None:
    with gw.connect("tests-far") as bridge:
        with pytest.raises(gw.UsageError, match="restricts which targets"):
            bridge.worker("numpy")
        assert [worker.name for worker in bridge.workers()] == ["w"]
        bridge["w"].restart()
        with pytest.raises(gw.UnknownTargetError, match="may not be called here"):
            bridge["w"].function("os:system")


# ---- Over tcp ------------------------------------------------------------------------------------------------------


def test_a_function_is_called_over_tcp_with_keys(far: str, alice: Path) -> None:
    with gw.connect(far) as bridge:
        worker = bridge["w"]
        assert worker.info["carried_by"] == "messages"
        double = worker.function("far_ops:double")
        for n in (0, 1, 1000, 1 << 20):
            x = np.arange(n, dtype=np.float64)
            np.testing.assert_array_equal(double(x), 2 * x)
        before = float(worker.module("sum")(0))
        assert float(worker.module("sum")(np.full(5000, 2.0))) == before + 10_000
        with gw.connect("tests-far") as near:
            assert float(near["w"].module("sum")(0)) == before + 10_000, "the same worker"
        with pytest.raises(gw.UnknownTargetError, match="may not be called here"):
            worker.function("os:system")
        with pytest.raises(gw.UsageError, match="neither started nor ended"):
            bridge.worker("numpy")
        with pytest.raises(gw.UsageError, match="neither started nor ended"):
            worker.restart()
        answers: list[bool] = []

        def ask(i: int) -> None:
            answers.extend(bool(np.all(double(np.full(100, i)) == 2 * i)) for _ in range(20))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert answers == [True] * 80
        with pytest.raises(gw.DeadlineError):
            worker.function("far_ops:sleep").options(timeout=0.2)(1.0)
        assert double(1) == 2


def test_a_worker_at_tcp_that_does_not_welcome_leaves_nothing_here(
    far: str, alice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greeting = far_connection.hello_of
    monkeypatch.setattr(far_connection, "hello_of", lambda *about: greeting(*about)._replace(protocol=0))
    with gw.connect(far) as bridge:
        with pytest.raises(gw.VersionMismatchError, match="the client 0"):
            bridge["w"]
        assert not bridge._memory._peers
        assert not lines._in_flight
        monkeypatch.undo()
        monkeypatch.setenv("GRADWIRE_KEYS", str(alice))
        assert bridge["w"].function("far_ops:double")(2) == 4


def test_who_comes_over_tcp_during_a_long_call_waits_for_its_turn(
    far: str, alice: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The call ends once it is told what it waits for."""
    with (
        contextlib.redirect_stderr(io.StringIO()) as said,
        gw.connect("tests-far") as bridge,
        gw.connect(far) as late,
        ThreadPoolExecutor(1) as pool,
    ):
        stay = bridge["w"].function("far_ops:stay")
        long = stay.submit(str(tmp_path / "begun"), str(tmp_path / "end"))
        until((tmp_path / "begun").exists)
        monkeypatch.setattr(shared_worker, "HANDSHAKE_S", 0.3)
        there = pool.submit(lambda: late["w"])
        try:
            until(lambda: "'w' is in somebody's call" in said.getvalue())
        finally:
            (tmp_path / "end").touch()
        assert there.result(60).function("far_ops:double")(2) == 4
        long.result(60)


def test_calls_over_tcp_are_traced_and_the_bridge_can_be_closed_then(
    far: str, alice: Path, tmp_path: Path
) -> None:
    with gw.connect(far) as bridge:
        double = bridge["w"].function("far_ops:double")
        with bridge.trace(tmp_path / "t.json") as trace:
            double(np.ones(3))
        np.testing.assert_array_equal(double(np.ones(3)), [2, 2, 2])
    assert trace.calls == 1


def test_by_a_file_that_names_address_and_keys(
    far: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADWIRE_KEYS", raising=False)
    (folder / "remote.toml").write_text(f'address = "{far}"\nkeys = "keys/clients/alice"\n')
    with gw.connect(folder / "remote.toml") as bridge:
        assert bridge["w"].function("far_ops:double")(2) == 4


def test_a_key_that_is_not_known_is_refused_by_zap(
    far: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.create_server(tmp_path / "others")
    mallory = keys.add_client(tmp_path / "others", "mallory")
    (mallory / "server.key").write_text((folder / "keys/server/public.key").read_text())
    monkeypatch.setenv("GRADWIRE_KEYS", str(mallory))
    with pytest.raises(gw.ConnectError, match="does not know this client's key"):
        gw.connect(far)


def test_a_client_is_locked_out_by_removing_its_key(
    far: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["keys", "add", str(folder / "keys"), "bob"]) == 0
    monkeypatch.setenv("GRADWIRE_KEYS", str(folder / "keys/clients/bob"))
    with gw.connect(far) as bridge:
        assert bridge["w"].function("far_ops:double")(2) == 4
    (folder / "keys/server/clients/bob.key").unlink()
    with pytest.raises(gw.ConnectError, match="does not know this client's key"):
        gw.connect(far)


def test_a_server_that_has_another_key_is_not_believed(
    far: str, alice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.create_server(tmp_path / "others")
    for name in ("public.key", "secret.key", "server.key"):
        source = tmp_path / "others/server/public.key" if name == "server.key" else alice / name
        (tmp_path / name).write_text(source.read_text())
        (tmp_path / name).chmod(0o600)
    monkeypatch.setenv("GRADWIRE_KEYS", str(tmp_path))
    with pytest.raises(gw.ConnectError, match="hung up during the handshake"):
        gw.connect(far)


def test_nobody_there_is_told_at_once(alice: Path) -> None:
    with pytest.raises(gw.ConnectError, match="nobody listens there"):
        gw.connect(f"tcp://127.0.0.1:{free_port()}")


# ---- Never in the clear --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    ["tcp://::1:5555", "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999", "tcp://127.0.0.1", "tcp://a/b:5555"],
)
def test_what_is_no_address_is_refused_at_both_ends(address: str, folder: Path, alice: Path) -> None:
    with pytest.raises(gw.UsageError, match="an address is tcp://HOST:PORT"):
        gw.connect(address)
    done = gradwire("up", str(folder / "far.toml"), "--listen", address, "--keys", str(folder / "keys"))
    assert done.returncode == 2 and "tcp://HOST:PORT" in done.stderr


def test_nobody_connects_to_every_machine(alice: Path) -> None:
    with pytest.raises(gw.UsageError, match="an address is tcp://HOST:PORT"):
        gw.connect("tcp://*:5555")


def test_ipv6_is_an_address_too(folder: Path, alice: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("this system has no IPv6")
    (folder / "six.toml").write_text(FILE.format(name="tests-six"))
    address = f"tcp://[::1]:{port}"
    done = gradwire("up", str(folder / "six.toml"), "--listen", address, "--keys", str(folder / "keys"))
    assert done.returncode == 0, done.stderr
    try:
        with gw.connect(address) as bridge:
            assert bridge["w"].function("far_ops:double")(2.0) == 4.0
    finally:
        assert gradwire("stop", "--all", "--broker", "tests-six").returncode == 0


@contextlib.contextmanager
def passing_on(address: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Another address of the broker's, and what breaks all connections to it by that."""
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends: list[socket.socket] = []

        def copy(source: socket.socket, sink: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while piece := source.recv(1 << 16):
                    sink.sendall(piece)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    pair = server.accept()[0], socket.create_connection((host, int(port)))
                    ends.extend(pair)
                    for way in (pair, pair[::-1]):
                        threads.submit(copy, *way)

        def cut() -> None:
            for end in (server, *ends):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        with ThreadPoolExecutor(16) as threads:
            threads.submit(accept)
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}", cut
            cut()
        for end in ends:
            end.close()


def test_a_connection_that_breaks_is_no_death_of_the_worker(far: str, alice: Path, tmp_path: Path) -> None:
    with passing_on(far) as (address, cut), gw.connect(address) as bridge, ThreadPoolExecutor(1) as threads:
        stay = bridge["w"].function("far_ops:stay")
        call = threads.submit(stay, str(tmp_path / "begun"), str(tmp_path / "end"))
        until((tmp_path / "begun").exists)
        cut()
        with pytest.raises(
            gw.WorkerDiedError, match=r"may go on with this call: the connection to the broker ended"
        ) as caught:
            call.result(60)
        assert caught.value.signal is None and not caught.value.retry_safe and caught.value.was_running
        with pytest.raises(gw.WorkerDiedError, match=r"connect anew") as caught:
            stay("", "")
        assert not caught.value.was_running and "this call" not in str(caught.value)
        (tmp_path / "end").touch()
    with gw.connect(far) as bridge:
        assert bridge["w"].function("far_ops:double")(2.0) == 4.0


def test_tcp_without_keys_is_refused_before_a_byte_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADWIRE_KEYS", raising=False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.3)
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(gw.UsageError, match="never in the clear"):
            gw.connect(address)
        with pytest.raises(UsageError, match="in the clear"):
            sockets.connect_dealer(address, b"me")
        with pytest.raises(TimeoutError):
            listener.accept()
    with pytest.raises(UsageError, match="in the clear"):
        sockets.bind_router("tcp://127.0.0.1:*")


def test_a_broker_does_not_listen_without_keys(folder: Path) -> None:
    (folder / "clear.toml").write_text('[workers.w]\nframework = "numpy"\n')
    done = gradwire("up", str(folder / "clear.toml"), "--listen", "tcp://127.0.0.1:5999")
    assert done.returncode == 2 and "never in the clear" in done.stderr
    done = gradwire(
        "up", str(folder / "clear.toml"), "--listen", "tcp://127.0.0.1:5999", "--keys", str(folder)
    )
    assert done.returncode == 1 and "secret.key cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
    done = gradwire("up", str(folder / "clear.toml"), "--listen", "127.0.0.1", "--keys", str(folder))
    assert done.returncode == 2 and "tcp://HOST:PORT" in done.stderr


def test_r65_a_port_that_is_taken_is_named(far: str, folder: Path) -> None:
    (folder / "taken.toml").write_text('[workers.w]\nframework = "numpy"\n')
    done = gradwire("up", str(folder / "taken.toml"), "--listen", far, "--keys", str(folder / "keys"))
    assert done.returncode == 1 and f"it cannot listen at {far}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_peer_without_curve_is_not_heard(far: str) -> None:
    """A plain ZeroMQ client that knows the token of the card gets no answer, and the broker lives."""
    token = bytes.fromhex(card_of("tests-far").token)
    plain = zmq.Context.instance().socket(zmq.DEALER)
    try:
        plain.linger = 0
        plain.connect(far)
        plain.send(control.pack(control.Attach(control.PROTOCOL, token, 1)))
        assert not plain.poll(1000)
    finally:
        plain.close()
    with gw.connect("tests-far") as bridge:
        assert bridge["w"].alive


def test_a_far_client_cannot_end_anything_by_saying_so(far: str, alice: Path) -> None:
    dealer = sockets.connect_dealer(far, os.urandom(16), 10_000, keys.client_keys(alice))
    try:

        def ask(message: object) -> object:
            sockets.send_nowait(dealer, [control.pack(message)])
            return control.unpack(sockets.receive(dealer)[0])

        assert isinstance(ask(control.Attach(control.PROTOCOL, b"", 1)), control.Attached)
        present = ask(control.Look(1))
        assert isinstance(present, control.Present)
        assert present.endpoint.startswith("tcp://127.0.0.1:") and not present.tether_path
        assert isinstance(control.unpack(sockets.receive(dealer)[0]), control.Looked)
        for message in (control.ShutDown(1.0), control.Stop(present.incarnation, 1.0)):
            refused = ask(message)
            assert isinstance(refused, control.Refused) and "neither started nor ended" in refused.message
        assert isinstance(ask(control.Restart(2, present.incarnation)), control.Denied)
    finally:
        dealer.close()
    with gw.connect("tests-far") as bridge:
        assert bridge["w"].alive


# ---- Keys ----------------------------------------------------------------------------------------------------------


def test_keys_are_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    keys.create_server(tmp_path / "k")
    theirs = keys.add_client(tmp_path / "k", "carol")
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o700
    for secret in (tmp_path / "k/server/secret.key", theirs / "secret.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert keys.is_known(tmp_path / "k", (theirs / "public.key").read_text().strip())
    with pytest.raises(UsageError, match="has a key already"):
        keys.create_server(tmp_path / "k")
    with pytest.raises(UsageError, match="there is a client 'carol' already"):
        keys.add_client(tmp_path / "k", "carol")
    with pytest.raises(UsageError, match="a client's name is made of"):
        keys.add_client(tmp_path / "k", "../carol")
    with pytest.raises(UsageError, match="a client needs the folder of its own"):
        keys.client_keys(tmp_path / "k")
    (theirs / "secret.key").chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        keys.client_keys(theirs)
    (theirs / "server.key").write_text("no key\n")
    (theirs / "secret.key").chmod(0o600)
    with pytest.raises(UsageError, match="does not hold a key"):
        keys.client_keys(theirs)
