"""Real memory: private writes, leases that follow aliases, descriptors that could pull memory away, forks."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwire_wire.errors import MemoryExhaustedError, ProtocolError
from gradwire_wire.segments import (
    ForeignSegment,
    Lease,
    Ledger,
    OwnSegment,
    SharingUnavailableError,
    borrowed,
    files,
    holder_of,
    private_copies,
    system,
    take_memory,
)

MIB = 1 << 20
PAGE = mmap.PAGESIZE
N = 100_000  # R16: small tensors hide what large ones show


@pytest.fixture
def own() -> Iterator[OwnSegment]:
    segment = OwnSegment(1, 2 * MIB)
    yield segment
    segment.close()


@pytest.fixture
def foreign(own: OwnSegment) -> Iterator[ForeignSegment]:
    segment = ForeignSegment(os.dup(own.fd), own.nbytes)
    segment.map()
    yield segment
    segment.close()


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger()
    yield made
    made.close()


def lease(
    foreign: ForeignSegment, ledger: Ledger, offset: int = 0, count: int = N, loan: int = 1
) -> np.ndarray:
    return foreign.view((count,), "f4", None, Lease(foreign, offset, 4 * count, loan, ledger, True))


def marked(ledger: Ledger, loan: int = 1) -> bool:
    gc.collect()
    return ledger.first_marked(loan, loan + 1) == loan


def marked_soon(ledger: Ledger) -> bool:
    deadline = time.monotonic() + 60
    while not (is_marked := marked(ledger)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_marked


# ---- Views and private copies ------------------------------------------------------------------------------------------


def test_the_owner_writes_and_the_borrower_reads(
    own: OwnSegment, foreign: ForeignSegment, ledger: Ledger
) -> None:
    own.array((N,), "f4", PAGE)[:] = np.arange(N)
    view = lease(foreign, ledger, PAGE)
    assert view.flags.writeable and view.flags.aligned and np.array_equal(view, np.arange(N, dtype="f4"))


def test_what_a_borrower_writes_nobody_else_sees(
    own: OwnSegment, foreign: ForeignSegment, ledger: Ledger
) -> None:
    mine = own.array((N,), "f4", 0)
    mine[:] = 1
    view = lease(foreign, ledger)
    assert not foreign.is_changed(0, 4 * N)
    view[N // 2] = 7
    view += 1
    assert (mine == 1).all() and view[N // 2] == 8
    assert foreign.is_changed(0, 4 * N) and not foreign.is_changed(MIB, PAGE)


@pytest.mark.parametrize("where", [0, 1, N // 2, N - 1])
def test_a_private_copy_does_not_outlive_its_lease(
    where: int, own: OwnSegment, foreign: ForeignSegment, ledger: Ledger
) -> None:
    mine = own.array((N,), "f4", PAGE)
    for round in range(5):
        mine[:] = round
        view = lease(foreign, ledger, PAGE)
        assert (view == round).all(), "the next tenant's data is hidden by a private copy"
        view[where] = -1
        del view
        assert marked(ledger) and not foreign.is_changed(PAGE, 4 * N)
        ledger.clear(1)


def by_numpy(view: np.ndarray) -> None:
    view[12345] = -1


def by_the_kernel(view: np.ndarray) -> None:
    """read(2) into the view's memory."""
    with open("/dev/zero", "rb", buffering=0) as zeros:
        zeros.readinto(view[5000:5001])  # type: ignore[arg-type]


def by_another_thread(view: np.ndarray) -> None:
    thread = threading.Thread(target=by_numpy, args=(view,))
    thread.start()
    thread.join()


def by_madvise(view: np.ndarray) -> None:
    """Private copies that nobody wrote anything into."""
    address = view.ctypes.data & -PAGE
    assert not system.madvise(address, view.nbytes, system.MADV_POPULATE_WRITE)


