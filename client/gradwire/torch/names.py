"""Where a `Module` keeps the tensors of a remote: the remote's names as paths of plain modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch

from gradwire_wire.errors import UsageError

__all__ = ["Fixed", "Part", "Place", "placed"]


class Fixed(torch.nn.Module):
    """A module whose parts and parameters stay: what is put in their place, the worker would not know."""

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_replacement(self, name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        _refuse_replacement(self, name, module)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        _refuse_replacement(self, name, param)
        super().register_parameter(name, param)


class Part(Fixed):
    """Holds tensors, and parts; cannot be called. So hooks are refused, which would never be, and further parameters, which the worker would
    not know. (Pruning makes both.)

    own: the names of its parameters, once all of them are here.
    """

    own: frozenset[str] | None = None

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if self.own is not None and name not in self.own:
            raise UsageError(
                f"this part of a gradwire module has no parameter {name!r} in the worker, which would go on without it. Prune or "
                "extend the module in the factory that makes it in the worker (torch.nn.utils.parametrizations work here, too)"
            )
        super().register_parameter(name, param)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={tuple(x.shape)}" for name, x in self.named_parameters(recurse=False))

    def _never_called(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "this part of a gradwire module only holds parameters: its forward runs in the worker, and a hook here would never "
            "be called. Register it on the whole module, or in the factory that makes the module in the worker. (A tool that hooks every "
            "layer, to print a summary or to count operations, cannot look into it: show it the model in the worker)"
        )

    register_forward_pre_hook = _never_called
    register_forward_hook = _never_called
    register_full_backward_pre_hook = _never_called
    register_full_backward_hook = _never_called
    register_backward_hook = _never_called


def _refuse_replacement(parent: torch.nn.Module, name: str, value: Any) -> None:
    """UsageError for a module in the place of a part, or None in that of a parameter: the worker would go on without a word."""
    part = parent.__dict__.get("_modules", {}).get(name)
    if isinstance(part, Part) and value is not part:
        raise UsageError(
            f"{name!r} of a gradwire module only holds parameters: its forward runs in the worker, and what is put in its place "
            "would never be called. Replace the part in the factory that makes the module in the worker, or call the new one "
            "here, after this module"
        )
    if value is None and parent.__dict__.get("_parameters", {}).get(name) is not None:
        raise UsageError(
            f"{name!r} of a gradwire module cannot be None: the worker's module would still have it. Leave it out in the factory "
            "that makes that, or set it to zeros and do not train it"
        )


class Place(NamedTuple):
    """``getattr(part, key)`` is the tensor; ``path`` is its name in ``state_dict()`` and ``named_parameters()``."""

    part: torch.nn.Module
    key: str
    path: str


def placed(root: torch.nn.Module, names: Iterable[str]) -> dict[str, Place]:
    """A free place for each name, in their order; makes the parts. The path is the name itself where torch can have it.

    torch has no name that is empty or has an empty part ("a..b"), that is a module's as well ("a" beside "a.b"), or that
    of an attribute which every module has ("forward"): such ones get underscores.
    """
    parts = {"": (root, "")}
    names = list(names)
    for name in names:  # all modules first: a tensor must not take the name of one
        _part(parts, name.rpartition(".")[0])
    places: dict[str, Place] = {}
    taken: set[str] = set()
    for name in names:
        above, _, key = name.rpartition(".")
        part, path = parts[above]
        key = _free(part, key)
        while _joined(path, key) in taken:
            key += "_"
        taken.add(_joined(path, key))
        places[name] = Place(part, key, _joined(path, key))
    return places


def _part(parts: dict[str, tuple[torch.nn.Module, str]], name: str) -> tuple[torch.nn.Module, str]:
    """The module of this name, and its path; made if it is not there."""
    if name not in parts:
        above, _, word = name.rpartition(".")
        parent, path = _part(parts, above)
        word = _free(parent, word)
        made = Part()
        parent.add_module(word, made)
        parts[name] = made, _joined(path, word)
    return parts[name]


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _free(part: torch.nn.Module, key: str) -> str:
    while not key or hasattr(part, key):
        key += "_"
    return key
