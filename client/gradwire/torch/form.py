"""What a `gradwire.torch.Module` calls that owns the parameters. `gradwire.torch.stage` is for one that leaves them in the worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import gradwire.torch
from gradwire.families import family_of_call
from gradwire.functional import Functional
from gradwire_wire.tensors.torch import NAME

if TYPE_CHECKING:
    from gradwire.handle import Handle
    from gradwire.remote import Remote
    from gradwire.site import Site

__all__ = ["Form"]


class Form(Functional):
    """The remote's functional form in one mode: the parameters are an argument of each call. Deep copies of a module share it."""

    owns_parameters = True

    def __init__(self, remote: Remote, *, buffers: bool, training: bool) -> None:
        super().__init__(remote, buffers=buffers, training=training)
        self._sites: dict[tuple[object, ...], Site] = {}

    def __repr__(self) -> str:
        return repr(self.remote)

    def evaluating(self) -> Form:
        """The same in evaluation mode; itself where the remote has no modes."""
        if self.training is None:
            return self
        return Form(self.remote, buffers=self.has_explicit_buffers, training=False)

    @property
    def training(self) -> bool | None:
        """The mode of its calls; None where the remote has none."""
        return self.handle.training

    def enter(self) -> None:
        """Nothing: each call says its mode."""

    def call(self, given: Sequence[Mapping[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with these parameters (and buffers)."""
        if not kwargs and all([isinstance(x, torch.Tensor) for x in args]):
            operands = [x for tensors in given for x in tensors.values()]
            key = (len(args), *[name for tensors in given for name in tensors])
            site = self._sites.get(key)
            if site is None:
                site = self._sites[key] = self._described(given, args, kwargs)[0]
            return gradwire.torch.call(self.handle, site, [*operands, *args])
        site, leaves = self._described(given, args, kwargs)
        family_of_call(leaves, site.structure, NAME)
        return gradwire.torch.call(self.handle, site, leaves)

    def _described(
        self, given: Sequence[Mapping[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Site, list[Any]]:
        return self.flatten(given[0], (*given[1:], *args), kwargs)

    def described(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Handle, Site]:
        """For a compiler that traces the call; see `gradwire.remote.Remote.described`."""
        return self.handle, self.flatten(args[0], tuple(args[1:]), kwargs)[0]