@pytest.mark.parametrize("write", [by_numpy, by_the_kernel, by_another_thread, by_madvise])
def test_a_private_copy_of_a_large_slot_does_not_outlive_its_lease(
    write: Callable[[np.ndarray], None], ledger: Ledger
) -> None:
    """Its pages are looked at only if there was a page fault."""
    own = OwnSegment(9, 4 * MIB)
    foreign = ForeignSegment(os.dup(own.fd), own.nbytes)
    foreign.map()
    count = own.nbytes // 4
    mine = own.array((count,), "f4", 0)
    for round in range(4):
        mine[:] = round
        view = lease(foreign, ledger, 0, count)
        assert (view == round).all(), "the next tenant's data is hidden by a private copy"
        if round % 2:
            write(view)
        del view
        assert marked(ledger) and not foreign.is_changed(0, own.nbytes)
        ledger.clear(1)
    own.close()
    foreign.close()


def test_strides_scalars_and_types(own: OwnSegment, foreign: ForeignSegment, ledger: Ledger) -> None:
    own.array((6,), "i2", 0)[:] = np.arange(6)
    view = foreign.view((3, 2), "i2", (2, 6), Lease(foreign, 0, 12, 1, ledger, True))
    assert view.tolist() == [[0, 3], [1, 4], [2, 5]]
    scalar = foreign.view((), "i2", None, Lease(foreign, 10, 2, 2, ledger, True))
    assert scalar[()] == 5


