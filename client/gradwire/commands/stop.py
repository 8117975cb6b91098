"""``gradwire stop``: end workers of a shared broker, or the broker with all of them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gradwire.broker_link import BrokerLink
from gradwire.commands.brokers import add_option, chosen_card, linked
from gradwire.commands.miswritten import Miswritten, positive
from gradwire_wire.errors import DeadlineError, UsageError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "stop",
        help="end workers of a shared broker, or all of it",
        description="End workers: each is asked to, then terminated, then killed.",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="workers to end")
    parser.add_argument("--all", action="store_true", help="end all workers and the broker")
    parser.add_argument(
        "--timeout", type=positive, default=5.0, metavar="S", help="seconds each may take (5)"
    )
    add_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """End them; a name that is not there is an error before anything is ended."""
    if bool(arguments.names) == arguments.all:
        raise Miswritten("name the workers to end, or --all for the broker with all of them")
    card = chosen_card(arguments)
    with linked(card) as link:
        if arguments.all:
            if not link.end_broker(arguments.timeout):
                raise DeadlineError(f"the broker {card.name!r} (pid {card.pid}) has not ended yet")
            print(f"{card.name}: ended", file=sys.stderr)
        else:
            _stop(link, arguments.names, arguments.timeout)
    return 0


def _stop(link: BrokerLink, names: list[str], timeout_s: float) -> None:
    there = {present.name: present for present in link.look()}
    unknown = [name for name in names if name not in there]
    if unknown:
        raise UsageError(f"no worker {unknown[0]!r}; there are {', '.join(sorted(there)) or 'none'}")
    for name in names:
        if there[name].state != "ended":
            link.stop_worker(there[name].incarnation, timeout_s)
        print(f"{name}: ended", file=sys.stderr)
