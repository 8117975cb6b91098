"""Starting a broker: as a fresh interpreter. A private one ends when the program does; a shared one need not.

It runs on this program's interpreter, isolated (``-I``), with gradwire's packages lent to it and the folders
of ZeroMQ and msgpack at the end of its ``sys.path``. It is never a fork, so no lock of this program's threads
can be held in it, and this program's main module is never run again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from gradwire.local_broker import LAST_CHARACTERS, LocalBroker
from gradwire_wire.errors import ConnectError
from gradwire_wire.lifeline import BrokerConfig, BrokerReady, CouldNot, Lifeline, LifelineEnded
from gradwire_wire.process import RAISE_LIMIT, RAISE_PROCESSES, lacks_descriptors, open_pidfd
from gradwire_wire.spawn import BEGINNING, Lent, shown, spawn

__all__ = ["PrivateBroker", "Sharing", "lent_packages"]


class Sharing(NamedTuple):
    """What makes a broker a shared one (see `gradwire_wire.lifeline.BrokerConfig`).

    stays: it does not end with the program that starts it. listen, keys: a tcp address and the folder of keys for it.
    """

    name: str
    file: str
    allow: list[str] | None = None
    stays: bool = True
    listen: str = ""
    keys: str = ""


class PrivateBroker(LocalBroker):
    """The process of a broker that this program started, from its start to its end.

    ``address`` and ``token``: how to reach it. ``folder``: its runtime directory, which it removes at its end.
    ``ends_with_us``: so it does with this program. ``revival``: what to do when it is gone, for messages.
    """

    revival = "connect anew"

    def __init__(self, timeout_s: float, expected_workers: int = 0, sharing: Sharing | None = None) -> None:
        """Starts it and waits until it listens. Raises ConnectError with what it wrote."""
        self.token = os.urandom(16)
        self._expected_workers, self._sharing = expected_workers, sharing
        self.ends_with_us = sharing is None or not sharing.stays
        self._errors = _unnamed_file()
        try:
            self._process, self._lifeline = self._launch()
        except BaseException:
            self._close_errors()
            raise
        try:
            self.pidfd = open_pidfd(self._process.pid)
            ready = self._wait_ready(timeout_s)
        except BaseException as error:
            self.kill()
            self.close()
            if isinstance(error, OSError) and not isinstance(error, ConnectError):
                raise ConnectError(f"the broker cannot be watched: {error}") from error
            raise
        self.address, self.folder = ready.address, Path(ready.folder)

    def _launch(self) -> tuple[subprocess.Popen[bytes], Lifeline]:
        _check_interpreter()
        packages = lent_packages()
        workers = {name: packages[name] for name in ("gradwire_workers", "gradwire_wire")}
        lent = Lent(
            {name: packages[name] for name in ("gradwire_broker", "gradwire_wire")},
            _folders("zmq", "msgpack"),
        )
        config = self._config(workers)
        output: Any = self._errors or subprocess.DEVNULL
        python = [os.path.abspath(sys.executable), "-I"]
        try:
            return spawn(
                python,
                lent,
                "gradwire_broker.__main__",
                config,
                "broker",
                cwd="/",
                stdout=output,
                stderr=output,
            )
        except (OSError, LifelineEnded, RuntimeError) as error:  # RuntimeError: in a subinterpreter
            advice = f"; {RAISE_LIMIT}" if lacks_descriptors(error) else ""
            if isinstance(error, BlockingIOError):
                advice = f"; {RAISE_PROCESSES}"
            raise ConnectError(f"the broker cannot be started with {python[0]}: {error}{advice}") from error

    def _config(self, lent_to_workers: dict[str, str]) -> BrokerConfig:
        """This program shows the owner's token; a shared broker writes the other one on its card."""
        sharing = self._sharing or Sharing("", "")
        return BrokerConfig(
            owner_pid=os.getpid(),
            token=os.urandom(16).hex(),
            lent_to_workers=lent_to_workers,
            expected_workers=self._expected_workers,
            owner_token=self.token.hex(),
            name=sharing.name,
            file=sharing.file,
            allow=sharing.allow,
            listen=sharing.listen,
            keys=sharing.keys,
        )

    def _wait_ready(self, timeout_s: float) -> BrokerReady:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            readable = _readable([self._lifeline.fileno(), self.pidfd], left)
            try:
                message = self._lifeline.receive_nowait()
            except LifelineEnded:
                message = None
                readable.append(self.pidfd)
            if isinstance(message, BrokerReady):
                return message
            if isinstance(message, CouldNot) or self.pidfd in readable:
                raise ConnectError(
                    self._failure(message.message if isinstance(message, CouldNot) else "it ended")
                )
        raise ConnectError(self._failure(f"it was not ready after {timeout_s:g} s"))

    def _failure(self, why: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # it is ending, and its last words come last
        code = self._process.poll()
        lines = [f"the broker did not start: {why}", f"  command: {shown(self._process)}"]
        lines += [f"  exit code: {code}"] if code is not None else []
        lines += [f"    {line}" for line in self.last_words().splitlines()]
        return "\n".join(lines)

    def last_words(self) -> str:
        """The end of what it wrote to its stderr; normally that is nothing."""
        if self._errors is None or self._errors.closed:
            return ""
        size = os.fstat(self._errors.fileno()).st_size
        start = max(0, size - LAST_CHARACTERS)
        return os.pread(self._errors.fileno(), size - start, start).decode(errors="backslashreplace").strip()

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether it ended within the time; then it is reaped."""
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def resume(self) -> None:
        """Somebody may have stopped it (SIGSTOP); then it would not hear that it is to end."""
        # (it is denied where this program has become another user's meanwhile)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """At once; its workers end with it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._process.send_signal(signal.SIGKILL)
        self.wait_ended(1.0)

    def close(self) -> None:
        """Close the descriptors; the broker takes that for the end of its owner, if it has one. Idempotent."""
        if not self.ends_with_us and self._process.returncode is None:
            self._process.returncode = 0  # it goes on without us: nobody is to wait for it, or to warn of it
        self._lifeline.close()
        self._close_errors()
        super().close()

    def _close_errors(self) -> None:
        if self._errors is not None:
            self._errors.close()


def _check_interpreter() -> None:
    """ConnectError where `sys.executable` is no interpreter but this program itself, which would start itself for ever."""
    if not sys.executable:
        raise ConnectError("this program does not know its interpreter (sys.executable is empty)")
    is_in_place_of_one = any(str(argument).startswith(BEGINNING) for argument in sys.argv[1:])
    if is_in_place_of_one or getattr(sys, "frozen", False):
        how = "was started in place of" if is_in_place_of_one else "is frozen, and so is not"
        raise ConnectError(
            f"{sys.executable} {how} a Python interpreter, which a broker and its workers need. From an ordinary environment "
            "start a shared one, `gradwire up FILE`, and have this program connect to that by its name or address"
        )


def lent_packages() -> dict[str, str]:
    """gradwire's packages and the folders they lie in, found and not imported."""
    found = {}
    for name in ("gradwire_broker", "gradwire_workers", "gradwire_wire"):
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ConnectError(f"the package {name}, a part of gradwire, is not installed")
        found[name] = folder = os.path.abspath(next(iter(spec.submodule_search_locations)))
        if not os.path.isdir(folder):
            raise ConnectError(
                f"gradwire lies in {folder}, which is no folder: its broker and workers are other processes and load it from one. "
                "Install it unpacked, by pip, beside a program that is an archive"
            )
    return found


def _folders(*modules: str) -> list[str]:
    """Where the packages of these names lie."""
    specs = [find_spec(module) for module in modules]
    return list(
        dict.fromkeys(os.path.abspath(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin)
    )


def _unnamed_file() -> IO[bytes] | None:
    """For the broker's stderr: a file that cannot be left behind, wherever one can be had."""
    for folder in (None, "/dev/shm"):
        with contextlib.suppress(OSError):
            return tempfile.TemporaryFile(dir=folder)
    return None


def _readable(fds: list[int], timeout_s: float) -> list[int]:
    """Those of the descriptors that are readable, waiting at most so long for one."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(1000 * timeout_s)]
