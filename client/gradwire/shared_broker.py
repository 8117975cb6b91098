"""A broker that somebody else runs on this machine (``gradwire up``): how it is found, and watched.

It is named by its address (``ipc://…``), by its runtime folder, or by the name of its file. The folder has its
card, which only programs of the same user can read.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from gradwire.local_broker import LAST_CHARACTERS, LocalBroker
from gradwire_wire.errors import ConnectError
from gradwire_wire.process import open_pidfd
from gradwire_wire.rendezvous import WORDS, Card, find_cards, is_running, read_card, where_sought

__all__ = ["SharedBroker", "card_of"]

SUN_PREFIX = "ipc://"


class SharedBroker(LocalBroker):
    """The same as `gradwire.private_broker.PrivateBroker`, for a process that is not ours to end."""

    ends_with_us = False

    def __init__(self, card: Card) -> None:
        """Raises ConnectError where it is gone."""
        self.card = card
        self.address, self.token, self.folder = card.address, bytes.fromhex(card.token), Path(card.folder)
        self.when_silent = f". If it was stopped (pid {card.pid}): kill -CONT {card.pid}; if it hangs, end it and its workers: kill -9 {card.pid}"
        self.revival = f"start it again with `gradwire up {card.file}`, then connect anew"
        try:
            self.pidfd = open_pidfd(card.pid)
        except OSError as error:
            raise ConnectError(
                f"the broker {card.name!r} (pid {card.pid}) cannot be watched: {error.strerror}"
            ) from error
        if not is_running(self.folder):  # asked after the pidfd was had: this is that very process
            self.close()
            raise ConnectError(_ended(card))

    def last_words(self) -> str:
        """The end of what it wrote to its stderr; normally that is nothing."""
        try:
            return (self.folder / WORDS).read_text(errors="backslashreplace")[-LAST_CHARACTERS:].strip()
        except OSError:
            return ""

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether it ended within the time."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(1000 * max(0.0, timeout_s)))

    def resume(self) -> None:
        """It is not ours to end, either."""

    def kill(self) -> None:
        """It is not ours to kill."""


def card_of(target: str) -> Card:
    """The card of the broker at an ``ipc://`` address, in a folder, or of a name. ConnectError says what there is."""
    if target.startswith("tcp://"):
        raise ConnectError(
            f"{target} is reached with keys, by gradwire.connect(); commands are about the brokers of this machine"
        )
    if target.startswith(SUN_PREFIX):
        return _in(Path(target.removeprefix(SUN_PREFIX)).parent)
    if os.sep in target:
        return _in(Path(target).absolute())
    return _named(target)


def _in(folder: Path) -> Card:
    if not os.path.exists(folder):
        raise ConnectError(f"no shared broker of yours runs in {folder}; `gradwire ps` lists those that run")
    card = read_card(folder)
    if not is_running(Path(card.folder)):
        raise ConnectError(_ended(card))
    return card


def _ended(card: Card) -> str:
    return (
        f"the broker {card.name!r} at {card.address} has ended; start it again with: gradwire up {card.file}"
    )


def _named(name: str) -> Card:
    cards = find_cards(os.environ)
    found = [card for card in cards if card.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        addresses = ", ".join(card.address for card in found)
        raise ConnectError(f"several brokers are named {name!r}; name one by its address: {addresses}")
    running = ", ".join(repr(card.name) for card in cards) or "none"
    raise ConnectError(
        f"no shared broker named {name!r} runs here (running: {running}); start one with: gradwire up FILE. "
        f"A file is named with its ending, as in gradwire.toml. ({where_sought(os.environ)})"
    )
