"""Targets that die, count, wait and call others, in a numpy worker."""

from __future__ import annotations

import builtins
import contextlib
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np


def double(x: Any) -> Any:
    return x * 2


def until_there(x: Any, path: str) -> Any:
    """Returns once the caller's program has made that file."""
    while not os.path.exists(path):
        time.sleep(0.01)
    return x


def tell_and_nap(x: Any, path: str, seconds: float) -> Any:
    """Makes that file first."""
    Path(path).touch()
    return nap(x, seconds)


def nap(x: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return x


double.spec = lambda x: x  # type: ignore[attr-defined]
nap.spec = lambda x, seconds: x  # type: ignore[attr-defined]


def leave_alarm(x: Any, note: str, base: str) -> Any:
    """A handler of SIGALRM stays, which makes that file and raises once nobody calls; and a thread."""

    def ring(_: int, frame: Any) -> None:
        if frame.f_code.co_name != "poll":
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return
        Path(note).touch()
        raise {"TimeoutError": TimeoutError, "BaseException": BaseException}[base]("alarm")

    threading.Thread(target=time.sleep, args=(600,), daemon=base == "TimeoutError").start()
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return x


def pid(x: Any) -> Any:
    return x + os.getpid()


def die_once(x: Any, note: str) -> Any:
    """Killed where there is no note yet; counts its runs in it."""
    path = Path(note)
    runs = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (runs + 1))
    if not runs:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def stay_with(x: Any, how: str, begun: str, end: str) -> Any:
    """Until that file is there, with a handler of SIGINT of its own."""
    signal.signal(signal.SIGINT, getattr(signal, how))
    Path(begun).touch()
    while not Path(end).exists():
        time.sleep(0.01)
    return x


def many(count: int) -> Any:
    return np.ones(count)


def limit_files(nbytes: int) -> None:
    """The soft limit alone, which can be raised again."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def deafen(x: Any) -> Any:
    """Cut what tells the client that the worker is there, which stays."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as connection:
            if str(connection.getsockname()).endswith(".mem") and connection.getpeername() is not None:
                connection.shutdown(socket.SHUT_RDWR)
    return x


def break_len(x: Any) -> Any:
    """Nothing of Python's works any more, messages about that included."""
    builtins.len = None  # type: ignore[assignment]
    return x


def leave(x: Any, code: int) -> Any:
    os._exit(code)


def fork_apart(x: Any, note: str) -> Any:
    """A child of its own session, which has all that the worker had open, and goes on without it."""
    child = os.fork()
    if not child:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    Path(note).write_text(str(child))
    return x


def fork_and(x: Any, how: str) -> int:
    """The exit code of a child that leaves this function like that; the child is not waited for by ``exec``."""
    child = os.fork()
    if not child:
        exec(how, {})
        return 77  # as the call's result, were anybody to send it
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ignore_interrupts(x: Any, how: str) -> Any:
    signal.signal(signal.SIGINT, getattr(signal, how))
    return x


def on_main_thread(x: Any) -> Any:
    return x * (threading.current_thread() is threading.main_thread())


class Counter:
    """A module with a state."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: Any) -> Any:
        self.count += 1
        return x * 0 + self.count


def dot(x: Any, y: Any) -> Any:
    return np.float64(x @ y)


dot.vjp = lambda x, y: (dot(x, y), lambda bar: (bar * y, bar * x))  # type: ignore[attr-defined]


def nap_after_deafness(x: Any) -> Any:
    """Long, and the first signal is lost, as one is that comes just before a system call that waits."""
    import signal

    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(0.8)
    signal.signal(signal.SIGINT, heard)
    time.sleep(60)
    return x


def slow_dot(x: Any, y: Any) -> Any:
    return np.float64(x @ y)


def tell_begun() -> None:
    """Make the file that the caller's program has named, if it has."""
    if "BEGUN" in os.environ:
        Path(os.environ["BEGUN"]).touch()


def until_ended(x: Any) -> Any:
    """Tells that it has begun, and returns once that file has a companion."""
    tell_begun()
    return until_there(x, os.environ["BEGUN"] + " and ended")


def _slow_dot_vjp(x: Any, y: Any) -> Any:
    def pullback(bar: Any) -> Any:
        tell_begun()
        time.sleep(60)
        return bar * y, bar * x

    return slow_dot(x, y), pullback


slow_dot.vjp = _slow_dot_vjp  # type: ignore[attr-defined]


def main_dot(x: Any) -> Any:
    return x.sum()


main_dot.vjp = lambda x: (main_dot(x), lambda bar: (on_main_thread(np.ones_like(x)),))  # type: ignore[attr-defined]


def slow_factory() -> Any:
    tell_begun()
    time.sleep(60)
    return double


def eat(x: Any, limit: int, nbytes: int) -> Any:
    """Fails for want of memory; the limit is lifted again."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (nbytes >> 1), hard))
    try:
        return np.ones(nbytes >> 3).sum() + x
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def total(x: Any, i: int) -> float:
    return float(x.sum()) + i


def ends(x: Any, middle: int) -> Any:
    return float(x[0]), float(x[-1]), float(x[middle]), x


def same(x: Any) -> Any:
    return x


def chatter(x: Any) -> Any:
    print("by print")
    os.write(2, b"by descriptor\n")
    return x


_taken: list[int] = []


def take_descriptors() -> None:
    """All that this process may still open."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            _taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass


def descriptor_limit() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# ---- Calling others ------------------------------------------------------------------------------------------------


class _NoLink:
    """What a connection asks of a broker, where there is none in this process."""

    broker_alive = True
    recorder = None

    def watch(self, fd: int, act: Any) -> None: ...

    def unwatch(self, fd: int) -> None: ...

    def tell_of_death(self, incarnation: bytes, act: Any) -> None: ...

    def interrupt(self, incarnation: bytes) -> None: ...

    def death_of(self, incarnation: bytes, wait_s: float = 0.0) -> None: ...


_remotes: dict[Any, Any] = {}


def remote_of(facts: list[Any], target: str) -> Any:
    """A proxy in this process of what another worker has."""
    from gradwire.background import Background
    from gradwire.connection import Connection
    from gradwire.handle import Handle
    from gradwire.remote import Remote
    from gradwire.worker_records import WorkerFacts
    from gradwire_wire.exchange import Memory
    from gradwire_wire.structures import positional

    key = (facts[1], target)
    if key not in _remotes:
        connection = Connection(_NoLink(), WorkerFacts(*facts, {}), Memory(), 60.0)  # type: ignore[arg-type]
        handle = Handle(lambda: connection, "function", target, positional(0), [])
        _remotes[key] = Remote(handle, Background("nested"))
    return _remotes[key]


def relay(x: Any, stations: list[Any], how: str = "plainly") -> Any:
    """x doubled by the last station; each is [facts, how it is called]."""
    if not stations:
        return x * 2
    (facts, way), *rest = stations
    following = remote_of(facts, "fragile:relay")
    if way == "in a thread":
        return _in_thread(lambda: following(x, rest))
    if way == "submitted":
        return following.submit(x, rest).result(60.0)
    if way == "asyncio":
        import asyncio

        return asyncio.run(following.aio(x, rest))
    return following(x, rest)


def _in_thread(act: Any) -> Any:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]
