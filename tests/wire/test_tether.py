"""The tether: descriptors, credentials, ends of file, and what is refused on it."""

from __future__ import annotations

import array
import gc
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire_wire import messages
from gradwire_wire.errors import ConnectError, DeadlineError, MemoryExhaustedError, ProtocolError
from gradwire_wire.messages import Hello, Refused, Segment, Welcome, pack
from gradwire_wire.tether import Tether, TetherClosedError, accept_tether, connect_tether, listen_tether


@pytest.fixture
def ends() -> Iterator[tuple[Tether, Tether]]:
    made = [Tether(s) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    yield made[0], made[1]
    for tether in made:
        tether.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Tether]]:
    """A bare socket to say anything with, and the tether that hears it."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tether = Tether(other)
    yield one, tether
    one.close()
    tether.close()


def test_packets_keep_their_borders_and_order(ends: tuple[Tether, Tether]) -> None:
    said = [
        Hello(1, b"token", bytes(16), 5),
        Welcome(1, bytes(16), 6, False, False),
        Refused("ProtocolError", "why"),
        messages.Collect(),
    ]
    for message in said:
        ends[0].send(message)
    heard = [ends[1].receive(1) for _ in said]
    assert heard == [(message, []) for message in said] and ends[1].receive(0) is None


def test_descriptors_arrive_close_on_exec_and_are_the_receivers(ends: tuple[Tether, Tether]) -> None:
    fds = [os.memfd_create(str(i)) for i in range(3)]
    ends[0].send(Segment(1, 2), fds)
    _, received = ends[1].receive(1) or ((), [])
    assert len(received) == 3 and not any(os.get_inheritable(fd) for fd in received)
    assert [os.fstat(fd).st_ino for fd in received] == [os.fstat(fd).st_ino for fd in fds]
    for fd in fds + received:
        os.close(fd)


def test_the_peer_is_known_by_the_kernel(ends: tuple[Tether, Tether]) -> None:
    assert (ends[0].peer_pid, ends[0].peer_uid) == (os.getpid(), os.getuid())


def test_end_of_file_is_news(ends: tuple[Tether, Tether]) -> None:
    ends[0].send(Segment(1, 2))
    ends[0].close()
    assert ends[0].fileno() == -1
    assert ends[1].receive(0) == (Segment(1, 2), [])  # what was said before the end is heard
    for timeout_s in (0, 1, 0):
        with pytest.raises(TetherClosedError):
            ends[1].receive(timeout_s)
    with pytest.raises(TetherClosedError):
        ends[1].send(Segment(1, 2))
    assert not ends[1].send_nowait(Segment(1, 2))


def test_what_was_said_is_heard_though_the_peer_ended_with_something_unread(
    ends: tuple[Tether, Tether],
) -> None:
    ends[0].send(Segment(1, 2))
    ends[1].send(Segment(3, 4))
    ends[0].close()
    assert ends[1].receive(0) == (Segment(1, 2), [])
    with pytest.raises(TetherClosedError):
        ends[1].receive(0)


def test_a_tether_closes_with_its_object(ends: tuple[Tether, Tether]) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tether, kept = Tether(one), Tether(other)
    del one, tether
    gc.collect()
    with pytest.raises(TetherClosedError):
        kept.receive(1)
    kept.close()


def test_a_closed_end_says_closed(ends: tuple[Tether, Tether]) -> None:
    ends[0].close()
    ends[0].close()
    with pytest.raises(TetherClosedError):
        ends[0].send(Segment(1, 2))
    with pytest.raises(TetherClosedError):
        ends[0].receive(0)
    assert not ends[0].send_nowait(Segment(1, 2))


def test_waiting_has_an_end(ends: tuple[Tether, Tether]) -> None:
    start = time.monotonic()
    assert ends[1].receive(0.1) is None
    assert time.monotonic() - start > 0.05


def test_a_peer_that_does_not_read_blocks_nobody(ends: tuple[Tether, Tether]) -> None:
    sent = 0
    while ends[0].send_nowait(Segment(sent, 1)):
        sent += 1
        assert sent < 100_000
    with pytest.raises(DeadlineError, match="stopped"):
        ends[0].send(Segment(sent, 1), timeout_s=0.1)
    heard = []
    while (packet := ends[1].receive(0)) is not None:
        heard.append(packet[0].number)
    assert heard == list(range(sent))
    assert ends[0].send_nowait(Segment(1, 1))


# ---- What is refused -------------------------------------------------------------------------------------------------------

REFUSED = {
    "random bytes": os.urandom(100),
    "text": b"hello",
    "a packet too long": pack(messages.Failed(1, "x" * 5000, "", "", "")),
    "half a message": pack(Segment(1, 2))[:-1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_R57_what_is_no_message_is_refused_and_its_descriptors_closed(
    name: str, raw: tuple[socket.socket, Tether], footprint: Callable[[], tuple[int, int]]
) -> None:
    one, tether = raw
    fd = os.memfd_create("gradwire-test")
    before = footprint()
    one.sendmsg([REFUSED[name]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd, fd]))])
    with pytest.raises(ProtocolError):
        tether.receive(1)
    assert footprint() == before
    one.send(pack(Segment(3, 4)))  # and the tether goes on
    assert tether.receive(1) == (Segment(3, 4), [])
    os.close(fd)


def test_R57_more_descriptors_than_allowed_are_refused_and_closed(
    raw: tuple[socket.socket, Tether], footprint: Callable[[], tuple[int, int]]
) -> None:
    one, tether = raw
    fd = os.memfd_create("gradwire-test")
    before = footprint()
    one.sendmsg([pack(Segment(1, 2))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * 50))])
    with pytest.raises(ProtocolError, match="cut short"):
        tether.receive(1)
    assert footprint() == before
    os.close(fd)


def test_an_empty_packet_is_an_end_and_its_descriptors_are_closed(
    raw: tuple[socket.socket, Tether], footprint: Callable[[], tuple[int, int]]
) -> None:
    one, tether = raw
    fd = os.memfd_create("gradwire-test")
    before = footprint()
    one.sendmsg([b""], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
    with pytest.raises(TetherClosedError):
        tether.receive(1)
    assert footprint() == before
    os.close(fd)


def test_no_descriptor_left_to_receive_loses_nothing(raw: tuple[socket.socket, Tether]) -> None:
    one, tether = raw
    fds = [os.memfd_create("gradwire-test") for _ in range(2)]
    one.sendmsg([pack(Segment(1, 2))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = [os.dup(0) for _ in range(3)]  # for what is received, and for the look whether it fits
    for fd in room:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(room) + 1, hard))
    fillers = []
    try:
        while True:
            try:
                fillers.append(os.dup(0))
            except OSError:
                break
        with pytest.raises(MemoryExhaustedError, match="too many files"):
            tether.receive(1)
        for filler in fillers:
            os.close(filler)
        fillers.clear()
        received = tether.receive(1)
        assert received is not None and len(received[1]) == 2, "the packet has waited"
        fds += received[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fds + fillers:
            os.close(fd)


# ---- Listening and connecting ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gwt-", dir="/tmp"))  # short: a socket's path has 107 bytes
    yield path
    for left in path.iterdir():
        left.unlink()
    path.rmdir()


def test_a_client_is_accepted(folder: Path) -> None:
    listener = listen_tether(str(folder / "t"))
    assert os.stat(folder / "t").st_mode & 0o777 == 0o600
    assert accept_tether(listener) is None
    client = connect_tether(str(folder / "t"), 1)
    worker = accept_tether(listener)
    assert worker is not None and worker.peer_pid == client.peer_pid == os.getpid()
    client.send(Segment(1, 2))
    assert worker.receive(1) == (Segment(1, 2), [])
    for tether in (client, worker):
        assert not os.get_inheritable(tether.fileno())
        tether.close()
    listener.close()


def test_a_client_that_went_away_again_is_an_end(folder: Path) -> None:
    listener = listen_tether(str(folder / "t"))
    connect_tether(str(folder / "t"), 1).close()
    worker = accept_tether(listener)
    assert worker is not None
    with pytest.raises(TetherClosedError):
        worker.receive(0)
    worker.close()
    listener.close()


@pytest.mark.parametrize("name", ["nobody", "no/such/folder", "x" * 200])
def test_nobody_listens(name: str, folder: Path, footprint: Callable[[], tuple[int, int]]) -> None:
    before = footprint()
    with pytest.raises(ConnectError, match="no worker listens"):
        connect_tether(str(folder / name), 1)
    assert footprint() == before


def test_a_socket_that_this_process_may_not_reach_any_more(folder: Path) -> None:
    listener = listen_tether(str(folder / "t"))
    is_root, mode = os.geteuid() == 0, folder.stat().st_mode
    os.chmod(folder, 0o700 if is_root else 0)
    try:
        if is_root:
            os.seteuid(65534)
        with pytest.raises(ConnectError, match=r"may not reach .*Permission denied.*os\.setuid"):
            connect_tether(str(folder / "t"), 1)
    finally:
        if is_root:
            os.seteuid(0)
        os.chmod(folder, mode)
        listener.close()


def test_a_worker_that_does_not_accept_is_waited_for_until_the_deadline(folder: Path) -> None:
    listener = listen_tether(str(folder / "t"))
    listener.listen(0)
    clients = [connect_tether(str(folder / "t"), 1)]
    with pytest.raises(DeadlineError):
        clients.extend(connect_tether(str(folder / "t"), 0.2) for _ in range(5))
    late = threading.Timer(0.1, lambda: [clients.append(accept_tether(listener)) for _ in range(3)])
    late.start()
    clients.append(connect_tether(str(folder / "t"), 10))
    late.join()
    for tether in clients:
        if tether is not None:
            tether.close()
    listener.close()


def test_a_path_that_is_taken_is_an_error_and_leaks_nothing(
    folder: Path, footprint: Callable[[], tuple[int, int]]
) -> None:
    before = footprint()
    listener = listen_tether(str(folder / "t"))
    for path in (folder / "t", folder / ("x" * 200), folder / "no" / "folder"):
        with pytest.raises(OSError):
            listen_tether(str(path))
    listener.close()
    assert footprint() == before


def test_no_descriptor_left_to_accept_with_is_nobody(folder: Path) -> None:
    listener = listen_tether(str(folder / "t"))
    client = connect_tether(str(folder / "t"), 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert accept_tether(listener) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    worker = accept_tether(listener)
    assert worker is not None
    for tether in (client, worker):
        tether.close()
    listener.close()
