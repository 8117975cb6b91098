"""``gradwire up FILE``: start a shared broker and the workers of a gradwire.toml, for any number of programs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from gradwire.broker_link import BrokerLink
from gradwire.commands.miswritten import Miswritten
from gradwire.configuration import Configuration, WorkerEntry, read
from gradwire.fleet import spec_of, start_together
from gradwire.private_broker import Sharing
from gradwire.worker_records import WorkerFacts
from gradwire_wire.errors import ConnectError, UsageError
from gradwire_wire.keys import server_key
from gradwire_wire.rendezvous import find_cards, named_alike
from gradwire_wire.sockets import is_address

__all__ = ["add_parser", "run"]

BROKER_S = 60.0
LOOK_S = 3600.0


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "up",
        help="start a shared broker with the workers of a file",
        description="Start a shared broker with the workers of a gradwire.toml, build the environments they need, and print "
        "the address for gradwire.connect(). Without --foreground they go on until `gradwire stop --all`.",
    )
    parser.add_argument("file", metavar="FILE", help="a gradwire.toml (see docs/reference/configuration.md)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--detach", action="store_true", help="return once all workers are ready (the default)")
    how.add_argument(
        "--foreground",
        action="store_true",
        help="stay, show what workers print, end all with Ctrl-C or SIGTERM",
    )
    parser.add_argument(
        "--listen", metavar="ADDRESS", default="", help="also at tcp://HOST:PORT; needs --keys"
    )
    parser.add_argument("--keys", metavar="DIR", default="", help="keys made by `gradwire keys create DIR`")


def run(arguments: argparse.Namespace) -> int:
    """Start all, or nothing."""
    _check_written(arguments)
    if arguments.foreground:
        _end_in_order()
    configuration = read(arguments.file)
    _check(configuration, arguments)
    sharing = Sharing(
        name=configuration.name,
        file=os.path.abspath(arguments.file),
        allow=configuration.allow,
        stays=not arguments.foreground,
        listen=arguments.listen,
        keys=os.path.abspath(arguments.keys) if arguments.keys else "",
    )
    link = BrokerLink.start_private(BROKER_S, len(configuration.workers), sharing)
    try:
        workers = start_together(
            configuration.workers.values(), lambda entry: _start(link, entry, stays=sharing.stays)
        )
        if sharing.stays:
            link.let_go()
    except BaseException:
        _end(link)
        raise
    _announce(configuration, link, workers, arguments.listen)
    if arguments.foreground:
        _stay(link)
    link.close()
    return 0


def _check_written(arguments: argparse.Namespace) -> None:
    if bool(arguments.listen) != bool(arguments.keys):
        raise Miswritten(
            "--listen and --keys go together: tcp is never in the clear. Make keys with: gradwire keys create DIR"
        )
    if arguments.listen and not is_address(arguments.listen.replace("*", "0.0.0.0")):
        raise Miswritten(f"--listen {arguments.listen}: write it as tcp://HOST:PORT, IPv6's HOST in brackets")


def _check(configuration: Configuration, arguments: argparse.Namespace) -> None:
    if configuration.address is not None:
        raise UsageError(
            f"{arguments.file} names a broker elsewhere ({configuration.address}): it has no workers to start"
        )
    if arguments.keys:
        server_key(Path(arguments.keys))
    for card in find_cards(os.environ):
        if card.name == configuration.name:
            raise named_alike(card)


def _start(link: BrokerLink, entry: WorkerEntry, stays: bool) -> WorkerFacts:
    return link.start_worker(spec_of(entry, lasts=stays))


def _end(link: BrokerLink) -> None:
    """Nothing half-started is left, whoever the broker would have belonged to."""
    if link.is_shared and link.broker_alive:
        link.end_broker()
    link.close()


def _announce(
    configuration: Configuration, link: BrokerLink, workers: list[WorkerFacts], listens: str
) -> None:
    for facts in workers:
        version = facts.info.get("version", "")
        print(f"{facts.name}: {facts.info.get('framework', '')} {version} (pid {facts.pid})", file=sys.stderr)
    also = f", and with a key at {listens}" if listens else ""
    print(
        f"{configuration.name} is up; connect with gradwire.connect({configuration.name!r}), or by the address{also}",
        file=sys.stderr,
    )
    print(link.address, flush=True)


def _end_in_order() -> None:
    """How service managers, containers and terminals end a program is the same as Ctrl-C from now on.

    (The first process of a container is not even ended by SIGTERM unless it handles it.)
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, signal.default_int_handler)


def _stay(link: BrokerLink) -> None:
    """Until Ctrl-C or a signal like it, or the broker ends."""
    try:
        while not link.wait_broker_ended(LOOK_S):
            pass
        raise ConnectError("the broker has ended")
    except KeyboardInterrupt:
        print("ending the workers", file=sys.stderr)
