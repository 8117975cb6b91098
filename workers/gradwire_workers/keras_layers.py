"""Keras layers, of any Keras, none of which is imported for this: which objects are, what their variables are called,
and what Keras does for a layer beside calling it.
"""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np

from gradwire_wire.errors import UsageError
from gradwire_wire.structures import flatten

__all__ = [
    "MASKS",
    "awaits_weights",
    "called_in_layer",
    "carries_state",
    "check_unconstrained",
    "derived_anew",
    "frozen",
    "is_keras_layer",
    "keras_path",
    "listed",
    "regularized",
    "rnn_states",
    "stable_paths",
    "weights_of",
]

_KERAS = ("keras.", "tf_keras.", "tensorflow.python.keras.")
MASKS = "_keras_masks"
"""The keyword by which a layer of the caller's sends along the masks that Keras has attached to its inputs."""
_GENERIC = {"Functional": ("functional", "model"), "Variable": ("variable",)}


def is_keras_layer(target: Any) -> bool:
    return any(c.__name__ == "Layer" and c.__module__.startswith(_KERAS) for c in type(target).__mro__)


# ---- Variables -------------------------------------------------------------------------------------------------------


def weights_of(layer: Any) -> list[Any]:
    """Keras's list, and the states that stateful RNNs carry from call to call, which Keras has in none."""
    return [*listed(layer, "weights"), *rnn_states(layer)]


def listed(layer: Any, attribute: str) -> list[Any]:
    """One of Keras's lists of variables; empty where there are none yet."""
    try:
        return list(getattr(layer, attribute, ()))
    except ValueError:  # Keras 2, about a model that has not been called yet
        return []


def awaits_weights(layer: Any) -> bool:
    """Whether it was never called, and some part of it makes its weights then."""
    return not getattr(layer, "built", True) and any(
        not part.built and _makes_weights(part) for part in layer._flatten_layers()
    )


def _makes_weights(part: Any) -> bool:
    """By a ``build`` of its own. (Keras's models only build what they have inside.)"""
    build = type(part).build
    only_builds_parts = build.__module__.startswith(_KERAS) and build.__qualname__ in _BUILD_PARTS
    return not (getattr(build, "_is_default", False) or only_builds_parts)


_BUILD_PARTS = ("Sequential.build", "Model.build")


def rnn_states(layer: Any) -> list[Any]:
    """Variables that move at each call, in evaluation mode as well."""
    known = {id(v) for v in listed(layer, "weights")}
    found: dict[int, Any] = {}
    for part in layer._flatten_layers():
        if _is_stateful_rnn(part):
            states = flatten(_plain_lists(part.states), lambda v: hasattr(v, "assign"), "the states")[1]
            found.update((id(v), v) for v in states if id(v) not in known)
    return list(found.values())


def carries_state(layer: Any) -> bool:
    """Whether it has `rnn_states`, or will have them once it is built."""
    return any(map(_is_stateful_rnn, layer._flatten_layers()))


def _is_stateful_rnn(layer: Any) -> bool:
    return getattr(layer, "stateful", False) is True and getattr(layer, "cell", None) is not None


def _plain_lists(tree: Any) -> Any:
    return list(map(_plain_lists, tree)) if isinstance(tree, (list, tuple)) else tree


# ---- Names -----------------------------------------------------------------------------------------------------------


def stable_paths(layer: Any, variables: Sequence[Any]) -> list[str]:
    """A path for each of the layer's variables that is the same for every layer of this architecture.

    Keras numbers what has no name of its own by process: ``sequential_1/dense_2/kernel`` of the second model. Here the
    root's name is left out, and what Keras has numbered is numbered anew within its parent, by first appearance:
    ``dense/kernel``, ``dense_1/kernel``. Not unique where two layers share a name.
    """
    counted = _counted_names(layer)
    stable: dict[tuple[str, ...], str] = {(): "", (layer.name,): ""}
    taken: set[str] = set()
    found = []
    for variable in variables:
        parts = tuple(keras_path(variable).split("/"))
        for depth in range(1, len(parts)):
            if parts[:depth] not in stable:
                name = _free(stable[parts[: depth - 1]], _plain(parts[depth - 1], counted), taken)
                stable[parts[:depth]] = name
                taken.add(name)
        leaf = re.sub(r"^variable_\d+$", "variable", parts[-1])
        found.append(stable[parts[:-1]] + leaf)
    return found


def keras_path(variable: Any) -> str:
    """Keras 3's path, or Keras 2's name."""
    return str(getattr(variable, "path", None) or variable.name.partition(":")[0])


def _counted_names(layer: Any) -> dict[str, str]:
    """Names that Keras has given by class and number, as far as they are recognised by it: without the number."""
    found = {}
    for part in layer._flatten_layers():
        name = str(part.name)
        for base in _GENERIC.get(type(part).__name__, (_snake_case(type(part).__name__),)):
            match = re.fullmatch(rf"((?:forward_|backward_)?{base})(?:_\d+)?", name)
            if match:
                found[name] = match.group(1)
    return found


