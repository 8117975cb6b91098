"""Verbs about a module's state, by name: what `Remote.parameters()`, `.train()`, `.optimizer()` ask for."""

from __future__ import annotations

import itertools
import os
from typing import Any, Callable, Collection, Iterable, NamedTuple

import numpy as np

from gradwire_wire.carriers import Carrier
from gradwire_wire.errors import UsageError
from gradwire_wire.structures import fill, flatten
from gradwire_wire.tensors import numpy as numpy_family
from gradwire_workers import checkpoints
from gradwire_workers.program import Engine, Optimizer, Program
from gradwire_workers.selection import selected
from gradwire_workers.targets import find_target

__all__ = ["State"]


class _Made(NamedTuple):
    """An optimizer and whose it is."""

    program: Program
    optimizer: Optimizer


class State:
    """Keeps the optimizers, and does what it is told to a program.

    register: takes a program under management and returns its number. find: what an optimizer's target names.
    """

    def __init__(
        self, engine: Engine, register: Callable[[Program], int], find: Callable[[str], Any] = find_target
    ) -> None:
        self._engine, self._register, self._find = engine, register, find
        self._optimizers: dict[int, _Made] = {}
        self._owners: dict[int, bytes] = {}  # clients, by the numbers of the optimizers that they have made
        # an optimizer of the worker's former life must not be taken for one of this
        self._numbers = itertools.count(int.from_bytes(os.urandom(6), "little"))
        self._verbs: dict[str, Callable[..., Any]] = {
            "train": lambda program, mode: program.train(mode),
            "training": lambda program: program.training,
            "generation": lambda program: program.generation,
            "parameters": lambda program: program.parameters(),
            "frozen": lambda program: list(program.frozen()),
            "aliases": lambda program: dict(program.aliases()),
            "requires_grad": self._requires_grad,
            "buffers": lambda program: program.buffers(),
            "state_dict": lambda program: program.state_dict(),
            "load_state_dict": self._load_state_dict,
            "save": self._save,
            "load": self._load,
            "grads": lambda program: program.grads(),
            "functional": lambda program, buffers, *mode: self._register(
                program.functional(bool(buffers), *mode)
            ),
            "regularizers": lambda program: list(program.regularizers()),
            "optimizer": self._make_optimizer,
            "step": self._step,
            "zero_grad": lambda program, number: self.optimizer(program, number).zero_grad(),
            "set": lambda program, number, options: self.optimizer(program, number).set(
                self._adopted(options)
            ),
            "schedule": self._schedule,
            "optimizer_state": lambda program, number: self.optimizer(program, number).state_dict(),
            "load_optimizer_state": self._load_optimizer_state,
        }

    def act(self, program: Program, verb: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Do ``verb``; UsageError for one that is unknown or asks a function for what only modules have."""
        if verb not in self._verbs:
            raise UsageError(f"unknown verb {verb!r}")
        if not program.is_module:
            raise UsageError(
                f"{verb}() needs a module: load it with worker.module(...), not worker.function(...)"
            )
        return self._verbs[verb](program, *args, **kwargs)

    def give(self, number: int, client: bytes) -> None:
        """Note that this optimizer was made for that client, which may ask for it to be forgotten."""
        self._owners[number] = client

    def forget(self, numbers: Iterable[int], client: bytes) -> bool:
        """Let go of those of these optimizers that are the client's: nobody will name them. Whether there were any."""
        return self._drop([number for number in numbers if self._owners.get(number) == client])

    def end(self, client: bytes) -> bool:
        """The client is gone, and so are its optimizers, also those of modules that stay. Whether there were any."""
        return self._drop([number for number, owner in self._owners.items() if owner == client])

    def forget_of(self, programs: Collection[Program]) -> bool:
        """Let go of all optimizers of these programs. Whether there were any."""
        return self._drop([n for n, made in self._optimizers.items() if made.program in programs])

    def _drop(self, numbers: Iterable[int]) -> bool:
        dropped = [self._optimizers.pop(number, None) for number in {*numbers}]
        self._owners = {n: owner for n, owner in self._owners.items() if n in self._optimizers}
        return any(made is not None for made in dropped)

    def _load_state_dict(self, program: Program, state: dict[str, Any], strict: bool = True) -> None:
        new = {name: self._as_in_state(program, name, x) for name, x in state.items()}
        program.load_state_dict(new, strict)

    def _as_in_state(self, program: Program, name: str, x: Any) -> Any:
        """A value of a state: a tensor, also from a numpy scalar; or whatever the module has there that is no tensor."""
        if type(x) is Carrier:
            return self._engine.adopt(x)
        if isinstance(x, np.generic):
            return self._engine.adopt(numpy_family.export(np.asarray(x)))
        there = program.state_dict()
        if name not in there or self._engine.is_tensor(there[name]):
            raise UsageError(
                f"nothing was loaded. {name} is given as a {type(x).__name__}, not as a tensor. Give an array of the dtype that "
                "the module has"
            )
        structure, carriers = flatten(x, lambda y: type(y) is Carrier)
        return fill(structure, [self._engine.adopt(c) for c in carriers])

    def _save(self, program: Program, path: str) -> None:
        state = program.state_dict()
        odd = [name for name, x in state.items() if not self._engine.is_tensor(x)]
        if odd:
            raise UsageError(
                f"nothing was written: {', '.join(odd[:5])} in the module's state is no tensor, and a checkpoint has only "
                "tensors"
            )
        carriers = {name: self._engine.export(x) for name, x in state.items()}
        checkpoints.write(path, carriers, self._engine.NAME)

    def _load(self, program: Program, path: str, strict: bool = True) -> None:
        new = checkpoints.read(path)
        self._load_state_dict(program, {**_left_out(new, program), **new}, strict)

    def _requires_grad(self, program: Program, flag: bool, names: list[str] | None = None) -> None:
        program.requires_grad(bool(flag), _meant(names, program))

    # -- optimizers ------------------------------------------------------------------------------

    def _make_optimizer(
        self, program: Program, target: str, kwargs: dict[str, Any], groups: list[Any] | None = None
    ) -> int:
        kwargs = self._adopted(kwargs)
        if groups is None:
            optimizer = program.optimizer(self._find(target), kwargs)
        else:
            optimizer = program.optimizer(
                self._find(target), kwargs, _resolved(self._adopted(groups), program)
            )
        number = next(self._numbers)
        self._optimizers[number] = _Made(program, optimizer)
        return number

    def optimizer(self, program: Program, number: int) -> Optimizer:
        """Which that number means. UsageError where it is none of this program's."""
        made = self._optimizers.get(number)
        if made is None or made.program is not program:
            raise UsageError(
                "this optimizer belongs to a former life of the worker. Make a new one with remote.optimizer(...), its schedule too, and "
                "give it what you saved of the old one's state_dict(), or it begins anew: load_state_dict()"
            )
        return made.optimizer

    def _step(
        self, program: Program, number: int, clip_norm: float | None = None, zero_grad: bool = False
    ) -> float | None:
        optimizer, norm = self.optimizer(program, number), None
        if clip_norm is None:
            optimizer.step()
        elif isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)) or not clip_norm > 0:
            raise UsageError(f"step(clip_norm={clip_norm!r}): the norm must be a positive number")
        else:
            norm = optimizer.step(float(clip_norm))
        if zero_grad:
            optimizer.zero_grad()
        return norm

    def _schedule(self, program: Program, number: int, target: str, kwargs: dict[str, Any]) -> None:
        self.optimizer(program, number).schedule(self._find(target), self._adopted(kwargs))

    def _adopted(self, options: Any) -> Any:
        """Options of an optimizer: tensors as this framework's, and those of one number (a rate that was computed) as it."""
        structure, leaves = flatten(options, lambda x: type(x) is Carrier or isinstance(x, np.generic))
        return fill(structure, [self._option(x) for x in leaves])

    def _option(self, x: Any) -> Any:
        if isinstance(x, np.generic):
            return x.item()
        return x.array.item() if _is_number(x) else self._copied(x)

    def _copied(self, carrier: Carrier) -> Any:
        """A tensor of its own: optimizers keep what they are given."""
        return self._engine.adopt(Carrier(carrier.array.copy(order="K"), carrier.dtype))

    def _load_optimizer_state(self, program: Program, number: int, state: Any) -> None:
        structure, carriers = flatten(state, lambda x: type(x) is Carrier)
        state = fill(structure, list(map(self._copied, carriers)))
        self.optimizer(program, number).load_state_dict(state)


