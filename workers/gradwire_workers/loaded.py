"""What a worker has loaded: programs by number, and by name those that it loaded at the start.

What a client has loaded is let go of when the client says so (it has no remote of it any more), or is gone. What is there by name stays.
"""

from __future__ import annotations

import itertools
from typing import Any, Iterable

from gradwire_wire.errors import ProtocolError, UnknownTargetError, UsageError
from gradwire_workers.permissions import Permissions
from gradwire_workers.program import Engine, Program
from gradwire_workers.targets import find_target, is_factory, with_colon

__all__ = ["Loaded"]


class Loaded:
    """``permissions``: what clients may name; None: anything. ``was_used``: whether anyone has asked for a target.

    Its import may have computed something already.
    """

    def __init__(self, worker: str, engine: Engine, permissions: Permissions | None) -> None:
        self._worker, self._engine, self._permissions = worker, engine, permissions
        self._programs: dict[int, Program] = {}
        self._numbers = itertools.count(1)  # none is given again
        self._owners: dict[int, bytes] = {}  # clients, by the numbers of what they have loaded
        self._named: dict[str, int] = {}
        self.was_used = False

    def __getitem__(self, number: int) -> Program:
        try:
            return self._programs[number]
        except KeyError:
            raise ProtocolError(
                f"worker {self._worker!r} has no remote {number}; was it restarted?"
            ) from None

    def register(self, program: Program) -> int:
        """The number that clients know it by."""
        number = next(self._numbers)
        self._programs[number] = program
        return number

    def give(self, number: int, client: bytes) -> None:
        """Note that it was made for that client, which may ask for it to be forgotten. What was loaded at the start belongs to none."""
        if number not in self._named.values():
            self._owners[number] = client

    def forget(self, numbers: Iterable[int], client: bytes) -> dict[int, Program]:
        """Let go of those that are the client's: nobody will name them. Returns them."""
        gone = {number for number in numbers if self._owners.get(number) == client}
        for number in gone:
            del self._owners[number]
        return {number: self._programs.pop(number) for number in gone}

    def end(self, client: bytes) -> dict[int, Program]:
        """The client is gone, and so is everything of its. Returns that."""
        return self.forget([number for number, owner in self._owners.items() if owner == client], client)

    def find(self, target: str) -> Any:
        """What a client's target names. Raises what the import raises, UnknownTargetError, or that it is not allowed."""
        return find_target(target, self._permissions)

    def load_named(self, name: str, kind: str, target: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        """At the start: load what the broker's file says, for clients to share under this name.

        Raises what the user's code raises. Whoever wrote the file is not restricted by what it allows to clients.
        """
        self.was_used = True
        self._named[name] = self.register(self._made(find_target(target), kind, target, args, kwargs))

    def load(self, kind: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> int:
        """Of a target, which is loaded now; or of a name, which was loaded at the start."""
        self.was_used = True
        if ":" in name:
            return self.register(self._made(self.find(name), kind, name, args, kwargs))
        if name not in self._named:
            there_are = ", ".join(sorted(self._named)) or "none"
            raise UnknownTargetError(
                f"a target is 'pkg.mod:attr' or 'path/file.py:attr', or the name of something that worker {self._worker!r} "
                f"loaded when it started; {name!r} is neither (names: {there_are}){with_colon(name)}"
            )
        if args or kwargs:
            raise UsageError(
                f"{name!r} was made when worker {self._worker!r} started: it takes no arguments here"
            )
        return self._named[name]

    def _made(self, found: Any, kind: str, target: str, args: list[Any], kwargs: dict[str, Any]) -> Program:
        """The program of what a target named; where that is a module's factory, it is called."""
        is_module = kind == "module"
        if is_module and is_factory(found):
            found = _made_by(found, target, args, kwargs)
        elif is_module and (args or kwargs):
            raise UsageError(f"{target} is an instance, not a factory: it takes no arguments here")
        if not is_module and not callable(found):  # what a module is, its framework's file knows
            raise UsageError(f"{target} is of type {type(found).__name__}, which cannot be called")
        program: Program = self._engine.program(found, is_module=is_module)
        program.name = target
        return program


def _made_by(factory: Any, target: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What a module's factory returns. TypeError with a hint where it cannot be called so."""
    try:
        return factory(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # from within the factory
        raise TypeError(
            f"{error}. worker.module() calls its target, a factory, with the arguments after it; to call a function "
            f"with tensors, load it by worker.function({target!r})"
        ) from None