def _snake_case(name: str) -> str:
    """As Keras makes names of classes."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _plain(name: str, counted: dict[str, str]) -> str:
    return counted.get(name, name)


def _free(parent: str, name: str, taken: set[str]) -> str:
    number, free = 1, f"{parent}{name}/"
    while free in taken:
        free, number = f"{parent}{name}_{number}/", number + 1
    return free


# ---- What Keras does for a layer beside calling it -------------------------------------------------------------------


@contextmanager
def frozen(layers: Sequence[Any]) -> Iterator[None]:
    """As with ``trainable = False``: a BatchNorm in them is in inference mode then, and nothing is regularised.

    The flag of the layers alone is set: the setter would reach for the variables as well.
    """
    every = {id(part): part for layer in layers for part in layer._flatten_layers()}
    flags = [part.__dict__ for part in every.values() if part.__dict__.get("_trainable")]
    try:
        for flag in flags:
            flag["_trainable"] = False
        yield
    finally:
        for flag in flags:
            flag["_trainable"] = True


@contextmanager
def derived_anew(layers: Sequence[Any]) -> Iterator[None]:
    """What a Normalization computes with comes from the variables as they are now, or stand for now.

    It keeps tensors that were made of its variables when it was adapted, or loaded by Keras itself: in a trace they are constants, which
    neither a state that is loaded nor buffers of the caller's would reach.
    """
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for part in {id(part): part for layer in layers for part in _normalizations(layer)}.values():
            own, before = part.__dict__, dict(part.__dict__)
            part.finalize_state()
            kept.append((own, {name: x for name, x in before.items() if own.get(name) is not x}))
        yield
    finally:
        for own, derived in kept:
            own.update(derived)


def _normalizations(layer: Any) -> list[Any]:
    return [part for part in layer._flatten_layers() if part.built and _is_normalization(part)]


def _is_normalization(part: Any) -> bool:
    if not hasattr(part, "finalize_state"):
        return False
    return any(c.__name__ == "Normalization" and c.__module__.startswith(_KERAS) for c in type(part).__mro__)


def called_in_layer(
    layers: Sequence[Any],
    trainable: bool,
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[Any, list[Any], list[Any] | None]:
    """The result of a call, the losses that these layers, which it calls, have collected in it, and its masks.

    For a layer of the caller's, which is trainable or frozen, adds these losses to its own, and is followed by layers
    that look for masks. Of masks there is one, or None, for each tensor of the result; none at all where each were None; and
    None where there are no layers of Keras's. Those of the arguments come under the keyword `MASKS`, in the same way.
    """
    kwargs = dict(kwargs)
    masks = kwargs.pop(MASKS, ())
    if not layers:
        return call(*args, **kwargs), [], None
    with frozen(() if trainable else layers):
        for x, mask in zip(_tensors([list(args), kwargs]), masks):
            _set_mask(x, mask)
        result = call(*args, **kwargs)
        found = [_mask_of(y) for y in _tensors(result)]
        losses = [loss for layer in layers for loss in layer.losses]
        return result, losses, found if any(mask is not None for mask in found) else []


def _tensors(tree: Any) -> list[Any]:
    return flatten(tree, _is_tensor, "the result")[1]


def _is_tensor(x: Any) -> bool:
    return hasattr(type(x), "dtype") and hasattr(type(x), "shape") and not isinstance(x, np.generic)


def _mask_of(x: Any) -> Any:
    get = getattr(sys.modules.get("keras.src.backend"), "get_keras_mask", None)
    return getattr(x, "_keras_mask", None) if get is None else get(x)


def _set_mask(x: Any, mask: Any) -> None:
    """As Keras does it: JAX's arrays take no attributes, and there it keeps a table."""
    set_mask = getattr(sys.modules.get("keras.src.backend"), "set_keras_mask", None)
    if mask is not None and set_mask is not None:
        set_mask(x, mask)
    elif mask is not None:
        x._keras_mask = mask


def check_unconstrained(variables: Mapping[str, Any]) -> None:
    """UsageError for one that is constrained, where the caller owns them."""
    for name, variable in variables.items():
        constraint = getattr(variable, "constraint", None)
        if constraint is not None and variable.trainable:
            raise UsageError(
                f"{name} has a constraint ({type(constraint).__name__}), which a Keras optimizer applies after each step, and the "
                "caller's would not. Make the layer without it, or let a TensorFlow worker own the parameters (Remote.optimizer)"
            )


def regularized(layer: Any) -> list[str]:
    """Names of the parts whose regularizers or ``add_loss`` Keras would add to the loss of a model that has this layer.

    What a part adds is known after a call, and before it by what its class's code names.
    """
    return [str(part.name) for part in layer._flatten_layers() if _is_regularized(part)]


def _is_regularized(part: Any) -> bool:
    own = [*getattr(part, "_trainable_variables", ()), *getattr(part, "_trainable_weights", ())]
    kind: Any = type(part)
    return bool(
        getattr(part, "activity_regularizer", None) is not None
        or getattr(part, "_callable_losses", None)  # Keras 2
        or getattr(part, "_losses", None)
        or _adds_losses(kind)
        or any(getattr(v, "regularizer", None) is not None for v in own)
    )


@lru_cache(maxsize=None)
def _adds_losses(kind: Any) -> bool:
    own = [c for c in kind.__mro__ if not c.__module__.startswith(_KERAS)]
    return any(
        _names_add_loss(f.__code__) for c in own for f in vars(c).values() if isinstance(f, FunctionType)
    )


def _names_add_loss(code: CodeType) -> bool:
    return "add_loss" in code.co_names or any(
        _names_add_loss(inner) for inner in code.co_consts if isinstance(inner, CodeType)
    )