def _left_out(new: dict[str, Carrier], program: Program) -> dict[str, Carrier]:
    """The names of tensors that a file has under another of their names alone, as safetensors' `save_model` and transformers write it."""
    ties: dict[str, list[str]] = {}
    for alias, name in program.aliases().items():
        ties.setdefault(name, [name]).append(alias)
    there = program.state_dict() if ties else {}
    found: dict[str, Carrier] = {}
    for names in ties.values():
        given = [name for name in names if name in new]
        if given:
            found.update((name, new[given[0]]) for name in names if name in there and name not in new)
    return found


def _meant(names: Any, program: Program) -> list[str]:
    """The parameters that these names mean, also by a further name of one that is tied: freezing a part freezes what it shares."""
    own = program.parameters()
    aliases = {alias: name for alias, name in program.aliases().items() if name in own}
    meant = {aliases.get(name, name) for name in selected(names, [*own, *aliases])}
    return [name for name in own if name in meant]


def _is_number(carrier: Carrier) -> bool:
    """Of one of numpy's own types: memory of others stands for something else."""
    return carrier.array.ndim == 0 and carrier.array.dtype.name == carrier.dtype.name


def _resolved(groups: list[Any], program: Program) -> list[dict[str, Any]]:
    """The groups with every parameter by its own name, each in at most one of them."""
    found: list[dict[str, Any]] = []
    taken: dict[str, int] = {}
    for i, group in enumerate(groups):
        if not isinstance(group, dict) or "names" not in group:
            raise UsageError(
                f"parameters[{i}] must be a dict with the names of its parameters and their options, such as "
                f'{{"names": ["encoder"], "lr": 1e-4}}, not {group!r:.80}'
            )
        members = _meant(group["names"], program)
        twice = [name for name in members if name in taken]
        if twice:
            raise UsageError(
                f"{', '.join(twice[:5])} is in parameters[{taken[twice[0]]}] and in parameters[{i}]; "
                "a parameter belongs to one group"
            )
        taken.update(dict.fromkeys(members, i))
        found.append({**group, "names": members})
    if not taken:
        raise UsageError("parameters=[...] has no parameter in it; leave it out for all of them")
    return found
