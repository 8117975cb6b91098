"""``gradwire keys``: keys for brokers that are used over tcp."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gradwire.commands.miswritten import Miswritten
from gradwire_wire import keys

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "keys",
        help="make keys for a broker that is used over tcp",
        description="Make the keys by which a broker and its clients know each other over tcp, as files in a folder (see "
        "docs/security.md). To lock a client out, remove DIR/server/clients/NAME.key.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    create = verbs.add_parser("create", help="a broker's key and those of its first client")
    create.set_defaults(usage_error=create.error)
    create.add_argument("folder", metavar="DIR", help="where they go")
    create.add_argument("--client", metavar="NAME", default="client", help="the first client's name (client)")
    add = verbs.add_parser("add", help="keys of a further client")
    add.set_defaults(usage_error=add.error)
    add.add_argument("folder", metavar="DIR", help="made by `gradwire keys create`")
    add.add_argument("client", metavar="NAME", help="the client's name")


def run(arguments: argparse.Namespace) -> int:
    """Make them, and say what goes where."""
    folder = Path(arguments.folder)
    if not keys.NAME.fullmatch(arguments.client):
        raise Miswritten(
            f"a client's name is made of letters, digits, '_', '-' and '.': {arguments.client!r} is not"
        )
    if arguments.verb == "create":
        keys.create_server(folder)
    theirs = keys.add_client(folder, arguments.client)
    print(f"the broker: gradwire up FILE --listen tcp://HOST:PORT --keys {folder}")
    print(f"{arguments.client}: take {theirs} to its machine, and name it there in GRADWIRE_KEYS")
    print(
        f"to lock {arguments.client} out again, remove {folder / 'server' / 'clients' / arguments.client}.key"
    )
    return 0
