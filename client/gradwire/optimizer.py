"""An optimizer that is in the worker, as its caller holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradwire import hints, minimizing
from gradwire.families import untraced
from gradwire.orders import checked_target
from gradwire.proxies import no_attribute, stays_here
from gradwire.regularizers import warn_of_regularizers
from gradwire.selection import checked_options
from gradwire_wire.errors import UsageError

__all__ = ["Optimizer"]


class Optimizer:
    """An optimizer in the worker, as long as this object is there. Its methods wait for what compiled programs have dispatched."""

    __slots__ = ("__weakref__", "_number", "_remote", "_target")

    def __init__(self, remote: hints.Remote, target: str, number: int) -> None:
        self._remote, self._target, self._number = remote, target, number
        remote.handle.drop_with(self, number)

    def __repr__(self) -> str:
        return f"<gradwire.Optimizer {self._target} of {self._remote.handle.name}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise stays_here("optimizer", self, " Its values can be saved: optimizer.state_dict().")

    if not TYPE_CHECKING:  # which is to find misspelt names

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(
                self,
                name,
                "its options are in the worker, to be changed by set(lr=...) and read in state_dict()",
            )

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in self.__slots__:
                getattr(self, name)
            super().__setattr__(name, value)

    def _change(self, verb: str, *args: Any) -> Any:
        return self._remote._change(verb, self._number, *args)

    @untraced
    def step(self, clip_norm: float | None = None, *, zero_grad: bool = False) -> float | None:
        """Apply the accumulated gradients, then advance the schedules. UsageError where no pullback has accumulated any.

        clip_norm: the most that the norm of all gradients together may be; they are scaled down to it. Returns what it
        was before; None without clip_norm. zero_grad: forget the gradients then, in the same message.
        """
        warn_of_regularizers(self._remote, "step")
        norm = self._change("step", _clip_norm(clip_norm), bool(zero_grad))
        return None if norm is None else float(norm)

    @untraced
    def minimize(self, /, *args: Any, clip_norm: float | None = None, **kwargs: Any) -> Any:
        """A whole training step in one message, of a module whose result is its loss, one real number. Returns the result.

        Does what ``loss = net(*args, **kwargs)``, ``loss.backward()`` and ``step(clip_norm, zero_grad=True)`` do, in one round trip
        instead of three. A result may have more than the loss: then that is its first item, or what is called ``loss`` in it (as in
        transformers' results). Arguments and results are constants: whatever made the arguments gets no gradient. Results are of their framework.
        Optimizers that evaluate the loss themselves (``"torch.optim:LBFGS"``) do so in the worker, and the first result is given.
        UsageError where there is no loss, or where the arguments want a gradient: nothing has moved then but what a forward moves.
        """
        warn_of_regularizers(self._remote, "step")
        return minimizing.minimize(self._remote, ("M", self._number, _clip_norm(clip_norm)), args, kwargs)

    @untraced
    def submit(self, /, *args: Any, clip_norm: float | None = None, **kwargs: Any) -> hints.Future[Any]:
        """`minimize` without waiting: returns a future of the result.

        Steps are made in the order of their submission, and each starts from the parameters that the step before has left. While the
        worker makes one, the next is on its way. Any other call of the same worker waits for the steps that were submitted before it,
        and sees what they have done.

        A step that fails moves nothing, and later steps are made all the same. Its future raises the error. If nobody has asked the
        future by then, the next call, verb or `submit` raises it, once.

        Of the arguments a copy is taken at once, but for those in shared memory (`Bridge.empty`), which must not be written until the
        step is done. At most ten steps are under way: then this waits for the first of them. It also waits for futures among the
        arguments, and where steps cannot be under way (over tcp, while the bridge is traced), for the step itself. Arguments that cannot
        be sent, or want a gradient, raise at once, as in `minimize`.
        """
        warn_of_regularizers(self._remote, "step")
        return minimizing.submit(self, self._remote, ("M", self._number, _clip_norm(clip_norm)), args, kwargs)

    def zero_grad(self) -> None:
        """Forget the accumulated gradients of the parameters that it moves."""
        self._change("zero_grad")

    def set(self, **options: Any) -> None:
        """New values of its options, as in ``set(lr=1e-4)``, for all parameters."""
        self._change("set", checked_options(options))

    def schedule(self, target: str, **kwargs: Any) -> None:
        """Have each step advance a schedule of the worker's framework, such as ``"torch.optim.lr_scheduler:StepLR"``.

        target: called with the kwargs, and in torch with the optimizer first; a function of the user's may combine
        several.
        """
        self._change("schedule", checked_target(target), checked_options(kwargs))

    def state_dict(self) -> Any:
        """Its moments, counts, options and schedules: a tree of tensors, copies, and scalars."""
        return self._change("optimizer_state")

    def load_state_dict(self, state: Any) -> None:
        """Go on from what `state_dict` gave, all or nothing. UsageError where it is of another optimizer or module."""
        self._change("load_optimizer_state", state)


def _clip_norm(norm: Any) -> float | None:
    if norm is None:
        return None
    try:
        if isinstance(norm, (bool, str)):
            raise ValueError
        if not float(norm) > 0:
            raise ValueError
        return float(norm)
    except (TypeError, ValueError):
        raise UsageError(f"clip_norm={norm!r:.80}: the norm must be a positive number") from None
