"""Which shared broker a command is about: the one that runs, or the one that ``--broker`` names."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any

from gradwire.broker_link import BrokerLink
from gradwire.shared_broker import SharedBroker, card_of
from gradwire_wire.errors import ConnectError
from gradwire_wire.rendezvous import Card, find_cards, where_sought

__all__ = ["ANSWER_S", "add_option", "chosen_card", "linked"]

ANSWER_S = 10.0


def add_option(parser: Any) -> None:
    """``--broker``."""
    parser.add_argument(
        "--broker",
        metavar="NAME",
        help="name, address or folder of the broker (default: the one that runs)",
    )


def chosen_card(arguments: argparse.Namespace, otherwise: str = "") -> Card:
    """The broker's card. ConnectError where there is none (and what else could be done), or several and none was named."""
    if arguments.broker:
        return card_of(arguments.broker)
    cards = find_cards(os.environ)
    if not cards:
        raise ConnectError(
            f"no shared broker runs here; start one with: gradwire up FILE{otherwise} ({where_sought(os.environ)})"
        )
    if len(cards) > 1:
        names = ", ".join(f"{card.name} ({card.address})" for card in cards)
        raise ConnectError(f"several brokers run here; say which with --broker NAME: {names}")
    return cards[0]


@contextlib.contextmanager
def linked(card: Card) -> Iterator[BrokerLink]:
    """A link to that broker, for as long as a command takes."""
    link = BrokerLink.to_shared(SharedBroker(card), ANSWER_S)
    try:
        yield link
    finally:
        link.close()
