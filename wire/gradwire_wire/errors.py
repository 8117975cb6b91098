"""Everything gradwire raises, by who has to act next.

::

    GradwireError
      UsageError             your program: raised before a byte is sent
        UnsupportedTensorError, DtypeError, UnknownTargetError, ClosedError, ForkedError
      ProtocolError          the two ends do not understand each other
        VersionMismatchError
      TransportError         the way between them: ConnectError, DeadlineError, MemoryExhaustedError
      WorkerError            the worker process: WorkerStartError, WorkerDiedError, ResidualLostError
      RemoteError            the user's code in the worker raised

Each class says in ``retry_safe`` whether the call may simply be made again: True means that the
remote function certainly did not run because of this call.
"""

from __future__ import annotations

import builtins
import re
import reprlib
from functools import lru_cache

__all__ = [
    "ClosedError",
    "ConnectError",
    "DeadlineError",
    "DtypeError",
    "ForkedError",
    "GradwireError",
    "MemoryExhaustedError",
    "ProtocolError",
    "RemoteError",
    "ResidualLostError",
    "TransportError",
    "UnknownTargetError",
    "UnsupportedTensorError",
    "UsageError",
    "VersionMismatchError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStartError",
    "class_named",
    "remote_error",
    "shown",
    "with_base",
]


class GradwireError(Exception):
    """The root of everything gradwire raises on its own account."""

    retry_safe = False


class UsageError(GradwireError):
    """The call cannot be made as written; nothing was sent. Change the call."""

    retry_safe = True


class UnsupportedTensorError(UsageError, TypeError):
    """A value that cannot cross the boundary (object, string, sparse, quantised, ...)."""


class DtypeError(UsageError, TypeError):
    """A dtype the other side would have to narrow. Convert it yourself, or allow it there."""


class UnknownTargetError(UsageError, LookupError):
    """The target named by ``"pkg.mod:attr"`` or ``"file.py:attr"`` is not there."""


class ClosedError(UsageError):
    """The bridge or worker was closed. Make a new one."""


class ForkedError(UsageError):
    """A proxy was used in a forked child. Open a bridge of its own in the child."""


class ProtocolError(GradwireError):
    """A message or header that breaks the protocol; it was refused and nothing was executed."""


class VersionMismatchError(ProtocolError):
    """The two ends speak different versions of the protocol."""


class TransportError(GradwireError):
    """The message or its tensors could not be carried."""


class ConnectError(TransportError, ConnectionError):
    """No broker or worker answers at the address."""

    retry_safe = True


class DeadlineError(TransportError, TimeoutError):
    """The deadline passed. The remote code may still be running; its late reply is dropped."""


class MemoryExhaustedError(TransportError, MemoryError):
    """Not enough shared memory; the message names needed and free bytes. Nothing was sent."""

    retry_safe = True


class WorkerError(GradwireError):
    """Something about the worker process rather than the code in it."""


class WorkerStartError(WorkerError):
    """The worker never became ready; the message has command line, exit code and last output."""

    retry_safe = True


class WorkerDiedError(WorkerError):
    """The worker process ended; the call may or may not have run.

    Attributes: ``exit_code`` (int or None), ``signal`` (name such as "SIGKILL", or None),
    ``output`` (its last lines), ``was_running`` (whether this call had been sent), ``retry_safe`` (not so).
    """

    def __init__(
        self,
        message: str,
        *,
        exit_code: int | None = None,
        signal: str | None = None,
        output: str = "",
        was_running: bool = True,
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.signal = signal
        self.output = output
        self.was_running = was_running
        self.retry_safe = not was_running


class ResidualLostError(WorkerError):
    """The graph a pullback needs is gone (evicted, released, or the worker restarted).

    Run the forward again. ``jax.checkpoint``-like recomputation is ``options(residuals="recompute")``.
    """


class RemoteError(GradwireError):
    """The user's code raised in the worker.

    Where the type is one of Python's own exceptions, or derived from one, the error raised here is also an
    instance of that, so ``except ValueError`` works. Attributes: ``type_name``, ``message``,
    ``traceback`` (the full remote traceback as text), ``worker`` (name).
    """

    type_name = "Exception"
    message = ""
    traceback = ""
    worker = ""

    def __str__(self) -> str:
        where = f" in worker {self.worker!r}" if self.worker else ""
        if not self.message and self.type_name == "Exception" and self.args:
            return str(self.args[0])  # made anew by somebody from the text alone, as AutoGraph does
        text = f"{self.type_name}: {self.message}{where}"
        return f"{text}\n\n{self.traceback}" if self.traceback else text


def _by_name(error: RemoteError) -> tuple[object, ...]:
    """How it is pickled: its class is in no module, and is made again from the type's name."""
    parts = with_base(error.type_name, type(error)), error.message, error.traceback, error.worker
    return remote_error, parts, error.__dict__


@lru_cache(maxsize=None)
def _also_builtin(type_name: str) -> type[RemoteError]:
    base = getattr(builtins, type_name, None)
    if not (isinstance(base, type) and issubclass(base, Exception)) or type_name.endswith("Group"):
        return RemoteError
    if issubclass(base, (StopIteration, StopAsyncIteration)):  # what ends somebody's loop is no error there,
        return RemoteError  # and asyncio's C code reads fields of it that only its own __init__ sets
    return type(
        f"Remote{type_name}",
        (RemoteError, base),
        {"__init__": Exception.__init__, "__str__": RemoteError.__str__, "__reduce__": _by_name},
    )


def with_base(type_name: str, kind: type[BaseException]) -> str:
    """How a message names a type: one of the user's with what it is of Python's own, ``mod.Mine(ValueError)``."""
    base = next(cls for cls in kind.__mro__ if cls.__module__ == "builtins")
    is_told = base in (Exception, BaseException) or getattr(builtins, type_name, None) is base
    return type_name if is_told else f"{type_name}({base.__name__})"


_WITH_BASE = re.compile(r"(.+)\((\w+)\)", re.DOTALL)
_ERRNO = re.compile(r"\[Errno (\d{1,9})\] ([^:]*)")


def remote_error(type_name: str, message: str, traceback: str, worker: str) -> RemoteError:
    """Build what the caller sees of an exception in the worker; no received code runs. type_name: see `with_base`."""
    named = _WITH_BASE.fullmatch(type_name)
    type_name, base = named.groups() if named else (type_name, type_name)
    cls = _also_builtin(base.rpartition(".")[2] if base.startswith("builtins.") else base)
    error = cls(message)  # not cls.__new__, which MemoryError refuses its subclasses
    error.type_name, error.message = type_name, message
    error.traceback, error.worker = traceback, worker
    if isinstance(error, OSError) and (numbered := _ERRNO.match(message)):
        error.errno, error.strerror = int(numbered[1]), numbered[2]
    if isinstance(error, SyntaxError):
        error.msg = str(error)  # which is what Python prints of one
    return error


def class_named(kind: str, otherwise: type[GradwireError]) -> type[GradwireError]:
    """The class of this page that a message names, and ``otherwise`` for any other name."""
    cls = globals().get(kind)
    return cls if isinstance(cls, type) and issubclass(cls, GradwireError) else otherwise


def shown(value: object) -> str:
    """A received value for an error message: short, whatever it is (its own repr may recurse too deeply)."""
    return reprlib.repr(value[:60] if isinstance(value, (bytes, str)) else value)
