"""What a `gradwire.torch.Module` calls that leaves its state in the worker. `gradwire.torch.form` is for one that owns the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradwire.functional import checked_module
from gradwire_wire.errors import UsageError
from gradwire_wire.tensors.torch import NAME

if TYPE_CHECKING:
    from gradwire.handle import Handle
    from gradwire.remote import Remote
    from gradwire.site import Site

__all__ = ["Stage"]


class Stage:
    """The remote, in one mode: that of the worker's module is changed where it is another. Has what `Form` has."""

    owns_parameters = has_explicit_buffers = False

    def __init__(self, remote: Remote, training: bool = True) -> None:
        self.remote = checked_module(remote).options(family=NAME)
        self._mode = training

    def __repr__(self) -> str:
        return repr(self.remote)

    def evaluating(self) -> Stage:
        """The same in evaluation mode; itself where the remote has no modes."""
        return self if self.training is None else Stage(self.remote, training=False)

    @property
    def training(self) -> bool | None:
        """The mode that its calls are in; None where the remote has none."""
        return self.remote.training

    def enter(self) -> None:
        """Set the mode, unless it is set."""
        if self.remote.training not in (None, self._mode):
            self.remote.train(self._mode)

    def call(self, given: Sequence[Mapping[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with the worker's own parameters."""
        self.enter()
        return self.remote(*args, **kwargs)

    def described(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Handle, Site]:
        """For a compiler that traces the call; see `gradwire.remote.Remote.described`. UsageError in another mode than its own."""
        if self.training not in (None, self._mode):
            raise UsageError(
                f"{self.remote!r} is in {'training' if self.training else 'evaluation'} mode and the module that is compiled is "
                "not: something else has set it. Call train() or eval() of the module"
            )
        return self.remote.described(args, kwargs)
