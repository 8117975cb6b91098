"""Which framework a tensor is of, without importing any that the program has not imported itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np

from gradwire.loading import complete, is_loading, needed
from gradwire.site import Site
from gradwire_wire import structures
from gradwire_wire.carriers import Carrier
from gradwire_wire.errors import DtypeError, UnsupportedTensorError, UsageError
from gradwire_wire.structures import leaf_paths

__all__ = [
    "FAMILIES",
    "Face",
    "barrier",
    "compiling_face",
    "exported",
    "face_named",
    "family_of",
    "family_of_call",
    "in_callers_modes",
    "is_leaf",
    "is_tracing",
    "naming",
    "tensors_named",
    "untraced",
    "watching_face",
]

P = ParamSpec("P")
R = TypeVar("R")
FAMILIES = ("torch", "jax", "tensorflow")
"""Besides numpy. A family has the name of its framework's top-level module."""

_known: dict[type, str] = {np.ndarray: "numpy"}
_ONLY_NUMPY = frozenset(_known)


class Face(Protocol):
    """What each caller framework's file has: ``gradwire.numpy``, ``.torch``, ``.jax``, ``.tensorflow``.

    Besides what is here a face may have, and is asked for only if it has::

        is_plain(site, operands) -> bool     whether `call` would record nothing, here and now       numpy, torch
        in_callers_modes(act)                see the function of that name                           torch
        traced, undisturbed                  for a compiler that follows this program's Python       torch
        barrier()                            see the function of that name                           jax
        is_tracing() -> bool                 whether what happens now is done once, at a trace       jax
        seed(x)                              a seed of this framework, as `Options` has it           jax
    """

    NAME: str
    ACCUMULATES: bool
    """Whether a plain call of a module adds to the module's own gradients when it is pulled back."""

    def call(self, handle: Any, site: Site, operands: list[Any]) -> Any:
        """Make the call a node of the framework's autodiff; returns the result tree in its tensors."""


def family_of(x: Any) -> str:
    """The family of a tensor; "" for what is none."""
    kind = type(x)
    family = _known.get(kind)
    if family is None:
        family = _look_up(x)
        if family or not any(map(is_loading, FAMILIES)):
            _known[kind] = family
    return family


def _look_up(x: Any) -> str:
    for name in FAMILIES:
        # (None: a program says so that a framework is not to be imported, though it is installed)
        if complete(name) is not None and tensors_named(name).is_tensor(x):
            return name
    return "numpy" if isinstance(x, np.ndarray) else ""


def is_leaf(x: Any) -> bool:
    """Whether a value in an argument tree is a tensor."""
    return family_of(x) != ""


@lru_cache
def tensors_named(family: str) -> Any:
    """The family's `gradwire_wire.tensors.TensorFamily`; imports the framework, which its tensors' owner has."""
    return needed(f"gradwire_wire.tensors.{family}")


@lru_cache
def face_named(family: str) -> Face:
    """The family's caller face."""
    try:
        face: Face = needed(f"gradwire.{family}")
        return face
    except ModuleNotFoundError as error:
        if error.name == family:
            raise UsageError(
                f"family {family!r} was asked for, but {family} is not installed here"
            ) from error
        raise


def family_of_call(leaves: Sequence[Any], structure: bytes, chosen: str | None) -> str:
    """The one family of a call: numpy arrays mix with any, two others in one call are a UsageError."""
    family, place = "numpy", -1
    if set(map(type, leaves)) <= _ONLY_NUMPY:
        return chosen or family
    for i, leaf in enumerate(leaves):
        other = family_of(leaf)
        if other != "numpy" and other != family:
            if family != "numpy":
                paths = leaf_paths(structure)
                raise UsageError(
                    f"{paths[place]} is of {family} and {paths[i]} of {other}: one call takes tensors of one framework "
                    f"(and numpy). Convert one of them, for instance with numpy"
                )
            family, place = other, i
    if chosen is not None and family not in ("numpy", chosen):
        raise UsageError(
            f"{leaf_paths(structure)[place]} is of {family}, but options(family={chosen!r}) was given"
        )
    return chosen or family


def exported(leaves: Sequence[Any], structure: bytes) -> list[Carrier]:
    """The tensors of a tree as carriers. UnsupportedTensorError names the argument that cannot be sent."""
    try:
        return [tensors_named(family_of(x)).export(x) for x in leaves]
    except (UnsupportedTensorError, DtypeError) as error:
        refused = naming(error, leaves, structure)
    raise refused


def naming(error: UsageError, leaves: Sequence[Any], structure: bytes) -> UsageError:
    """The error with the argument's name in front; see `gradwire_wire.structures.naming`."""
    return structures.naming(error, leaves, structure, lambda x: tensors_named(family_of(x)).export(x))


def compiling_face() -> Any:
    """The face whose compiler traces this program's Python right now (torch.compile), or None."""
    torch = sys.modules.get("torch")
    asked = getattr(getattr(torch, "compiler", None), "is_dynamo_compiling", None)
    if asked is None or not asked():
        return None
    import gradwire.torch  # a statement: it is what the compiler can follow

    return gradwire.torch


def watching_face() -> Any:
    """The face whose compiler would trace what is called from here, though not this: behind a graph break, say. Or None."""
    frames = sys.modules.get("torch._C._dynamo.eval_frame")
    watched = getattr(frames, "get_eval_frame_callback", None)
    return face_named("torch") if watched is not None and watched() else None


def untraced(method: Callable[P, R]) -> Callable[P, R]:
    """A method that torch.compile does not look into: its graph ends there, and another begins behind it."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        face = compiling_face() or watching_face()
        if face is None:
            return method(*args, **kwargs)
        result: R = face.undisturbed(method, args, kwargs)
        return result

    return call


def in_callers_modes(act: Callable[..., Any]) -> Callable[..., Any]:
    """``act`` for another thread, in the modes of this one that decide what a call records (torch's grad mode)."""
    if complete("torch") is None:
        return act
    found: Callable[..., Any] = face_named("torch").in_callers_modes(act)  # type: ignore[attr-defined]
    return found


def barrier() -> None:
    """Wait until what compiled programs have dispatched has reached its worker, in every family in use."""
    for wait in _in_loaded_faces("barrier"):
        wait()


def is_tracing() -> bool:
    """Whether a program is being traced here, in any family in use: what is done now is not done when it runs."""
    return any(asked() for asked in _in_loaded_faces("is_tracing")) or _is_in_function()


def _is_in_function() -> bool:
    """TensorFlow's answer, whose face may not be in use yet: a step that is traced often begins with ``zero_grad()``."""
    asked = getattr(complete("tensorflow"), "inside_function", None)
    return asked is not None and bool(asked())


def _in_loaded_faces(name: str) -> list[Any]:
    """What has this name in the faces that were loaded: only through these has the program made calls."""
    faces = [sys.modules.get(f"gradwire.{family}") for family in FAMILIES]
    # (asked for as an attribute, it would be looked for everywhere)
    return [vars(face)[name] for face in faces if face is not None and name in vars(face)]
