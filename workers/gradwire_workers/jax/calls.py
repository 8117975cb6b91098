"""A call of a model, and where in it the module's own parameters go: its mode, a random key, its state. Found by signature."""

from __future__ import annotations

import inspect
from typing import Any, Callable, NamedTuple, Sequence, Union

from gradwire_wire.errors import UsageError

__all__ = ["Arguments", "Call", "CallSignature"]

# keywords that tell a module its mode, and what they are in training
MODES = {
    "train": True,
    "training": True,
    "is_training": True,
    "is_train": True,
    "deterministic": False,
    "use_running_average": False,
    "inference": False,
}


class Arguments(NamedTuple):
    args: Sequence[Any]
    kwargs: dict[str, Any]


class Call(NamedTuple):
    """Everything that a model's result depends on, so that it is a pure function of this.

    training: the mode; None where the module has none. arrays: parameters and buffers by name.
    key: a typed PRNG key, from which all randomness of the call comes. arguments: the caller's own.
    """

    training: Union[bool, None]
    arrays: dict[str, Any]
    key: Any
    arguments: Arguments


class CallSignature:
    """How a function is called; ``skip``: its first parameters, which are filled already. A function that hides its
    signature takes nothing but the caller's arguments."""

    def __init__(self, function: Callable[..., Any], skip: int = 0) -> None:
        try:
            found = list(inspect.signature(function).parameters.values())[skip:]
        except (TypeError, ValueError):
            found = []
        self._signature = inspect.Signature(found)
        self._parameters = self._signature.parameters
        self.modes = [name for name in MODES if name in self._parameters]

    def first_of(self, names: Sequence[str]) -> Union[str, None]:
        return next((name for name in names if name in self._parameters), None)

    def with_mode(self, arguments: Arguments, training: bool | None) -> Arguments:
        """UsageError where the call says another mode than the module is in."""
        for name in self.modes if training is not None else ():
            value = training if MODES[name] else not training
            given = self._given(arguments)
            if not isinstance(given.get(name), bool):
                arguments = self.having(arguments, name, value)
            elif given[name] != value:
                raise UsageError(
                    f"{name}={given[name]} in the call, and the module is in {'training' if training else 'evaluation'} mode: "
                    "use remote.train() and remote.eval()"
                )
        return arguments

    def having(self, arguments: Arguments, name: str, value: Any) -> Arguments:
        """The arguments and this one, unless the caller gave it (which can be told where it has a default)."""
        args, kwargs = arguments
        parameter = self._parameters[name]
        has_default = parameter.default is not parameter.empty
        if kwargs.get(name) is not None or (has_default and name in self._given(arguments)):
            return arguments
        at = list(self._parameters).index(name)
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in self._parameters.values())
        is_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if not is_keyword and at <= len(args) and (takes_any or at < len(args)):
            return Arguments([*args[:at], value, *args[at:]], kwargs)
        return Arguments(args, {**kwargs, name: value})

    def _given(self, arguments: Arguments) -> dict[str, Any]:
        """What the caller gave, by name."""
        try:
            return dict(self._signature.bind_partial(*arguments.args, **arguments.kwargs).arguments)
        except TypeError:  # the call itself will say what is wrong
            return dict(arguments.kwargs)
