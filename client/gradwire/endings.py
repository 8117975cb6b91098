"""How calls end that bring no results: the errors, each with what to do about it. Pure."""

from __future__ import annotations

from gradwire.worker_records import Death, WorkerFacts
from gradwire_wire.errors import (
    ClosedError,
    GradwireError,
    ProtocolError,
    ResidualLostError,
    WorkerDiedError,
    class_named,
    remote_error,
)
from gradwire_wire.messages import Failed

__all__ = [
    "died",
    "error_of",
    "has_lied",
    "out_of_reach",
    "vanished",
    "was_closed",
    "was_lost",
    "was_restarted",
    "without_frames",
]


def was_restarted(name: str, was_running: bool) -> WorkerDiedError:
    """Another incarnation has taken over."""
    doing = "while it worked on this call, which may have run" if was_running else "before this call"
    return WorkerDiedError(
        f"worker {name!r} was restarted {doing}; the call can be made again, to its new process",
        was_running=was_running,
    )


def was_closed(name: str, was_running: bool) -> ClosedError:
    """By this program."""
    if was_running:
        return ClosedError(f"worker {name!r} or its bridge was closed while it worked on this call")
    return ClosedError(
        f"worker {name!r} was closed, itself or with its bridge; make a new one with bridge.worker(...), of a new "
        "gradwire.connect() if the bridge is closed"
    )


def was_lost(name: str) -> ProtocolError:
    """The worker answers everything but this call. See `gradwire.inquiry`."""
    return ProtocolError(
        f"worker {name!r} answers, but not this call: it was lost on its way, which is a fault of gradwire's, or of a network. Make it "
        "again, if it may run twice: it may have run"
    )


def has_lied(name: str, what: str) -> ProtocolError:
    """It sent what no worker sends."""
    return ProtocolError(
        f"the connection to worker {name!r} was ended, for it sent what it may not: {what}. worker.restart() makes a new one"
    )


def vanished(facts: WorkerFacts, advice: str, was_running: bool) -> WorkerDiedError:
    """It is gone, and its broker, which is there, knows of no end of it. advice: what to do about it."""
    return WorkerDiedError(
        f"worker {facts.name!r} (pid {facts.pid}) cannot be reached any more, and its broker tells of no end of its process: did its "
        f"code close descriptors, or is the broker stopped? {advice}",
        was_running=was_running,
    )


def out_of_reach(facts: WorkerFacts, gone: str, was_running: bool) -> WorkerDiedError:
    """There is no more news of it, and it may live. gone: why there is none, and what to do."""
    doing = ", and may go on with this call" if was_running else ""
    return WorkerDiedError(
        f"worker {facts.name!r} (pid {facts.pid}) cannot be reached any more{doing}: {gone}",
        was_running=was_running,
    )


def died(facts: WorkerFacts, death: Death, advice: str, was_running: bool) -> WorkerDiedError:
    """Its process ended, as the broker has seen it."""
    how = f"by signal {death.signal}" if death.signal else f"with exit code {death.exit_code}"
    if death.signal == "SIGKILL" and death.command:  # otherwise it was the broker's end
        how += (
            " (from the kernel, if nobody else killed it: that is how memory runs out; its log, dmesg, tells)"
        )
    doing = "while it worked on this call" if was_running else "before this call was sent"
    said = f"\nIts last output:\n{death.output}" if death.output else "\nIt had printed nothing."
    return WorkerDiedError(
        f"worker {facts.name!r} (pid {facts.pid}) ended {how} {doing}; {advice}.{said}",
        exit_code=death.exit_code,
        signal=death.signal,
        output=death.output,
        was_running=was_running,
    )


def without_frames(error: GradwireError) -> GradwireError:
    """A twin to keep. The traceback of the error itself holds the frames it passes, and with them the user's tensors."""
    twin = type(error)(*error.args)  # not by __new__, which MemoryError refuses its subclasses
    twin.__dict__.update(error.__dict__)
    return twin


def error_of(failed: Failed, worker: str) -> GradwireError:
    """What a worker's Failed stands for."""
    if failed.kind == "RemoteError":
        return remote_error(failed.type_name, failed.message, failed.traceback, worker)
    cls = class_named(failed.kind, ProtocolError)
    error = cls(f"{failed.message} (worker {worker!r})")
    error.retry_safe = False  # it was sent, and the remote code may have run before this happened
    if cls is ResidualLostError:
        error.recompute = failed.type_name == "recompute"  # type: ignore[attr-defined]
    return error
