"""``gradwire logs NAME``: what a worker of a shared broker printed last, and what it prints from now on."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from gradwire.commands.brokers import add_option, chosen_card, linked

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "logs",
        help="what a worker printed last",
        description="Print the last lines that a worker wrote to its stdout and stderr; the broker keeps about a thousand. "
        "A worker that ended has them as well.",
    )
    parser.add_argument("name", metavar="NAME", help="the worker")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what it prints, until Ctrl-C")
    add_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print them to stdout."""
    with linked(chosen_card(arguments)) as link:
        if not arguments.follow:
            log = link.read_log(arguments.name)
            print(log, end="\n" if log else "", flush=True)
            return 0
        with contextlib.suppress(KeyboardInterrupt):
            for number, text in enumerate(link.follow_log(arguments.name)):
                print(text, end="\n" if text and not number else "", flush=True)
    return 0
