"""What the proxies of things in a worker refuse, and what they say then."""

from __future__ import annotations

from typing import Any

from gradwire_wire.errors import UsageError

__all__ = ["no_attribute", "stays_here"]


def no_attribute(proxy: Any, name: str, advice: str) -> AttributeError:
    """What an attribute raises that a proxy has not."""
    kind = type(proxy).__name__
    return AttributeError(f"{kind!r} object has no attribute {name!r}: {advice}", name=name, obj=proxy)


def stays_here(what: str, x: Any, instead: str = "") -> UsageError:
    """What copying and pickling a proxy raise: a copy would share the worker's state, silently or not at all."""
    return UsageError(
        f"{x!r} stands for something in a worker and cannot be copied or pickled.{instead} Keep one {what} and share it; "
        "another process makes its own with gradwire.connect(...)"
    )
