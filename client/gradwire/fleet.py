"""The workers of a file, started together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any

from gradwire.background import Background
from gradwire.configuration import WorkerEntry
from gradwire.orders import checked_spec, with_environment
from gradwire.worker_records import WorkerSpec
from gradwire_wire.errors import UsageError

__all__ = ["spec_of", "start_together"]


def spec_of(entry: WorkerEntry, lasts: bool) -> WorkerSpec:
    """The order for a worker of a file; builds its environment where it has requirements, which may take minutes."""
    try:
        spec = checked_spec(
            entry.framework,
            entry.name,
            python=entry.python,
            env=entry.env,
            path=entry.path,
            cwd=entry.cwd,
            threads=entry.threads,
            x64=entry.x64,
            device=entry.device,
            start_timeout=entry.start_timeout,
        )
    except UsageError as error:  # what can be seen in the file was: this is about what is there
        raise UsageError(f"worker {entry.name!r}: {error}") from error
    loads = {name: vars(load) for name, load in entry.loads.items()}
    built = with_environment(entry.requirements, spec)
    return built._replace(loads=loads, lasts=lasts, restart=entry.restart)


def start_together(entries: Iterable[WorkerEntry], start: Callable[[WorkerEntry], Any]) -> list[Any]:
    """``start`` of each, at the same time; the results in order. The first failure is raised at once.

    Those that are still under way then are not waited for: whoever catches it ends the broker, and them with it.
    """
    entries = list(entries)
    background = Background("gradwire-start", threads=max(1, len(entries)))
    futures: list[Future[Any]] = [background.submit(partial(start, entry)) for entry in entries]
    background.close()
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future in done:
            future.result()
    return [future.result() for future in futures]
