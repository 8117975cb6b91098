"""What a remote module has, fetched once, when a `gradwire.torch.Module` is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradwire_wire.errors import GradwireError, RemoteError, UsageError
from gradwire_wire.tensors.torch import NAME

if TYPE_CHECKING:
    from gradwire.remote import Remote

__all__ = ["Contents"]


class Contents:
    """What a remote module has, under its own names.

    persistent: the names of its state dict. extra: those of them that are neither parameters nor buffers.
    unfetchable: why it cannot be had, where it has what cannot be sent.
    """

    def __init__(self, remote: Remote) -> None:
        own = remote.options(family=NAME)
        self.parameters, self.buffers = own.parameters(), own.buffers()
        self.frozen, self.aliases = set(remote._change("frozen")), dict(remote._change("aliases"))
        self.unfetchable: GradwireError | None = None
        try:
            self.persistent = list(own.state_dict())
        except (UsageError, RemoteError) as error:
            self.persistent, self.unfetchable = list(self.buffers), error
        known = {*self.parameters, *self.aliases, *self.buffers}
        self.extra = [name for name in self.persistent if name not in known]
