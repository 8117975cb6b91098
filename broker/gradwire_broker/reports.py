"""How a worker's end is told to people. Pure."""

from __future__ import annotations

import signal
from typing import NamedTuple

__all__ = ["STARTING", "End", "end_of", "ended_early", "not_started", "timed_out"]

STARTING = "starting the interpreter"
"""What a worker does until it says something itself."""
_HINTS = {
    "SIGKILL": "Something killed it; the kernel does when memory runs out (the system's log tells).",
    "SIGSEGV": "It crashed in native code; the output below may hold the stack. A broken or mixed installation does that.",
    "SIGILL": "It executed an instruction that this processor does not have: install a build for this machine.",
    "SIGABRT": "Native code gave up; its reason is usually in the output below.",
}


class End(NamedTuple):
    """How a process ended: one of the two is None."""

    exit_code: int | None
    signal: str | None

    def __str__(self) -> str:
        return f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"


def end_of(return_code: int) -> End:
    """From what `subprocess` calls the return code."""
    if return_code >= 0:
        return End(return_code, None)
    try:
        return End(None, signal.Signals(-return_code).name)
    except ValueError:  # a real-time signal
        return End(None, f"SIG{-return_code}")


def timed_out(timeout_s: float, doing: str) -> str:
    """Why a worker that took too long was ended."""
    where = "" if doing == STARTING else ", or see below where it hung"
    return f"it was not ready after {timeout_s:g} s; it was {doing}. Give it more time with start_timeout={where}"


def ended_early(end: End, doing: str) -> str:
    """Why there is no worker where its process ended on its own, without a word."""
    hint = _HINTS.get(end.signal or "", "")
    if end.exit_code is not None and doing == STARTING:
        hint = "Is that a Python interpreter?"
    return f"its process ended ({end}) while {doing}" + (f". {hint}" if hint else "")


def not_started(
    name: str,
    framework: str,
    why: str,
    *,
    command: str = "",
    cwd: str = "",
    ended: str = "",
    output: str = "",
) -> str:
    """The message of a WorkerStartError."""
    label = f"{name!r} ({framework})" if name != framework else repr(name)
    lines = [f"worker {label} did not start: {why}"]
    facts = (("command", command), ("in folder", cwd), ("ended", ended))
    lines += [f"  {fact}: {value}" for fact, value in facts if value]
    if command:
        lines.append("  last output:" if output else "  it printed nothing")
        lines += [f"    {line}" for line in output.splitlines()]
    return "\n".join(lines)
