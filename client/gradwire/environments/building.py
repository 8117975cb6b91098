"""Building an environment once, however many ask for it, whatever interrupts.

::

    found in the cache? ──yes──► used
      │ no
    take the lock (waiting for whoever has it) ── found now? ──yes──► used
      │ no
    end and remove what a killed builder left ── venv ── install ── manifest, last ──► built
                                                   └─────┴─ fails or is interrupted: all removed, lock given back
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from gradwire.environments.cache import Cache, Environment
from gradwire.environments.children import MARK, Ended, run
from gradwire.environments.identity import interpreter_of
from gradwire.environments.installers import Installer, Step, find_installer
from gradwire.environments.locks import locked, owner_of
from gradwire.environments.manifest import Interpreter, Manifest, key_of, name_of
from gradwire.environments.progress import Progress, say, seconds_between_lines
from gradwire.environments.requirements import BadRequirement, Requirements, normalized
from gradwire.orphans import end_marked
from gradwire_wire.errors import UsageError, WorkerStartError
from gradwire_wire.interpreters import cleaned

__all__ = ["build"]

REQUIREMENTS = "gradwire-requirements.txt"
SHOWN = 25  # lines of an installer that failed


class Wanted(NamedTuple):
    """An environment that somebody asked for."""

    requirements: Requirements
    interpreter: Interpreter

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return key_of(*self)

    @property
    def name(self) -> str:
        """Its folder's."""
        return name_of(*self)


def build(
    requirements: Iterable[str], python: str | None = None, variables: Mapping[str, str] | None = None
) -> Environment:
    """The environment with these requirements, from the cache or built now.

    python: a path, a name or a version such as "3.9" (None: this program's). variables: instead of `os.environ`.
    Blocks while it builds, or while another process builds the same, which takes as long as the downloads do;
    says on stderr how far it is. Raises UsageError for what cannot be asked for, WorkerStartError with the installer's
    last lines. Interrupted, it leaves nothing.
    """
    variables = os.environ if variables is None else variables
    try:
        asked_for = normalized(requirements)
    except BadRequirement as error:
        raise UsageError(f"requirements: {error}") from error
    cache = Cache.of(variables)
    wanted = Wanted(asked_for, interpreter_of(python, variables))
    found = cache.find(wanted.name, wanted.key) or _build_once(cache, wanted, variables)
    cache.used(found)
    return found


def _build_once(cache: Cache, wanted: Wanted, variables: Mapping[str, str]) -> Environment:
    cache.make()
    lock = cache.lock_of(wanted.name)
    progress = Progress(f"environment {wanted.name}", say, seconds_between_lines())
    with locked(lock, lambda: progress.doing(f"waiting for {owner_of(lock)}, which builds it")):
        found = cache.find(wanted.name, wanted.key)
        return found or _build(cache, wanted, variables, progress)


def _build(cache: Cache, wanted: Wanted, variables: Mapping[str, str], progress: Progress) -> Environment:
    """Under the lock."""
    folder = cache.place(wanted.name)
    _remove_leftovers(folder)
    python = wanted.interpreter.executable
    installer = find_installer(cleaned(variables, python))
    versions = f"Python {wanted.interpreter.version}, by {installer.name}"
    progress.begin(
        f"building environment {wanted.name} ({versions}), once: {' '.join(wanted.requirements.packages)}"
    )
    start = time.time()
    try:
        for step in installer.steps(python, folder, folder / REQUIREMENTS):
            _take(step, installer, folder, progress)
            # only here is there a folder to write to, and the next step reads it
            (folder / REQUIREMENTS).write_text("\n".join(wanted.requirements.lines) + "\n")
        manifest = _manifest(wanted, installer, start, folder)
    except BaseException:
        _remove_leftovers(folder)
        cache.lock_of(wanted.name).unlink(missing_ok=True)
        raise
    made = cache.finish(folder, manifest)
    progress.begin(
        f"environment {wanted.name} is ready ({progress.seconds:.0f} s, {manifest.nbytes / 1e6:.0f} MB)"
    )
    return made


def _remove_leftovers(folder: Path) -> None:
    if folder.exists():
        end_marked([f"{MARK}={folder}"])
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise WorkerStartError(
            f"no environment can be built: {folder} is half-built and cannot be removed; remove it"
        )


def _take(step: Step, installer: Installer, folder: Path, progress: Progress) -> None:
    progress.doing(step.doing)

    def on_line(line: str) -> None:
        progress.doing(line)

    try:
        ended = run(
            step.command,
            environment=installer.environment,
            cwd=folder.parent,
            mark=str(folder),
            on_line=on_line,
        )
    except OSError as error:
        raise WorkerStartError(_failure(step, folder, f"it could not be started: {error}", [])) from error
    if ended.code:
        raise WorkerStartError(_failure(step, folder, _how(ended), ended.tail))


def _how(ended: Ended) -> str:
    return f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"


def _failure(step: Step, folder: Path, ended: str, tail: list[str]) -> str:
    lines = [
        f"environment {folder.name} could not be built: {step.doing} failed; nothing of it was kept",
        f"  command: {shlex.join(step.command)}",
        f"  ended: {ended}",
        "  last lines:" if tail else "  it printed nothing",
        *(f"    {line}" for line in tail[-SHOWN:]),
        f"  try: {_remedy(' '.join(tail))}",
    ]
    return "\n".join(lines)


def _remedy(said: str) -> str:
    """What people can do about it, by what installers say."""
    lower = said.lower()
    if "no module named venv" in lower or "ensurepip" in lower:
        return (
            "another interpreter (python=), or install this one's venv module (python3-venv on Debian), or uv"
        )
    if any(sign in lower for sign in _NO_NETWORK):
        return "again with a network, or tell pip or uv your mirror (PIP_INDEX_URL, UV_DEFAULT_INDEX)"
    if any(sign in lower for sign in _NO_SUCH):
        return "other versions in requirements=, or another python=: not every release has a build for every Python"
    if "no space left" in lower:
        return "`gradwire env list` and `gradwire env remove`, or GRADWIRE_CACHE on a larger disk"
    return "the same command by hand shows more; mind the requirements and the python= it was given"


_NO_NETWORK = (
    "name resolution",
    "name or service not known",
    "dns error",
    "network is unreachable",
    "connection refused",
    "connect timeout",
    "error sending request",
    "failed to establish a new connection",
    "network connectivity is disabled",
)
_NO_SUCH = (
    "resolutionimpossible",
    "no matching distribution",
    "no solution found",
    "not found in the package registry",
    "requires-python",
)


def _manifest(wanted: Wanted, installer: Installer, start: float, folder: Path) -> Manifest:
    return Manifest(
        key=wanted.key,
        requirements=wanted.requirements.lines,
        interpreter=wanted.interpreter,
        installer=installer.name,
        built=start,
        seconds=time.time() - start,
        nbytes=sum(path.lstat().st_size for path in folder.rglob("*")),
    )
