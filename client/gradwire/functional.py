"""A remote module as a function of its parameters: the common ground of `gw.jax.functional`, `gw.torch.Module`, `gw.keras.Layer`.

The worker is asked once for its module as a target that takes its parameters as its first argument
(`FunctionalHandle`). From then on they are operands like any other: every transformation, order and framework
that works for inputs works for parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradwire import answers
from gradwire.connection import Connection
from gradwire.families import family_of, is_leaf, tensors_named
from gradwire.handle import Handle
from gradwire.regularizers import warn_of_regularizers
from gradwire.remote import Remote
from gradwire.site import Site
from gradwire.stakes import Stake, Stakes
from gradwire_wire import messages
from gradwire_wire.carriers import Carrier
from gradwire_wire.errors import UsageError
from gradwire_wire.exchange import INLINE_BYTES
from gradwire_wire.structures import flatten

__all__ = ["Functional", "FunctionalHandle", "check_owner", "check_remote", "checked_module"]


def check_remote(x: Any) -> None:
    """UsageError for what is none, such as a worker or a module of this process."""
    if not isinstance(x, Remote):
        raise UsageError(f"{x!r:.80} is no gradwire.Remote; give what worker.module(...) returns")


def check_owner(face: str, owner: str, buffers: str) -> None:
    """UsageError for words that these are not, and for buffers that would have another owner than the parameters. face: who asks."""
    if owner not in ("caller", "worker") or buffers not in ("worker", "explicit"):
        raise UsageError(
            f"{face}(owner={owner!r}, buffers={buffers!r}): owner is 'caller' or 'worker', buffers 'worker' or 'explicit'"
        )
    if owner == "worker" and buffers == "explicit":
        raise UsageError(
            "buffers='explicit' needs owner='caller': the worker owns all of the state or the caller does"
        )


def checked_module(x: Any) -> Remote:
    """A remote module. UsageError for a function, and for what is no remote."""
    check_remote(x)
    if not x.handle.is_module:
        raise UsageError(
            f"{x!r} is a function and has no parameters. Load a module with worker.module(...), from a "
            "factory that returns one"
        )
    remote: Remote = x
    return remote


class FunctionalHandle(Handle):
    """The handle of a module's functional form. Loaded again with its module when the worker was restarted.

    buffers: whether they come as the second argument and go back with the result, or stay in the worker.
    training: the mode of its calls, whatever the module's is; None is the module's.
    trainable: of the Keras layer that calls it, to which the losses come with the result; None where none does.
    """

    def __init__(
        self, module: Handle, buffers: bool, training: bool | None = None, trainable: bool | None = None
    ) -> None:
        self._module, self._buffers, self._mode = module, buffers, training
        self._trainable = trainable
        super().__init__(module._connect, "module", module._target, b"", [])

    @property
    def stakes(self) -> Stakes:
        """The module's."""
        return self._module.stakes

    @stakes.setter
    def stakes(self, value: Stakes) -> None: ...

    def _stake_of_call(self, site: Site) -> Stake:
        return Stake.NOTHING if self._buffers else Stake.BUFFERS

    def _load(self, connection: Connection) -> None:
        self._module._there()
        mode = [self._mode, self._trainable]
        while mode and mode[-1] is None:
            mode.pop()
        structure, _ = flatten([[self._buffers, *mode], {}], is_leaf)
        reply, _ = connection.request(
            lambda call_id, headers: messages.State(
                call_id, self._module._remote, "functional", structure, headers
            ),
            [],
            None,
        )
        self._note_number(connection, answers.number(reply.structure))
        self._specs.clear()
        self._loaded = connection

    @property
    def is_module(self) -> bool:
        return True

    @is_module.setter
    def is_module(self, value: bool) -> None: ...

    @property
    def moves_in_evaluation(self) -> bool:
        return self._module.moves_in_evaluation

    @moves_in_evaluation.setter
    def moves_in_evaluation(self, value: bool) -> None: ...

    @property
    def changes(self) -> int:
        """The module's: its buffers are part of what a forward gives."""
        return self._module.changes

    @changes.setter
    def changes(self, value: int) -> None: ...

    def _count_change(self) -> None:
        self._module._count_change()

    @property
    def training(self) -> bool | None:
        """The mode of its calls; None where the module has no modes."""
        own = self._module.training
        return own if own is None or self._mode is None else self._mode

    @training.setter
    def training(self, value: bool | None) -> None: ...


class Functional:
    """What a face needs of a remote module whose parameters its caller owns.

    buffers: whether they are explicit: an argument and a result of each call.
    training, trainable: see `FunctionalHandle`.
    """

    def __init__(
        self,
        remote: Remote,
        *,
        buffers: bool = False,
        training: bool | None = None,
        trainable: bool | None = None,
    ) -> None:
        self.remote, self.has_explicit_buffers = checked_module(remote), buffers
        if trainable is None:
            warn_of_regularizers(remote)
        self.handle = FunctionalHandle(remote.handle, buffers, training, trainable)
        self._caches = self.handle.share_caches()
        if trainable is None:  # at once, for what has no parameters yet says so
            self.handle._there()

    def frozen(self) -> list[str]:
        """The parameters that `Remote.requires_grad_` has frozen, or the module itself."""
        return list(self.remote._change("frozen"))

    def resident(self, x: Any, family: str) -> Any:
        """A copy of a tensor in the bridge's shared memory, as a tensor of ``family``: while it is there calls need not copy it.

        What is small travels in the message anyway, and is an ordinary copy. DtypeError where the family would narrow it.
        """
        array, dtype, _ = tensors_named(family_of(x)).export(x)
        is_small = array.nbytes <= INLINE_BYTES
        copy = np.empty(array.shape, array.dtype) if is_small else self.handle.empty(array.shape, array.dtype)
        np.copyto(copy, array)
        return tensors_named(family).adopt(Carrier(copy, dtype))

    def site(self, structure: bytes) -> Site:
        """Everything fixed about a call whose argument tree is ``[[parameters, *args], kwargs]``.

        With ``[[parameters, buffers, *args], kwargs]`` a call in training mode moves nothing in the worker: it is
        stateful only by its random numbers, which a seed fixes.
        """
        remote, training = self.remote, self.handle.training
        moves = bool(training) and not (
            self.has_explicit_buffers and remote._options.seed is not None  # traced or not
        )
        if self.handle.moves_in_evaluation and not self.has_explicit_buffers:
            moves = True
        return remote._site(structure, stateful=moves, training=training)

    def flatten(
        self, parameters: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Site, list[Any]]:
        """The site of this call, and its operands: those of the parameters first (after a traced seed)."""
        if not isinstance(parameters, Mapping):
            raise UsageError(
                f"the first argument of apply must be the parameters, a dict of tensors by name as functional() gave it; this is "
                f"{parameters!r:.80}"
            )
        structure, leaves = flatten([[dict(parameters), *args], kwargs], is_leaf)
        return self.site(structure), [*self.remote.seed_operand, *leaves]
