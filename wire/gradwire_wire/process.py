"""The first things a process of gradwire does: what it may not inherit, and that it does not outlive its parent."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time

from gradwire_wire.errors import MemoryExhaustedError
from gradwire_wire.interruption import came_from_handler

__all__ = [
    "DUMP_STACK",
    "INTERRUPT",
    "RAISE_LIMIT",
    "RAISE_PROCESSES",
    "check_descriptors",
    "check_threads",
    "die_with_parent",
    "fill_standard_descriptors",
    "is_stopped",
    "lacks_descriptors",
    "no_thread",
    "open_pidfd",
    "raise_descriptor_limit",
    "reset_signals",
]

PR_SET_PDEATHSIG = 1
NR_PIDFD_OPEN = 434  # the same on every architecture
ENOUGH_DESCRIPTORS = 65536
DUMP_STACK = signal.SIGUSR2
"""A worker whose start takes too long answers it by writing the stacks of its threads."""

INTERRUPT = signal.SIGURG
"""By which a broker asks a worker to end the call that runs, if that was abandoned. It is not SIGINT, for which the code of another call may have
a handler of its own just then; and who has none for this one ignores it."""


def reset_signals() -> None:
    """Nothing stays blocked or ignored because the parent had it so (an ignored SIGCHLD loses exit codes).

    SIGPIPE and SIGXFSZ stay ignored: Python makes errors of them.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def fill_standard_descriptors() -> None:
    """Open /dev/null at those of 0, 1 and 2 that are closed, as in ``program 2>&-`` and in many daemons.

    Otherwise sockets and segments get these numbers, C code's messages are written into them, and a child that is
    to inherit one of them finds its own stdin or stdout there.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def raise_descriptor_limit() -> None:
    """The soft limit on open files goes up as far as it may: libzmq aborts the process when it runs out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            pass  # the old limit serves until it does not


LACKING = (errno.EMFILE, errno.ENFILE)
RAISE_LIMIT = "raise the limit on open files (ulimit -n, and -Hn) of the program"
"""What to do about an error that `lacks_descriptors`."""


RAISE_PROCESSES = "raise the limit on threads and processes (ulimit -u, pids.max of the container)"
"""What to do where no more of these can be started (EAGAIN)."""


def lacks_descriptors(error: BaseException) -> bool:
    """Whether an OSError, or ZeroMQ's, says that too many files are open."""
    return getattr(error, "errno", None) in LACKING


def check_descriptors(count: int) -> None:
    """OSError where this process cannot open so many more files."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if came_from_handler(error):
            raise
        raise OSError(error.errno, error.strerror) from None
    finally:
        for fd in opened:
            os.close(fd)


def no_thread(problem: object) -> MemoryExhaustedError:
    """What is raised where this process cannot start a thread that it needs."""
    return MemoryExhaustedError(
        f"this process cannot start another thread: {problem}. End some, or {RAISE_PROCESSES}; a program that is ending starts none"
    )


def check_threads(count: int) -> None:
    """MemoryExhaustedError where this process cannot start so many more threads."""
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError) as error:
        if came_from_handler(error, 1):
            raise
        raise no_thread(error) from error
    finally:
        over.set()
        until = time.monotonic() + 1.0
        for thread in started:
            thread.join()
            while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < until:
                time.sleep(0.0005)  # Python is done with it, and the system still counts it


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    Also while C code holds the GIL, which no thread of our own could do. The caller checks `os.getppid`
    afterwards: the parent may have been gone already. An interpreter without ctypes goes without.
    """
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; False where that cannot be known."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process has ended. The caller closes it. Raises OSError.

    Pythons built against old kernel headers (conda's, uv's) lack ``os.pidfd_open``, though the kernel has it.
    """
    try:
        return _open_pidfd(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
        needed = "the system call pidfd_open is needed: Linux 5.3 or newer, and allowed in this container"
        raise OSError(error.errno, f"{error.strerror} ({needed})") from error


def _open_pidfd(pid: int) -> int:
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.syscall(NR_PIDFD_OPEN, pid, 0)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return fd
