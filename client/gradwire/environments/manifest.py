"""What an environment in the cache is, and what it is found again by. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from gradwire.environments.requirements import NEEDS, Requirements

__all__ = ["FORMAT", "Interpreter", "Manifest", "key_of", "name_of"]

FORMAT = 1
"""Of the cache; part of the key, so that another format is another environment."""


class Interpreter(NamedTuple):
    """The interpreter that an environment is made from. ``executable``: with links followed."""

    implementation: str
    version: str
    platform: str
    abi: str
    executable: str

    @property
    def minor(self) -> str:
        """Such as "3.11"."""
        return ".".join(self.version.split(".")[:2])


class Manifest(NamedTuple):
    """Written into an environment when it is finished, and last. ``built``: seconds since 1970."""

    key: str
    requirements: list[str]
    interpreter: Interpreter
    installer: str
    built: float
    seconds: float
    nbytes: int

    def to_text(self) -> str:
        """As it stands in its file."""
        fields = {**self._asdict(), "interpreter": self.interpreter._asdict(), "format": FORMAT}
        return json.dumps(fields, indent=2) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Manifest | None:
        """None for anything but what `to_text` writes, such as half of it or another format's."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("format") != FORMAT:
                return None
            return cls(**{**fields, "interpreter": Interpreter(**fields["interpreter"])})
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def key_of(requirements: Requirements, interpreter: Interpreter) -> str:
    """64 hexadecimal digits. What is not in it does not tell environments apart: the installer, its index, the day."""
    content = [FORMAT, requirements.options, requirements.packages, interpreter]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def name_of(requirements: Requirements, interpreter: Interpreter) -> str:
    """The folder's name: what people recognise, and enough of the key."""
    asked_for = [name for name in requirements.names if name not in NEEDS]
    return (
        "-".join([f"py{interpreter.minor}", *asked_for[:2]])[:48]
        + f"-{key_of(requirements, interpreter)[:12]}"
    )
