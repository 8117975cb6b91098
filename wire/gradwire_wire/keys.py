"""Folders of keys for ``tcp://``: who may use a broker from elsewhere, and whom a client takes for it.

::

    DIR/server/secret.key          the broker's, mode 0600: it stays where the broker runs
    DIR/server/public.key
    DIR/server/clients/NAME.key    a public key that may come in; removing the file locks its owner out
    DIR/clients/NAME/              what NAME needs: this folder is taken to NAME's machine
        secret.key, public.key     NAME's own
        server.key                 the broker's public key

Each file holds one key of CURVE in Z85, 40 characters. A secret that others may read is refused.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from gradwire_wire.errors import UsageError
from gradwire_wire.sockets import ClientKeys, ServerKey, new_keys

__all__ = ["add_client", "client_keys", "create_server", "is_known", "server_key"]

KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def create_server(folder: Path) -> None:
    """A new broker's key in ``folder/server``. UsageError where there is one, for others rely on it, or no folder can be."""
    server = folder / "server"
    if (server / "secret.key").exists():
        raise UsageError(f"{server} has a key already, which clients know; name another folder")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for made in (server, server / "clients", folder / "clients"):
            made.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise UsageError(f"no keys can be kept in {folder}: {why}; name another folder") from error
    public, secret = new_keys()
    _write(server / "public.key", public)
    _write(server / "secret.key", secret)


def add_client(folder: Path, name: str) -> Path:
    """A new client's keys, and its entry at the broker. Returns the folder that the client needs. UsageError."""
    if not NAME.fullmatch(name):
        raise UsageError(f"a client's name is made of letters, digits, '_', '-' and '.', and {name!r} is not")
    theirs = folder / "clients" / name
    if theirs.exists():
        raise UsageError(f"there is a client {name!r} already, in {theirs}")
    server = _read(folder / "server" / "public.key")
    public, secret = new_keys()
    theirs.mkdir(mode=0o700, parents=True)
    _write(theirs / "secret.key", secret)
    _write(theirs / "public.key", public)
    _write(theirs / "server.key", server)
    _write(folder / "server" / "clients" / f"{name}.key", public)
    return theirs


def server_key(folder: Path) -> ServerKey:
    """The broker's key. UsageError."""
    return ServerKey(_read(folder / "server" / "secret.key", is_secret=True))


def client_keys(folder: Path) -> ClientKeys:
    """A client's keys. UsageError."""
    if (folder / "server" / "secret.key").exists():
        raise UsageError(
            f"{folder} has the broker's keys; a client needs the folder of its own, such as {folder}/clients/NAME"
        )
    return ClientKeys(
        _read(folder / "public.key"),
        _read(folder / "secret.key", is_secret=True),
        _read(folder / "server.key"),
    )


def is_known(folder: Path, public: str) -> bool:
    """Whether the owner of that public key may come in, as the folder says at this moment. OSError."""
    return any(path.read_text().strip() == public for path in (folder / "server" / "clients").glob("*.key"))


def _read(path: Path, is_secret: bool = False) -> str:
    try:
        about = os.stat(path)
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"the key {path} cannot be read: {why}; make keys with `gradwire keys create DIR`"
        ) from error
    if is_secret and (stat.S_IMODE(about.st_mode) & 0o077 or about.st_uid not in (0, os.geteuid())):
        raise UsageError(
            f"the secret {path} can be read by others: chmod 600 {path}, and better make new keys"
        )
    if not KEY.fullmatch(text):
        raise UsageError(f"{path} does not hold a key (40 characters of Z85)")
    return text


def _write(path: Path, key: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(f"{key}\n")
