"""What a module's programs share: its arrays, mode, gradients and generation. Arrays are values: a change replaces them."""

from __future__ import annotations

import weakref
from typing import Any, Iterable, NamedTuple, Sequence, Union

import jax
import jax.numpy as jnp
import numpy as np

from gradwire_wire.errors import DtypeError, UsageError
from gradwire_workers.jax.models import Model
from gradwire_workers.jax.trees import copied, is_trainable

__all__ = ["Moment", "Store"]

FORMER = 256 << 20
"""Bytes that parameters of former generations may take, which kept forwards hold."""


class Moment(NamedTuple):
    """What one forward saw: pulling it back later, or evaluating it again, sees the same."""

    parameters: dict[str, Any]
    buffers: dict[str, Any]
    seed: Union[int, None]
    key: np.ndarray


class Store:
    """The state of one module.

    generation: counts steps and loads. kinds: counts changes of dtypes. parameters and buffers are replaced as whole dicts, so a `Moment` stays true.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.parameters, self.buffers = dict(model.parameters), dict(model.buffers)
        self.training = model.training
        self.generation = self.kinds = 0
        self.has_moved = False
        self.frozen: set[str] = set()
        self.gradients: dict[str, Any] = {}
        self._entropy = np.random.default_rng()
        self._add = jax.jit(_sums)
        self._kept: dict[int, tuple[int, weakref.WeakSet[Any]]] = {}

    def moment(self, seed: int | None) -> Moment:
        """As it is now. Random numbers of a call come from ``jax.random.key(seed)``, from a new key without a seed."""
        if seed is None:
            key = self._entropy.integers(0, 1 << 32, 2, np.uint32)
        else:
            key = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
        return Moment(self.parameters, self.buffers, seed, key)

    def trainable(self) -> list[str]:
        return [name for name in self.parameters if name not in self.frozen]

    def freeze(self, names: Iterable[str]) -> None:
        self.frozen |= set(names)
        self.gradients = {n: g for n, g in self.gradients.items() if n not in self.frozen}

    # -- gradients -------------------------------------------------------------------------------

    def accumulate(self, names: Sequence[str], bars: Sequence[Any]) -> None:
        """Add cotangents of parameters to their gradients; None adds nothing."""
        new = {name: bar for name, bar in zip(names, bars) if bar is not None and name not in self.frozen}
        old = {name: self.gradients[name] for name in new if name in self.gradients}
        if old:
            new.update(self._add(old, {name: new[name] for name in old}))
        self.gradients = {**self.gradients, **new}

    def forget_gradients(self, names: Iterable[str]) -> None:
        forgotten = set(names)
        self.gradients = {n: g for n, g in self.gradients.items() if n not in forgotten}

    # -- changes ---------------------------------------------------------------------------------

    def move_buffers(self, names: Sequence[str], values: Sequence[Any]) -> None:
        self.has_moved = self.has_moved or bool(names)
        self._put_buffers(dict(zip(names, values)))

    def _put_buffers(self, new: dict[str, Any]) -> None:
        if any(self.buffers[n].dtype != x.dtype for n, x in new.items()):
            self.kinds += 1
        self.buffers = {**self.buffers, **new}

    def step(self, parameters: dict[str, Any]) -> None:
        """New values of some parameters: a new generation."""
        self._retire()
        self.parameters = {**self.parameters, **parameters}
        self.generation += 1

    def load(self, state: dict[str, Any], strict: bool) -> None:
        """All or nothing. UsageError with torch's list of what does not fit, DtypeError where values would be narrowed."""
        there = {**self.parameters, **self.buffers}
        self._check(state, there, strict)
        widening = () if self.model.keeps_dtypes else self.buffers
        new = {n: _like(x, there[n], n, n in widening) for n, x in state.items() if n in there}
        self.step({n: x for n, x in new.items() if n in self.parameters})
        self._put_buffers({n: x for n, x in new.items() if n in self.buffers})

    def _check(self, state: dict[str, Any], there: dict[str, Any], strict: bool) -> None:
        missing = [n for n in there if n not in state] if strict else []
        unexpected = [n for n in state if n not in there] if strict else []
        wrong = [f"Missing key(s) in state_dict: {_quoted(missing)}."] if missing else []
        wrong += [f"Unexpected key(s) in state_dict: {_quoted(unexpected)}."] if unexpected else []
        wrong += [
            f"size mismatch for {n}: copying a parameter with shape {tuple(np.shape(x))} from the state given, the shape in "
            f"the module is {tuple(there[n].shape)}."
            for n, x in state.items()
            if n in there and np.shape(x) != there[n].shape
        ]
        if wrong:
            reasons = "\n\t".join(wrong)
            raise UsageError(
                f"nothing was loaded. Error(s) in loading state_dict for {self.model.name}:\n\t{reasons}"
            )

    # -- kept forwards ---------------------------------------------------------------------------

    def note(self, residual: Any) -> None:
        """A forward of this generation is kept, and with it the parameters of now."""
        if self.generation not in self._kept:
            nbytes = sum(x.nbytes for x in self.parameters.values())
            self._kept[self.generation] = (nbytes, weakref.WeakSet())
        self._kept[self.generation][1].add(residual)

    def _retire(self) -> None:
        """Forwards kept under former parameters may stay while those take `FORMER` bytes, the latest in any case."""
        self._kept = {number: entry for number, entry in self._kept.items() if entry[1]}
        room = FORMER
        for place, number in enumerate(sorted(self._kept, reverse=True)):
            nbytes, residuals = self._kept[number]
            room -= nbytes
            if place and room < 0:
                for residual in list(residuals):
                    residual.lose()
                del self._kept[number]


def _sums(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {name: old[name] + new[name] for name in old}


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _like(x: Any, there: Any, name: str, may_widen: bool) -> Any:
    """A copy of x (which may lie in memory of somebody else) of the dtype that is there, widened but never narrowed.

    may_widen: whether it keeps its dtype where that is the wider one of two inexact ones: see `Model`.
    """
    given = getattr(x, "dtype", None)
    if given is None:
        x, given = np.asarray(x, there.dtype), there.dtype
    same_kind = is_trainable(x) == is_trainable(there)
    wider = jnp.promote_types(given, there.dtype)
    if given != there.dtype and not (same_kind and wider == there.dtype):
        if may_widen and same_kind and is_trainable(x) and wider == given:
            kept = copied(x)
            if kept.dtype == given:  # without 64 bits JAX narrows it
                return kept
        raise DtypeError(
            f"nothing was loaded. {name} is {there.dtype} in the module and {given} in the state given. "
            f"Convert it first: x.astype({str(there.dtype)!r})"
        )
    if getattr(there, "weak_type", False) and there.shape == ():
        return jnp.asarray(np.asarray(x).item())
    return copied(x, there.dtype)
