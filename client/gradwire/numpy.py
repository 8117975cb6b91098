"""The numpy caller: no autodiff of its own, so a call is just a call; see `Remote.vjp` and `Remote.jvp`."""

from __future__ import annotations

from typing import Any

from gradwire.handle import Handle
from gradwire.site import Site
from gradwire_wire.errors import DtypeError
from gradwire_wire.structures import fill
from gradwire_wire.tensors.numpy import adopt, adopt_all, export_all

__all__ = ["ACCUMULATES", "NAME", "call", "is_plain"]

NAME = "numpy"
ACCUMULATES = False


def call(handle: Handle, site: Site, operands: list[Any]) -> Any:
    """Arrays in, arrays out. Results are private to this process and writable."""
    carriers, structure, _ = outcome = handle.invoke(site, (), export_all(operands))
    try:
        results = adopt_all(carriers)
    except DtypeError:
        results = outcome.adopted(adopt)  # raises it with the result's name
    return fill(structure, results)


def is_plain(site: Site, operands: list[Any]) -> bool:
    """See `Face`: nothing is ever recorded."""
    return True
