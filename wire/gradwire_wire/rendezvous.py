"""Where brokers are met: their runtime folders, and the card by which a shared one is found.

``<candidate>/gradwire-<uid>-<random>`` is the folder of one broker, mode 0700, locked (``flock`` on the folder
itself) by its broker for as long as that lives. A shared broker leaves its *card* there, a file of mode 0600 that
tells another program of the same user the address and the token. A private one leaves none: nobody else is to find it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any, Iterator, Mapping, NamedTuple

from gradwire_wire.errors import ConnectError

__all__ = [
    "LONGEST_NAME",
    "SUN_PATH",
    "WORDS",
    "Card",
    "NamedAlike",
    "candidates",
    "check_alone",
    "check_fit",
    "find_cards",
    "folder_prefix",
    "folders",
    "has_card",
    "is_running",
    "named_alike",
    "read_card",
    "where_sought",
    "why_unfit",
    "write_card",
]

CARD = "broker.json"
WORDS = "broker.log"
"""What a shared broker writes to its stderr; normally nothing."""
SUN_PATH = 107  # bytes of a Unix socket's path, without the final zero
LONGEST_NAME = "w0123456789abcdef.zmq"
_SYSTEM_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


class Card(NamedTuple):
    """A shared broker. ``token``: hexadecimal. ``file``: the gradwire.toml it was started with. ``listens``: at tcp, or ""."""

    name: str
    address: str
    token: str
    pid: int
    folder: str
    file: str
    listens: str


def candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    """Where a broker's folder may be, best first."""
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        if environment.get(name):
            yield Path(environment[name])
    yield from map(Path, _SYSTEM_FOLDERS)


def check_fit(parent: Path) -> None:
    """OSError if sockets below this folder could not be named, or somebody else could replace ours."""
    if not parent.is_absolute():
        raise OSError(errno.EINVAL, "not an absolute path")
    longest = len(os.fsencode(parent / f"{folder_prefix()}01234567" / LONGEST_NAME))
    if longest > SUN_PATH:
        raise OSError(
            errno.ENAMETOOLONG, f"a socket's path would have {longest} bytes, {SUN_PATH} are allowed"
        )
    try:
        str(parent).encode()
    except UnicodeEncodeError as error:
        raise OSError(errno.EILSEQ, "its name is not UTF-8, as ZeroMQ wants it") from error
    about = os.stat(parent)
    if not stat.S_ISDIR(about.st_mode):
        raise OSError(errno.ENOTDIR, "not a folder")
    if about.st_uid not in (0, os.geteuid()):
        raise OSError(errno.EPERM, "it belongs to another user")
    if about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
        raise OSError(errno.EPERM, "other users may rename what is in it")


def why_unfit(parent: Path) -> str:
    """Why no broker's folder can be made there; "" where one can, as far as can be told without making one."""
    try:
        check_fit(parent)
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(parent, os.W_OK | os.X_OK) else "it cannot be written to"


def folder_prefix() -> str:
    """How the names of this user's folders begin."""
    return f"gradwire-{os.geteuid()}-"


def folders(environment: Mapping[str, str]) -> list[Path]:
    """All runtime folders of this user, of brokers that run or ran. (A program started elsewhere may have had
    an XDG_RUNTIME_DIR that this one has not.)"""
    parents = _parents(environment)
    found = (path for parent in parents for path in sorted(parent.glob(f"{folder_prefix()}*")))
    return [path for path in found if _is_ours(path)]


def _parents(environment: Mapping[str, str]) -> list[Path]:
    return list(dict.fromkeys([*candidates(environment), Path(f"/run/user/{os.geteuid()}")]))


def where_sought(environment: Mapping[str, str]) -> str:
    """For messages: where `folders` looks, and how one that is elsewhere is reached."""
    looked = ", ".join(str(parent) for parent in _parents(environment) if parent.is_dir())
    return (
        f"looked in {looked}; one that was started with another TMPDIR or XDG_RUNTIME_DIR, or as a service with a /tmp of its own, "
        "is named by the address that `gradwire up` has printed"
    )


def is_running(folder: Path) -> bool:
    """Whether a broker holds the folder's lock."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(fd)


def write_card(card: Card) -> None:
    """Leave it in its folder, whole or not at all. OSError."""
    path = os.path.join(card.folder, CARD)
    fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(card._asdict(), file)
    os.rename(f"{path}.new", path)


def has_card(folder: Path) -> bool:
    """Whether there is one."""
    return (folder / CARD).exists()


def read_card(folder: Path) -> Card:
    """The card in a folder that only this user can have written. ConnectError says why there is none."""
    if not _is_ours(folder):
        raise ConnectError(
            f"{folder} is no runtime folder of yours (a folder of mode 0700 that belongs to you)"
        )
    try:
        fd = os.open(folder / CARD, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(fd) as file:
            about = os.fstat(fd)
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise ConnectError(f"{folder / CARD} must belong to you alone (mode 0600)")
            return _checked_card(json.load(file))
    except OSError as error:
        raise ConnectError(f"no shared broker is described in {folder}: {error.strerror}") from error
    except ValueError as error:
        raise ConnectError(f"{folder / CARD} is damaged: {error}") from error


def _checked_card(raw: Any) -> Card:
    fields = Card.__annotations__
    if type(raw) is not dict or raw.keys() != fields.keys():
        raise ValueError(f"it must have {', '.join(fields)}")
    card = Card(**raw)
    texts = (card.name, card.address, card.token, card.folder, card.file, card.listens)
    if any(type(text) is not str for text in texts) or type(card.pid) is not int or card.pid < 1:
        raise ValueError("a field has the wrong type")
    bytes.fromhex(card.token)
    return card


def find_cards(environment: Mapping[str, str]) -> list[Card]:
    """The cards of this user's shared brokers that run."""
    cards = []
    for folder in folders(environment):
        try:
            if is_running(folder):
                cards.append(read_card(folder))
        except ConnectError:
            continue  # a private one
    return cards


class NamedAlike(ConnectError):
    """A broker of that name runs already."""


def check_alone(folder: str, environment: Mapping[str, str]) -> None:
    """NamedAlike where another broker of this user has the name on the folder's card, and had its card before.

    Who starts asks before, and again when its own card is there: of several that start at once, one then stays.
    """
    mine = read_card(Path(folder))
    for other in find_cards(environment):
        if other.name == mine.name and other.folder != folder and _had_card(other) < _had_card(mine):
            raise named_alike(other)


def named_alike(card: Card) -> NamedAlike:
    """What to do about it."""
    return NamedAlike(
        f"a broker named {card.name!r} runs already (pid {card.pid}, {card.address}); end it with "
        f"`gradwire stop --all --broker {card.name}`, or give this file another name = at its top"
    )


def _had_card(card: Card) -> tuple[int, str]:
    """Since when others can see the card (it was renamed then); one that has gone was never in the way."""
    try:
        return os.stat(os.path.join(card.folder, CARD)).st_ctime_ns, card.folder
    except OSError:
        return 1 << 63, card.folder


def _is_ours(folder: Path) -> bool:
    try:
        about = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077
