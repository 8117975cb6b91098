"""The same work by pickle over a pipe: what one would write in ten lines instead."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from gradwire.benchmark.measure import arrays, percentiles_us
from gradwire.benchmark.plan import MEASURE, Plan, Work, identity_of

__all__ = ["piped"]

START_S, END_S = 120.0, 5.0


def piped(plan: Plan, python: str) -> dict[str, Any]:
    """Percentiles of each work and of each size, arrays of numpy in and out; or ``error``, why there are none."""
    found: dict[str, Any] = {"works": {}, "sizes": {}}
    try:
        for work in plan.works:
            found["works"][work.name] = _measured(plan, python, work, [work], plan.seconds)[0]
        works = [identity_of(plan.framework, nbytes) for nbytes in plan.sizes]
        figures = _measured(plan, python, works[0], works, plan.seconds / 3)
        found["sizes"] = {str(n): f for n, f in zip(plan.sizes, figures, strict=True)}
    except (OSError, EOFError) as error:
        found["error"] = (
            f"the process at the pipe's other end is gone: {str(error) or 'it ended while it was being asked'}"
        )
    return found


def _measured(
    plan: Plan, python: str, served: Work, works: Sequence[Work], seconds: float
) -> list[dict[str, float]]:
    with _server(plan, python, served) as end:
        figures = []
        for work in works:
            operands = arrays(work.inputs)

            def once(operands: Any = operands) -> Any:
                end.send(operands)
                return end.recv()

            figures.append(percentiles_us(once, seconds))
        return figures


@contextmanager
def _server(plan: Plan, python: str, work: Work) -> Iterator[Any]:
    """The end of a pipe at whose other end the target is called. EOFError where it does not come up."""
    ours, theirs = socket.socketpair()  # what multiprocessing.Pipe() is
    command = [python, str(MEASURE), str(theirs.fileno())]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if plan.threads is not None:
        environment["OMP_NUM_THREADS"] = str(plan.threads)
    server = subprocess.Popen(
        [*command, plan.framework, work.target, work.kind],
        pass_fds=[theirs.fileno()],
        env=environment,
        stdout=sys.stderr,
    )
    theirs.close()
    end: Any = Connection(ours.detach())
    try:
        if not end.poll(START_S):
            raise EOFError(f"not ready after {START_S} s")
        end.recv()
        yield end
    finally:
        end.close()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
