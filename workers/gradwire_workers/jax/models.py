"""What a module of JAX is: arrays by name, and a pure function of them.

Each library's modules are taken apart in a file named after it, and recognised by their class: no library is
imported for that, since the user's code has done so already.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, Collection, Union

from gradwire_wire.errors import UsageError
from gradwire_workers.jax.calls import Arguments, Call
from gradwire_workers.keras_layers import MASKS, is_keras_layer

__all__ = ["RETURN", "Model", "is_of", "model_of"]

RETURN = (
    "return one of: a Keras layer; a Flax nnx module; a Flax linen module with its variables, (module, module.init(key, example)) or "
    "module.bind(variables); an Equinox module, or (module, state); (apply, params) or (apply, params, state) with any "
    "pytrees, for calls apply(params, *args) or apply(params, state, *args) -> (result, state)"
)


class Model(ABC):
    """A module taken apart.

    parameters: trainable inexact arrays by name.
    buffers: all its other arrays, except the state of random streams.
    moving_in_evaluation: the buffers that a call moves in evaluation mode too. In training mode, and where there are no modes, any may move.
    training: the mode it was made in; None if it has no modes.
    is_pure: whether its Python keeps nothing of a call.
    keeps_dtypes: whether buffers stay in the dtypes that they begin with. Otherwise a call may leave wider ones, such as statistics
    that begin in float32 and go on in the float64 of the inputs.
    """

    name: str
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    training: Union[bool, None]
    is_pure: bool
    moving_in_evaluation: frozenset[str] = frozenset()
    keeps_dtypes = False

    @abstractmethod
    def apply(self, call: Call) -> tuple[Any, dict[str, Any]]:
        """The call's result, and the buffers as it leaves them: those that move in this mode count."""

    def tree_of(self, parameters: dict[str, Any]) -> Any:
        """These parameters as the library has them, which optimizers are given: their labels and masks go by its paths.

        None, which is no leaf, stands in the place of everything else.
        """
        return parameters

    def apply_in_layer(self, call: Call, trainable: bool) -> tuple[Any, dict[str, Any]]:
        """`apply` with ``(result, losses, masks)`` as the result: see `gradwire_workers.program.Program.functional`."""
        args, kwargs = call.arguments
        own = {name: x for name, x in kwargs.items() if name != MASKS}
        result, moved = self.apply(call._replace(arguments=Arguments(args, own)))
        return (result, [], None), moved

    def variables(self, names: Collection[str]) -> dict[str, Any]:
        """Keras's own of the parameters of these names; nothing where the library has no such."""
        return {}

    def regularizers(self) -> list[str]:
        """See `gradwire_workers.program.Program.regularizers`."""
        return []


def model_of(obj: Any) -> Model | None:
    """What a factory returned, taken apart; None for a plain callable, which has no state. UsageError says what to return."""
    if is_keras_layer(obj):
        from gradwire_workers.jax.keras import KerasModel

        return KerasModel(obj)
    if is_of(obj, "flax.nnx", "Module"):
        from gradwire_workers.jax.nnx import NnxModel

        return NnxModel(obj)
    if is_of(obj, "equinox", "Module"):
        return _equinox(obj, None)
    if is_of(obj, "flax.linen", "Module"):
        return _bound(obj)
    if isinstance(obj, tuple):
        return _of_tuple(obj)
    if not callable(obj):
        raise UsageError(f"a {type(obj).__qualname__} cannot be called; the factory must {RETURN}")
    return None


def is_of(x: Any, package: str, name: str) -> bool:
    """Whether x is an instance of the package's class of that name, if anybody has imported it."""
    return package in sys.modules and any(
        c.__name__ == name and (c.__module__ + ".").startswith(package + ".") for c in type(x).__mro__
    )


def _of_tuple(obj: tuple[Any, ...]) -> Model:
    from gradwire_workers.jax.pairs import Applied

    if len(obj) == 2 and is_of(obj[0], "flax.linen", "Module"):
        return _linen(*obj)
    if len(obj) == 2 and is_of(obj[0], "equinox", "Module") and is_of(obj[1], "equinox", "State"):
        return _equinox(*obj)
    if len(obj) not in (2, 3) or not callable(obj[0]):
        kinds = ", ".join(type(x).__qualname__ for x in obj)
        raise UsageError(f"({kinds}) is no module; the factory must {RETURN}")
    owner = getattr(obj[0], "__self__", None)
    if len(obj) == 2 and is_of(owner, "flax.linen", "Module") and obj[0].__name__ == "apply":
        return _linen(owner, obj[1])
    return Applied(*obj)


def _equinox(module: Any, state: Any) -> Model:
    from gradwire_workers.jax.equinox import EquinoxModel

    return EquinoxModel(module, state)


def _bound(module: Any) -> Model:
    if module.scope is None:
        raise UsageError(
            f"{type(module).__qualname__} is a Flax linen module without variables, and how it is called first is not known "
            "here; return (module, module.init(key, example)) or module.bind(variables)"
        )
    return _linen(*module.unbind())


def _linen(module: Any, variables: Any) -> Model:
    from gradwire_workers.jax.linen import LinenModel

    return LinenModel(module, variables)
