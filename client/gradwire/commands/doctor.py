"""``gradwire doctor``: what gradwire would meet on this machine, and what to do where that is less than it could be."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.lines import lanes_wanted, pages_wanted
from gradwire.surroundings import Interpreter, interpreters
from gradwire_wire.budget import room_for
from gradwire_wire.errors import MemoryExhaustedError, UsageError
from gradwire_wire.machine import LIMIT, read_memory, shared_limit
from gradwire_wire.process import is_stopped
from gradwire_wire.rendezvous import candidates, find_cards, folders, is_running, why_unfit
from gradwire_wire.segments import Ledger, SharingUnavailableError

__all__ = ["Finding", "add_parser", "findings", "run"]

FEW_DESCRIPTORS = 4096
LITTLE_MEMORY = 512 << 20


class Finding(NamedTuple):
    """``level``: ok, note (works, with less than it could) or problem (something will fail). ``remedy``: what to do."""

    level: str
    topic: str
    text: str
    remedy: str = ""


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="look at this machine and say what to do about it",
        description="Look at this machine: interpreters that workers could run in, limits, what earlier runs have left over; and "
        "say what to do about each. Changes nothing. The exit code is 1 where there is a problem.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print all findings; 1 if one of them is a problem."""
    found = list(findings())
    if arguments.json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    else:
        for finding in found:
            print(f"{finding.level:8}{finding.topic:14}{finding.text}")
            if finding.remedy:
                print(f"{'':22}→ {finding.remedy}")
    return 1 if any(finding.level == "problem" for finding in found) else 0


def findings() -> Iterator[Finding]:
    """All of them, in the order of what a newcomer needs first."""
    yield _program()
    yield from _interpreters()
    yield _memory()
    yield _sharing()
    yield _lane()
    yield _descriptors()
    yield from _folders()
    yield from _brokers()


def _program() -> Finding:
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return Finding("ok", "this program", f"Python {platform.python_version()} at {sys.executable}; {system}")


def _interpreters() -> Iterator[Finding]:
    found = interpreters(Path(), os.environ)
    useful = [one for one in found if one.frameworks or one.path == sys.executable or one.problem]
    yield from map(_interpreter, useful)
    others = [f"{one.path} ({one.python})" for one in found if one not in useful]
    if others:
        yield Finding("ok", "interpreters", f"without a framework: {', '.join(others)}")
    if not any(one.frameworks and not one.missing for one in found):
        yield Finding(
            "note",
            "interpreter",
            "none of these has a framework and what a worker needs beside it",
            'let gradwire build an environment, bridge.worker("torch", requirements=["torch"]), '
            "or make one yourself and name its interpreter with python=",
        )


def _folders() -> Iterator[Finding]:
    """Where sockets can lie; all but the first that will do are of no interest."""
    refused: list[str] = []
    for parent in candidates(os.environ):
        why = why_unfit(parent)
        if not why:
            text = f"lie below {parent}"
            if refused:
                remedy = (
                    "set XDG_RUNTIME_DIR to a folder of yours with a short name, if you want them elsewhere"
                )
                yield Finding("note", "sockets", f"{text} ({'; '.join(refused)})", remedy)
            else:
                yield Finding("ok", "sockets", text)
            return
        refused.append(f"not {parent}: {why}")
    yield Finding(
        "problem",
        "sockets",
        f"there is no folder for them: {'; '.join(refused)}",
        "set XDG_RUNTIME_DIR to a folder of yours with a short name",
    )


def _brokers() -> Iterator[Finding]:
    for card in find_cards(os.environ):
        text = f"{card.name!r} runs at {card.address} (pid {card.pid}, {card.file})"
        if is_stopped(card.pid):
            yield Finding("problem", "shared broker", f"{text}, and is stopped", f"kill -CONT {card.pid}")
        else:
            yield Finding("ok", "shared broker", text)
    left = [folder for folder in folders(os.environ) if not is_running(folder)]
    if left:
        yield Finding(
            "note",
            "left-overs",
            f"{len(left)} of brokers that were killed: {', '.join(map(str, left))}",
            "the next broker that starts removes them, where it has the same XDG_RUNTIME_DIR and TMPDIR",
        )
    else:
        yield Finding("ok", "left-overs", "none of earlier runs")


def _interpreter(one: Interpreter) -> Finding:
    if one.problem:
        return Finding("note", "interpreter", f"{one.path}: {one.problem}")
    has = ", ".join(f"{name} {version}" for name, version in one.packages.items()) or "no package of interest"
    text = f"{one.path} (Python {one.python}): {has}"
    if tuple(map(int, one.python.split(".")[:2])) < (3, 9):
        return Finding("note", "interpreter", text, "workers need Python 3.9 or newer")
    if one.frameworks and one.missing:
        install = f"{one.path} -m pip install {' '.join(one.missing)}"
        return Finding("note", "interpreter", f"{text}; no {', '.join(one.missing)}", install)
    return Finding("ok", "interpreter", text)


def _memory() -> Finding:
    try:
        limit = shared_limit()
    except UsageError as error:
        return Finding("problem", "memory", str(error), f"unset {LIMIT}")
    room, why = room_for(read_memory(), limit, 0)
    text = f"{room / 2**30:.1f} GiB may be shared; what limits it: {why}"
    if room < LITTLE_MEMORY:
        return Finding("problem", "memory", text, "free memory, or raise that limit")
    return Finding("ok", "memory", text)


def _sharing() -> Finding:
    try:
        ledger = Ledger()
        shared = ledger.is_shared
        ledger.close()
    except (SharingUnavailableError, MemoryExhaustedError, OSError) as error:
        shared, why = False, str(error)
    else:
        why = ledger.why or "memory files (memfd) cannot be had here"
    if shared:
        return Finding("ok", "tensors", "cross in shared memory (memfd)")
    return Finding(
        "note",
        "tensors",
        f"cross in files of the runtime folder or inside messages, which copies them: {why}",
        "in a container, allow the system call memfd_create",
    )


def _lane() -> Finding:
    try:
        return _lane_wanted()
    except UsageError as error:
        return Finding("problem", "calls", str(error), "unset GRADWIRE_LANE")


def _lane_wanted() -> Finding:
    if pages_wanted():
        return Finding(
            "ok", "calls", "go by lane (Unix sockets, with pages of shared memory) within this machine"
        )
    if lanes_wanted():
        return Finding("ok", "calls", "go by lane (Unix sockets) within this machine")
    return Finding(
        "note", "calls", "go by ZeroMQ, which takes longer: GRADWIRE_LANE=zmq is set", "unset GRADWIRE_LANE"
    )


def _descriptors() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FEW_DESCRIPTORS:
        return Finding(
            "note", "open files", f"at most {hard} (hard limit)", f"raise it: ulimit -Hn {FEW_DESCRIPTORS}"
        )
    limit = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return Finding(
        "ok", "open files", f"up to {limit}; gradwire raises the soft limit itself where it needs to"
    )
