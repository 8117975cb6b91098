"""Verbs about a module's state, by name: what `Remote.parameters()`, `.train()`, `.optimizer()` ask for."""

from __future__ import annotations

from typing import Any, Callable

from gradwire_wire.errors import UsageError
from gradwire_workers.program import Optimizer, Program
from gradwire_workers.targets import find_target

__all__ = ["State"]


class State:
    """Keeps the optimizers, and does what it is told to a program.

    register: takes a program under management and returns its number.
    """

    def __init__(self, engine: Any, register: Callable[[Program], int]) -> None:
        self._engine, self._register = engine, register
        self._optimizers: dict[int, Optimizer] = {}
        self._verbs: dict[str, Callable[..., Any]] = {
            "train": lambda program, mode: program.train(mode),
            "training": lambda program: program.training,
            "generation": lambda program: program.generation,
            "parameters": lambda program: program.parameters(),
            "buffers": lambda program: program.buffers(),
            "state_dict": lambda program: program.state_dict(),
            "load_state_dict": self._load_state_dict,
            "grads": lambda program: program.grads(),
            "functional": lambda program, buffers: self._register(program.functional(bool(buffers))),
            "optimizer": self._make_optimizer,
            "step": lambda program, number: self._optimizer(number).step(),
            "zero_grad": lambda program, number: self._optimizer(number).zero_grad(),
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

    def _load_state_dict(self, program: Program, state: dict[str, Any], strict: bool = True) -> None:
        program.load_state_dict({name: self._engine.adopt(c) for name, c in state.items()}, strict)

    def _make_optimizer(self, program: Program, target: str, kwargs: dict[str, Any]) -> int:
        number = len(self._optimizers) + 1
        self._optimizers[number] = program.optimizer(find_target(target), kwargs)
        return number

    def _optimizer(self, number: int) -> Optimizer:
        try:
            return self._optimizers[number]
        except KeyError:
            raise UsageError(
                "this optimizer belongs to a former life of the worker; make a new one"
            ) from None
