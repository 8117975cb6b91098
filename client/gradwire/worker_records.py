"""What is said of workers between a program and its broker: which one to start, how it is reached, how it ended."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from gradwire_wire import control
from gradwire_wire.errors import ProtocolError, UsageError, WorkerStartError, class_named

__all__ = ["Death", "WorkerFacts", "WorkerSpec", "facts_of", "order_of"]


class WorkerSpec(NamedTuple):
    """What worker to start. Paths may be relative to the current folder; None leaves the choice to the broker.

    start_timeout: seconds. loads: targets by name, loaded before it is ready. lasts: it outlives the program that
    starts it. restart: one of `gradwire.restarts.MODES`.
    """

    framework: str
    name: str = ""
    python: str | None = None
    env: dict[str, str | None] = {}  # noqa: RUF012 - never changed
    path: list[str] | None = None
    cwd: str | None = None
    threads: int | None = None
    x64: bool | None = None
    device: str | None = None
    start_timeout: float = 120.0
    loads: dict[str, Any] = {}  # noqa: RUF012 - never changed
    lasts: bool = False
    restart: str = "never"


class WorkerFacts(NamedTuple):
    """A worker that is ready, and how to reach it."""

    name: str
    incarnation: bytes
    pid: int
    endpoint: str
    tether_path: str
    token: bytes
    info: dict[str, Any]


class Death(NamedTuple):
    """How a worker ended: by an exit code or by a signal; its last lines; its command line."""

    exit_code: int | None
    signal: str | None
    output: str
    command: str


def order_of(request: int, spec: WorkerSpec) -> control.Start:
    """The message that has it started, with this program's environment and its paths absolute."""
    cwd = os.path.abspath(os.path.expanduser(spec.cwd)) if spec.cwd else os.getcwd()
    python = os.path.expanduser(spec.python) if spec.python else None
    if python is not None and os.sep in python:
        python = os.path.abspath(python)
    return control.Start(
        request=request,
        framework=spec.framework,
        name=spec.name or "",
        python=python,
        base=dict(os.environb),
        env=dict(spec.env),
        path=[
            os.path.abspath(os.path.expanduser(folder))
            for folder in ([cwd] if spec.path is None else spec.path)
        ],
        cwd=cwd,
        threads=spec.threads,
        x64=spec.x64,
        device=spec.device,
        timeout_s=spec.start_timeout,
        loads=spec.loads,
        lasts=spec.lasts,
        restart=spec.restart,
    )


def facts_of(answer: Any) -> WorkerFacts:
    """The worker that an answer tells of; WorkerStartError or UsageError with what it says against it; ProtocolError."""
    if isinstance(answer, control.NotStarted):
        raise WorkerStartError(answer.message)
    if isinstance(answer, control.Denied):
        raise class_named(answer.kind, UsageError)(answer.message)
    if not isinstance(answer, control.Started):
        raise ProtocolError(f"the broker answers the start of a worker with {type(answer).__name__}")
    return WorkerFacts(*answer[1:])
