"""What a client and the broker say to each other about processes: start, interrupt, stop; deaths and output.

One frame per message, a msgpack array (see `vocabulary`), over a DEALER at the client and the broker's ROUTER.
Calls do not come this way: they go straight from client to worker.

The conversation. A client attaches first, with the token; whatever it says before is refused. Every Start
is answered by any number of Starting and then one of Started, NotStarted and Denied, in that order. Every worker
that started ends in exactly one Died, told to all clients, whoever stopped or killed it; a Stop for a worker
that is gone is answered by its Died again. Other programs find workers by Look. Output flows while the client says
that it has heard the earlier output; what nobody hears is bounded by the broker, and never holds up anything else.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import msgpack

from gradwire_wire import PROTOCOL
from gradwire_wire.errors import ProtocolError, UsageError
from gradwire_wire.interruption import came_from_parsing
from gradwire_wire.vocabulary import Vocabulary

__all__ = [
    "FRAMEWORKS",
    "LONGEST_S",
    "MAX_MESSAGE",
    "PROTOCOL",
    "Alone",
    "Attach",
    "Attached",
    "Cancel",
    "Denied",
    "Detach",
    "Died",
    "HasThreads",
    "Heard",
    "Interrupt",
    "LetGo",
    "Log",
    "Look",
    "Looked",
    "NotStarted",
    "Output",
    "Present",
    "ReadLog",
    "Refused",
    "Restart",
    "Show",
    "ShutDown",
    "Start",
    "Started",
    "Starting",
    "Stop",
    "pack",
    "unpack",
]

FRAMEWORKS = ("torch", "tensorflow", "jax", "numpy")
"""What a worker can be a worker of."""
MAX_MESSAGE = 16 << 20
LONGEST_S = 1e6
"""The longest wait that makes sense: eleven days. (The system counts milliseconds in 31 bits, in some places.)"""


class Attach(NamedTuple):
    """Client, first of all: the protocol I speak, the token I was given, who I am."""

    protocol: int
    token: bytes
    pid: int


class Start(NamedTuple):
    """Client: start a worker and tell me when it is ready.

    name: "" lets the broker choose one. python: None is the broker's own interpreter. ``base``: the environment to
    clean and start from (None: the broker's own); ``env`` is laid over the cleaned one, None removes a variable.
    path: absolute folders. threads, x64, device: None leaves them to the broker or the framework. loads: what the
    worker loads when it starts, by name: kind, target, args, kwargs. lasts: it outlives the client that started it.
    restart: whether clients may start it again when it died; the broker only passes that on.
    """

    request: int
    framework: str
    name: str
    python: Optional[str]
    base: Optional[dict[bytes, bytes]]
    env: dict[str, Optional[str]]
    path: list[str]
    cwd: str
    threads: Optional[int]
    x64: Optional[bool]
    device: Optional[str]
    timeout_s: float
    loads: dict[str, Any]
    lasts: bool
    restart: str


class Cancel(NamedTuple):
    """Client: I no longer wait for that start; end what there is of the worker. No answer."""

    request: int


class Interrupt(NamedTuple):
    """Client: that worker is to look whether the call that runs was abandoned. No answer."""

    incarnation: bytes


class Stop(NamedTuple):
    """Client: end that worker: ask it, terminate it, kill it, all within ``timeout_s``. Answer: Died."""

    incarnation: bytes
    timeout_s: float


class Heard(NamedTuple):
    """Client: output of that `Output.cost` has been shown; the broker may send as much more."""

    cost: int


class ShutDown(NamedTuple):
    """Client on this machine: end all workers within ``timeout_s``, then yourself."""

    timeout_s: float


class Detach(NamedTuple):
    """Client, last of all: forget me, and end the workers I started that do not last. No answer."""


class Look(NamedTuple):
    """Client: which workers are there? Answer: a Present for each, then Looked."""

    request: int


class Show(NamedTuple):
    """Client: send me what that worker prints from now on, or no more. (It is sent to whoever started it anyway.)"""

    name: str
    wanted: bool


class ReadLog(NamedTuple):
    """Client: the last lines of that worker, also of one that ended. Answer: Log, or Denied.

    follow: send me also what it prints after these.
    """

    request: int
    name: str
    follow: bool


class Restart(NamedTuple):
    """Client: end that incarnation if it lives, and start the worker again as it was started first. Answers as to Start.

    Where the worker has been started again already, by whomever, the answer is that one.
    """

    request: int
    incarnation: bytes


class LetGo(NamedTuple):
    """Client that owns a shared broker: from now on do not end with me. Answer: Alone, or Denied."""

    request: int


class Attached(NamedTuple):
    """Broker: you are welcome."""

    protocol: int
    pid: int


class Refused(NamedTuple):
    """Broker: you are not, or your last message was none: the error class and its message."""

    kind: str
    message: str


class Starting(NamedTuple):
    """Broker: how far the start has come, for people ("importing torch")."""

    request: int
    doing: str


class Started(NamedTuple):
    """Broker: the worker is ready and listens at ``endpoint`` (calls) and ``tether_path`` (memory)."""

    request: int
    name: str
    incarnation: bytes
    pid: int
    endpoint: str
    tether_path: str
    token: bytes
    info: dict[str, Any]


class NotStarted(NamedTuple):
    """Broker: there is no worker, and why: command line, how it ended, its last output, what to try."""

    request: int
    message: str


class Denied(NamedTuple):
    """Broker: that cannot be had as it was asked for: the error class, and what to ask for instead."""

    request: int
    kind: str
    message: str


class Died(NamedTuple):
    """Broker: that worker ended, by an exit code or by a signal. ``output``: its last lines."""

    incarnation: bytes
    exit_code: Optional[int]
    signal: Optional[str]
    output: str
    command: str


class HasThreads(NamedTuple):
    """Broker: that worker, which nobody has used yet, has another number of threads than Started said."""

    incarnation: bytes
    threads: int


class Output(NamedTuple):
    """Broker: what a worker wrote to its stdout or stderr, as it came; before it, ``dropped`` characters were lost."""

    name: str
    text: str
    dropped: int

    @property
    def cost(self) -> int:
        """What it takes of the window: a thousand small messages are as many as ZeroMQ would queue."""
        return len(self.text) + 512


class Present(NamedTuple):
    """Broker, for a Look: a worker. ``state``: "starting", "idle", "busy" or how it ended; ``doing`` more of it, for people.

    ``info`` and where to reach it as in Started; empty unless it is ready. A client that came over tcp gets an endpoint at
    tcp, whose host it replaces by the one it reached the broker at, and no tether_path. ``loads``: names it was told to
    load. ``restart``: as in Start.
    """

    request: int
    name: str
    framework: str
    state: str
    doing: str
    incarnation: bytes
    pid: int
    endpoint: str
    tether_path: str
    token: bytes
    info: dict[str, Any]
    loads: list[str]
    restart: str
    calls: int
    memory_bytes: int
    age_s: float


class Looked(NamedTuple):
    """Broker, for a Look: that was all of them."""

    request: int


class Alone(NamedTuple):
    """Broker, for a LetGo: it ends when it is told to, and only then."""

    request: int


class Log(NamedTuple):
    """Broker, for a ReadLog."""

    request: int
    text: str


_VOCABULARY = Vocabulary(
    {
        **{1: Attach, 2: Start, 3: Cancel, 4: Interrupt, 5: Stop, 6: Heard, 7: ShutDown},
        **{16: Attached, 17: Refused, 18: Starting, 19: Started, 20: NotStarted, 21: Died, 22: Output},
        **{8: Detach, 9: Look, 10: Show, 11: ReadLog, 12: Restart, 13: LetGo},
        **{23: Denied, 24: HasThreads, 25: Present, 26: Looked, 27: Log, 28: Alone},
    }
)
KINDS = _VOCABULARY.kinds


def pack(message: Any) -> bytes:
    """One frame. Names of files that are not UTF-8 survive. UsageError for what cannot be said: half a character, too much."""
    what = type(message).__name__
    try:
        packed: bytes = msgpack.packb(_VOCABULARY.to_array(message), unicode_errors="surrogateescape")
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"the broker cannot be told that ({what}): {error}") from error
    if len(packed) > MAX_MESSAGE:
        raise UsageError(
            f"the broker cannot be told that ({what}): {len(packed)} bytes, more than {MAX_MESSAGE}"
        )
    return packed


def unpack(frame: bytes) -> Any:
    """The message in a frame; ProtocolError for anything else. Never runs or imports what it reads."""
    if len(frame) > MAX_MESSAGE:
        raise ProtocolError(f"a message of {len(frame)} bytes is longer than {MAX_MESSAGE}")
    try:
        raw = msgpack.unpackb(frame, unicode_errors="surrogateescape")
    except Exception as error:
        if not came_from_parsing(error):
            raise
        raise ProtocolError(f"not msgpack: {type(error).__name__}: {error}") from error
    return _VOCABULARY.from_array(raw)