def test_where_changes_cannot_be_known_they_are_assumed(
    own: OwnSegment, foreign: ForeignSegment, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unreadable in ({os.getpid(): -1}, {os.getpid(): own.fd}):  # hidden; or reading it fails
        monkeypatch.setattr(private_copies, "_pagemap", unreadable)
        own.array((N,), "f4", 0)[:] = 3
        view = lease(foreign, ledger)
        assert foreign.is_changed(0, 4 * N)
        view[0] = 1
        del view
        own.array((N,), "f4", 0)[:] = 4
        assert lease(foreign, ledger)[0] == 4
        ledger.clear(1)


def test_where_private_pages_cannot_be_dropped_the_slot_stays_leased(
    own: OwnSegment, foreign: ForeignSegment, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = lease(foreign, ledger)
    view[0] = 1
    monkeypatch.setattr(borrowed, "madvise", lambda *_: -1)
    del view
    assert not marked(ledger)


def test_after_mlockall_pages_are_still_the_owners() -> None:
    code = (
        "import ctypes, os, sys; from gradwire_wire.segments import *\n"
        "own = OwnSegment(1, 1 << 20); libc = ctypes.CDLL(None)\n"
        "if libc.mlockall(3): sys.exit(77)\n"
        "f = ForeignSegment(os.dup(own.fd), 1 << 20); f.map()\n"
        "own.array((9,), 'f4', 0)[:] = 5\n"
        "v = f.view((9,), 'f4', None, Lease(f, 0, 36, 1, Ledger(), True)); assert (v == 5).all(), v"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == 77:
        pytest.skip("mlockall is not allowed here")
    assert done.returncode == 0, done.stderr


# ---- A lease lasts as long as any alias --------------------------------------------------------------------------------

ALIASES: dict[str, Callable[[np.ndarray], Any]] = {
    "a slice": lambda v: v[10:20],
    "a slice of a transposed reshape": lambda v: v.reshape(100, -1).T[3:5, ::2],
    "one element": lambda v: v[5:6].reshape(()),
    "another dtype": lambda v: v.view("u1")[7:9],
    "asarray": np.asarray,
    "a memoryview": memoryview,
    "frombuffer of a memoryview": lambda v: np.frombuffer(memoryview(v)[8:80], "f4"),
    "a broadcast": lambda v: np.broadcast_to(v[:1], (9, 9)),
    "a matrix view": lambda v: v[:100].reshape(10, 10).diagonal(),
    "an array interface": lambda v: np.asarray(
        type("X", (), {"__array_interface__": v.__array_interface__, "keep": v})()
    ),
    "dlpack to numpy": np.from_dlpack,
    "ctypes": lambda v: (ctypes.c_char * v.nbytes).from_buffer(v),
}


@pytest.mark.parametrize("name", ALIASES)
def test_a_lease_lasts_as_long_as_any_alias(name: str, foreign: ForeignSegment, ledger: Ledger) -> None:
    alias = ALIASES[name](lease(foreign, ledger))
    assert not marked(ledger)
    del alias
    assert marked(ledger) and not foreign.leases


def test_a_lease_lasts_through_torch(own: OwnSegment, foreign: ForeignSegment, ledger: Ledger) -> None:
    torch = pytest.importorskip("torch")
    own.array((N,), "f4", 0)[:] = 2
    makers = (torch.from_numpy, torch.from_dlpack, torch.as_tensor)
    for make in makers:
        tensor = make(lease(foreign, ledger)).reshape(100, -1)[3:5].T
        assert not marked(ledger) and float(tensor.sum()) == 2 * tensor.numel()
        tensor.add_(1)
        assert (own.array((N,), "f4", 0) == 2).all()
        del tensor
        assert marked(ledger)
        ledger.clear(1)


def test_a_lease_lasts_through_jax(own: OwnSegment, foreign: ForeignSegment, ledger: Ledger) -> None:
    jax = pytest.importorskip("jax")
    own.array((N,), "f4", 0)[:] = 2
    for make in (jax.device_put, jax.dlpack.from_dlpack):
        array = make(lease(foreign, ledger))
        array.block_until_ready()
        is_alias = not marked(ledger)
        if not is_alias:  # then it has a copy, and the slot may be rewritten
            own.array((N,), "f4", 0)[:] = 9
        assert float(array.sum()) == 2 * N
        own.array((N,), "f4", 0)[:] = 2
        del array
        assert marked_soon(ledger)  # threads of XLA's let go of it when they get to it
        ledger.clear(1)
    held = lease(foreign, ledger)
    doubled = jax.jit(lambda x: x * 2)(held)
    del held
    assert float(doubled.sum()) == 4 * N
    del doubled
    assert marked_soon(ledger)


def test_finalizers_may_run_in_any_thread(foreign: ForeignSegment, ledger: Ledger) -> None:
    views = [lease(foreign, ledger, loan * 2 * PAGE, 100, loan) for loan in range(1, 200)]
    for view in views:
        view[0] = 1
    parts = [views[i::4] for i in range(4)]
    views.clear()
    del view
    threads = [threading.Thread(target=part.clear) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ledger.first_marked(loan, loan + 1) == loan for loan in range(1, 200))
    assert not foreign.is_changed(0, MIB)


def test_views_outlive_the_segment_object(own: OwnSegment, ledger: Ledger) -> None:
    own.array((N,), "f4", 0)[:] = 6
    foreign = ForeignSegment(os.dup(own.fd), own.nbytes)
    foreign.map()
    view, gone = lease(foreign, ledger), weakref.ref(foreign)
    foreign.close()
    del foreign
    own.close()
    assert (view == 6).all() and gone() is not None
    del view
    assert marked(ledger) and gone() is None


def test_who_holds_an_array(own: OwnSegment, foreign: ForeignSegment, ledger: Ledger) -> None:
    view = lease(foreign, ledger)
    assert type(holder_of(view[3:7].reshape(2, 2).T)) is Lease and holder_of(view).loan == 1
    holder = object()
    held = own.held_array((N,), "f4", 0, holder)
    assert holder_of(held) is holder_of(held[::2]) is holder
    for other in (np.zeros(3), own.array((3,), "f4", 0), np.frombuffer(b"abcd", "u1"), np.zeros((3, 4))[1]):
        assert holder_of(other) is None


# ---- Descriptors that could pull memory away -----------------------------------------------------------------------------


def memfd(nbytes: int, seals: int = files.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("gradwire-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        files.fcntl.fcntl(fd, files.F_ADD_SEALS, seals)
    return fd


def regular_file(mode: int = 0o644, nbytes: int = MIB) -> int:
    """One that others could open."""
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.fchmod(fd, mode)
    os.ftruncate(fd, nbytes)
    return fd


def named_file() -> int:
    fd, path = tempfile.mkstemp(prefix="gwt-", dir="/tmp")
    os.ftruncate(fd, MIB)
    os.link(path, f"{path}-too")
    os.unlink(path)
    leftovers.append(f"{path}-too")
    return fd


leftovers: list[str] = []


BAD_DESCRIPTORS: dict[str, tuple[Callable[[], int], int]] = {
    "unsealed": (lambda: memfd(MIB, 0), MIB),
    "sealed against growth only": (lambda: memfd(MIB, files.F_SEAL_GROW), MIB),
    "smaller than announced": (lambda: memfd(MIB), MIB + 1),
    "much smaller than announced": (lambda: memfd(MIB), 2**64 - 1),
    "of no bytes": (lambda: memfd(MIB), 0),
    "a file that others can open": (regular_file, MIB),
    "a file that has a name": (named_file, MIB),
    "a nameless file, but too short": (lambda: regular_file(0o600, 4096), MIB),
    "a folder": (lambda: os.open("/tmp", os.O_RDONLY), MIB),
    "a device": (lambda: os.open("/dev/zero", os.O_RDWR), MIB),
    "a socket": (lambda: socket.socket(socket.AF_UNIX).detach(), MIB),
}


@pytest.mark.parametrize("name", BAD_DESCRIPTORS)
def test_R57_a_descriptor_that_could_pull_memory_away_is_refused_and_closed(name: str) -> None:
    make, nbytes = BAD_DESCRIPTORS[name]
    fd = make()
    with pytest.raises(ProtocolError):
        ForeignSegment(fd, nbytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    gc.collect()  # no exception in a finalizer of what never came to be
    while leftovers:
        os.unlink(leftovers.pop())


@pytest.mark.parametrize(
    "make",
    [
        lambda: memfd(Ledger.ENTRIES, 0),
        lambda: memfd(Ledger.ENTRIES - 1),
        lambda: memfd(Ledger.ENTRIES + 1),
        lambda: regular_file(0o644, Ledger.ENTRIES),
        lambda: regular_file(0o600, Ledger.ENTRIES + 1),
        lambda: os.open("/dev/zero", os.O_RDWR),
    ],
)
def test_R57_a_ledger_that_could_pull_memory_away_is_refused_and_closed(make: Callable[[], int]) -> None:
    fd = make()
    with pytest.raises(ProtocolError):
        Ledger.received([fd])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_the_peer_cannot_shrink_what_was_accepted(own: OwnSegment, foreign: ForeignSegment) -> None:
    for fd in (own.fd, foreign.fd):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 0)


def test_descriptors_are_closed_with_their_objects(footprint: Callable[[], tuple[int, int]]) -> None:
    before = footprint()
    for _ in range(20):
        own = OwnSegment(1, MIB)
        foreign = ForeignSegment(os.dup(own.fd), MIB)
        foreign.map()
        ledger = Ledger()
        Ledger.received([os.dup(ledger.fd)])
    del own, foreign, ledger
    assert footprint() == before


def test_a_closed_descriptor_is_not_closed_again(own: OwnSegment) -> None:
    own.close()
    fd = os.open("/dev/null", os.O_RDONLY)  # takes the number that was freed
    own.close()
    del own
    gc.collect()
    os.fstat(fd)
    os.close(fd)


# ---- Too little memory -----------------------------------------------------------------------------------------------------


def test_R50_too_little_is_an_exception_with_both_numbers(footprint: Callable[[], tuple[int, int]]) -> None:
    before = footprint()
    with pytest.raises(
        MemoryExhaustedError, match=rf"{32 * MIB} bytes .*needed, {16 * MIB} free \(GRADWIRE_MAX_SHARED_BYTES"
    ):
        OwnSegment(1, 32 * MIB, limit=16 * MIB)
    with pytest.raises(MemoryExhaustedError, match="this machine"):
        OwnSegment(1, 1 << 46)
    assert footprint() == before


def test_what_the_system_refuses_is_an_exception_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        if offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.ftruncate(fd, max(os.fstat(fd).st_size, length))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryExhaustedError, match=f"{32 * MIB} bytes .*No space"):
        OwnSegment(1, 32 * MIB)


def test_an_interrupt_while_memory_is_taken_gives_it_back(
    own: OwnSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.give_back(0, own.nbytes)
    allocate = os.posix_fallocate

    def interrupted(fd: int, offset: int, length: int) -> None:
        allocate(fd, offset, length)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take_memory(own.fd, 0, own.nbytes)
    assert os.fstat(own.fd).st_blocks == 0


def test_memory_is_given_back_and_taken_again(own: OwnSegment) -> None:
    view = own.array((own.nbytes,), "u1", 0)
    view[:] = 7
    assert os.fstat(own.fd).st_blocks * 512 == own.nbytes
    own.give_back(PAGE, own.nbytes - PAGE)
    assert os.fstat(own.fd).st_blocks * 512 == PAGE and view[0] == 7 and view[PAGE] == 0
    own.give_back(0, own.nbytes)
    take_memory(own.fd, 0, own.nbytes)
    assert os.fstat(own.fd).st_blocks * 512 == own.nbytes


def test_no_descriptor_left_is_too_little_memory_and_not_no_sharing() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
    fillers = []
    try:
        with pytest.raises(MemoryExhaustedError, match="Too many open files"):
            while True:
                fillers.append(OwnSegment(1, PAGE))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_memfd_is_no_sharing(without_memfd: list[str]) -> None:
    with pytest.raises(SharingUnavailableError):
        OwnSegment(1, MIB)
    ledger = Ledger()
    assert not ledger.is_shared and ledger.descriptors == [] and not Ledger.received([]).is_shared
    ledger.mark(3)
    assert ledger.first_marked(1, 10) == 3
    ledger.cancel(5)
    assert ledger.is_cancelled(5)


@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_r63_without_memfd_segments_are_nameless_files_that_are_read(
    without_memfd: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tmpfile: bool
) -> None:
    if not has_tmpfile:
        real = os.open

        def no_tmpfile(path: Any, flags: int, *more: Any, **others: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "not here")
            return real(path, flags, *more, **others)

        monkeypatch.setattr(os, "open", no_tmpfile)
    ledger, own = Ledger(str(tmp_path)), OwnSegment(1, MIB, folder=str(tmp_path))
    assert list(tmp_path.iterdir()) == [] and os.fstat(own.fd).st_mode & 0o777 == 0o600
    seen = Ledger.received([os.dup(ledger.fd)])
    assert ledger.carrier == seen.carrier == "files" and seen.is_shared
    own.array((100,), "f4", PAGE)[...] = 3
    foreign = ForeignSegment(os.dup(own.fd), MIB)
    foreign.map()
    view = foreign.view((100,), np.dtype("f4"), None, Lease(foreign, PAGE, 400, 7, ledger, True))
    gc.collect()
    assert seen.first_marked(1, 100) == 7, "it is a copy: the loan is over"
    own.array((100,), "f4", PAGE)[...] = 4
    assert (view == 3).all() and holder_of(view) is None and view.flags.writeable
    seen.clear(7)
    ledger.cancel(67)
    assert seen.first_marked(1, 100) == -1 and seen.is_cancelled(67) and not seen.is_cancelled(3)


def test_r57_a_file_that_is_cut_off_is_an_error_and_no_sigbus(
    without_memfd: list[str], tmp_path: Path
) -> None:
    ledger, own = Ledger(str(tmp_path)), OwnSegment(1, MIB, folder=str(tmp_path))
    foreign = ForeignSegment(os.dup(own.fd), MIB)
    foreign.map()
    seen = Ledger.received([os.dup(ledger.fd)])
    for fd in (own.fd, ledger.fd):
        os.ftruncate(fd, 100)
    with pytest.raises(ProtocolError, match="shorter"):
        foreign.view((100,), np.dtype("f4"), None, Lease(foreign, PAGE, 400, 7, ledger, True))
    assert seen.first_marked(200, 60_000) == -1 and not seen.is_cancelled(0)
    seen.mark(300)
    assert ledger.first_marked(200, 1000) == 300


def test_r63_too_little_room_in_the_folder_is_too_little_memory(
    without_memfd: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryExhaustedError, match=r"1048576 bytes.*No space left"):
        OwnSegment(1, MIB, folder=str(tmp_path))


def test_memfd_without_the_os_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")  # as in many conda and uv Pythons
    own = OwnSegment(1, MIB)
    assert os.readlink(f"/proc/self/fd/{own.fd}").startswith("/memfd:gradwire-1")
    assert not os.get_inheritable(own.fd)


# ---- The ledger ------------------------------------------------------------------------------------------------------------


def test_a_ledger_is_seen_on_both_sides(ledger: Ledger) -> None:
    other = Ledger.received([os.dup(ledger.fd)])
    assert other.is_shared and ledger.is_shared
    ledger.mark(17)
    assert other.first_marked(1, Ledger.LOANS) == 17
    other.clear(17)
    assert ledger.first_marked(1, Ledger.LOANS) == -1


def test_several_calls_can_be_cancelled_at_once(ledger: Ledger) -> None:
    ledger.cancel(5)
    ledger.cancel(6)  # the interrupt for 5 has not arrived yet
    assert ledger.is_cancelled(5) and ledger.is_cancelled(6)
    assert not any(ledger.is_cancelled(i) for i in (1, 4, 7, 5 + Ledger.CANCELLED, 2**64 - 1))
    ledger.cancel(2**64 - 1)
    assert ledger.is_cancelled(2**64 - 1)


# ---- Forks -----------------------------------------------------------------------------------------------------------------

FORK = """
import gc, os, sys, numpy as np
from gradwire_wire.segments import *
N = 100_000
own = OwnSegment(1, 4 << 20); theirs = ForeignSegment(os.dup(own.fd), own.nbytes); theirs.map(); ledger = Ledger()
def lend(loan, value):
    offset = (loan - 1) << 20
    own.array((N,), "f4", offset)[:] = value
    return theirs.view((N,), "f4", None, Lease(theirs, offset, 4 * N, loan, ledger, True))
a, b = lend(1, 1.0), lend(2, 2.0)
a[5] = -1.0
go, ready = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    del b; gc.collect()                        # ends nothing: the parent still has it
    assert ledger.first_marked(1, 9) == -1
    a[6] = -2.0                                # nobody else's business
    os.write(ready[1], b"x"); os.read(go[0], 1)  # meanwhile the slot has a new tenant
    ok = a[5] == -1 and a[6] == -2 and (a[7:] == 1).all()
    del a; gc.collect()
    os._exit(0 if ok else 3)
os.read(ready[0], 1)
assert a[5] == -1 and a[6] == 1, "the child wrote here"
del a; gc.collect()
assert ledger.first_marked(1, 9) == 1
ledger.clear(1)
c = lend(1, 7.0)                               # reused while the child still looks at the old
assert (c == 7).all() and (b == 2).all()
os.write(go[1], b"x")
assert os.waitpid(pid, 0)[1] == 0, "the child's view changed"
assert (c == 7).all() and (b == 2).all() and ledger.first_marked(1, 9) == -1
del b, c; gc.collect()
assert ledger.first_marked(1, 9) == 1 and ledger.first_marked(2, 9) == 2 and not theirs.is_changed(0, own.nbytes)
"""


def test_R02_live_leases_stay_right_in_both_after_a_fork() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_R02_what_a_forked_child_writes_into_shared_memory_is_its_own() -> None:
    """As it is with all other memory. A parameter, or an array of `Bridge.empty`, was the parent's too."""
    code = """
import os, numpy as np
from gradwire_wire.segments import *
own = OwnSegment(1, 1 << 20)
theirs = ForeignSegment(os.dup(own.fd), own.nbytes); theirs.map()
a = own.array((1000,), "f8", 4096)
a[:] = 3.0
pid = os.fork()
if pid == 0:
    ok = (a == 3).all()
    a[:] = -1.0
    os._exit(0 if ok and (a == -1).all() else 3)
assert os.waitpid(pid, 0)[1] == 0
assert (a == 3).all(), "the child wrote here"
a[:] = 4.0
assert (theirs.view((1000,), "f8", None, Lease(theirs, 4096, 8000, 1, Ledger(), True)) == 4).all(), "it is shared as before"
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_at_exit_nothing_is_returned() -> None:
    """A view may be in use by other finalizers until the very end."""
    code = (
        "import os, sys, atexit; from gradwire_wire.segments import *\n"
        "own = OwnSegment(1, 1 << 20); f = ForeignSegment(os.dup(own.fd), 1 << 20); f.map()\n"
        "ledger = Ledger.received([int(sys.argv[1])])\n"
        "v = f.view((9,), 'f4', None, Lease(f, 0, 36, 1, ledger, True))"
    )
    ledger = Ledger()
    done = subprocess.run(
        [sys.executable, "-c", code, str(ledger.fd)],
        pass_fds=[ledger.fd],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == b"", done.stderr
    assert ledger.first_marked(1, 9) == -1
