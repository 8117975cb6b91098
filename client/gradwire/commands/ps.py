"""``gradwire ps``: the workers of the shared brokers that run here."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from gradwire.commands.brokers import add_option, chosen_card, linked
from gradwire_wire.control import Present
from gradwire_wire.errors import TransportError
from gradwire_wire.rendezvous import Card, find_cards, where_sought

__all__ = ["add_parser", "run"]

HEAD = ("BROKER", "WORKER", "FRAMEWORK", "PID", "STATE", "CALLS", "MEMORY", "AGE")


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "ps",
        help="list the workers of the shared brokers that run here",
        description="List the workers of the shared brokers that run here: framework, process, state, calls, memory, age.",
    )
    add_option(parser)
    parser.add_argument("--json", action="store_true", help="print them as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print them; no broker at all is no error, and one that does not answer does not hide the others."""
    cards = [chosen_card(arguments)] if arguments.broker else find_cards(os.environ)
    found: list[tuple[Card, Present]] = []
    silent: list[str] = []
    for card in cards:
        try:
            with linked(card) as link:
                found += [(card, present) for present in link.look()]
        except TransportError as error:
            silent.append(str(error))
    if arguments.json:
        print(json.dumps([_record(card, present) for card, present in found], indent=2))
    elif not cards:
        print(f"no shared broker runs here; start one with: gradwire up FILE ({where_sought(os.environ)})")
    else:
        _print_table([HEAD, *(_row(card, present) for card, present in found)])
    for why in silent:
        print(f"gradwire ps: {why}", file=sys.stderr)
    return 1 if silent else 0


def _record(card: Card, present: Present) -> dict[str, Any]:
    return {
        "broker": card.name,
        "address": card.address,
        "name": present.name,
        "framework": present.framework,
        "pid": present.pid,
        "state": present.state,
        "doing": present.doing,
        "calls": present.calls,
        "memory_bytes": present.memory_bytes,
        "age_s": round(present.age_s, 1),
        "loads": present.loads,
        "restart": present.restart,
        "info": present.info,
    }


def _row(card: Card, present: Present) -> tuple[str, ...]:
    is_over = present.state == "ended"
    state = present.state if present.state in ("idle", "busy") else f"{present.state} ({present.doing})"
    version = str(present.info.get("version", ""))
    return (
        card.name,
        present.name,
        f"{present.framework} {version}".strip(),
        "-" if is_over else str(present.pid),
        state,
        str(present.calls),
        "-" if is_over else f"{present.memory_bytes / 2**20:.0f} MiB",
        _age(present.age_s),
    )


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
