"""What a message to a worker asks for: its site, its operands' names, its seed. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from gradwire_wire import messages
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import checked_dtype
from gradwire_wire.errors import ProtocolError, UsageError
from gradwire_wire.messages import Call, Plan, Spec
from gradwire_wire.structures import MAX_CACHED, leaf_paths
from gradwire_wire.words import Word, without_operand
from gradwire_workers.program import Program, WorkerSite

__all__ = [
    "all_there",
    "aval_of",
    "check_mode",
    "is_seeded",
    "name_of_operand",
    "seed_place",
    "site_of",
    "take_seed",
]


def name_of_operand(call: Call | Spec | Plan, index: int) -> str:
    """For messages: what the caller wrote there, such as ``args[0]['x']``."""
    hidden = ["the anchor"] * bool(call.flags & messages.ANCHORED) + ["the seed"] * is_seeded(call)
    names = [*hidden, *leaf_paths(call.structure)]
    return names[index] if index < len(names) else f"(co)tangent {index - len(names)}"


def is_seeded(message: Call | Plan | Spec) -> bool:
    return bool(message.flags & messages.SEEDED)


def seed_place(message: Call | Plan | Spec, operands: int) -> int:
    place = 1 if message.flags & messages.ANCHORED else 0
    if place >= operands:
        raise ProtocolError("the seed is missing from the operands")
    return place


def take_seed(
    call: Call, word: Word, site: WorkerSite, carriers: list[Carrier | None]
) -> tuple[Word, WorkerSite]:
    """The call without the seed among its operands (which is taken out of them), but in its site."""
    place = seed_place(call, len(carriers))
    carrier = carriers.pop(place)
    if carrier is None:  # left out like every operand that a kept forward makes needless
        return without_operand(word, place), site
    if carrier.array.shape != () or carrier.array.dtype.kind not in "iu" or carrier.array < 0:
        raise UsageError(f"a seed must be a natural number, a scalar; this is {carrier.array!r:.80}")
    return without_operand(word, place), replace(site, seed=int(carrier.array))


def all_there(carriers: list[Carrier | None]) -> list[Carrier]:
    there = [c for c in carriers if c is not None]
    if len(there) != len(carriers):
        raise ProtocolError("only a call may leave tensors out")
    return there


def check_mode(message: Call | Spec | Plan, program: Program, token: Any) -> None:
    """A kept forward's mode was the one of its moment."""
    if message.training not in (None, program.training) and not token:
        raise UsageError(
            f"this call was made for training={message.training}, but the module is now in training={program.training}: "
            "a compiled program has the mode of its trace; trace it again after train() or eval()"
        )


def site_of(message: Call | Spec | Plan, program: Program, is_checked: bool = False) -> WorkerSite:
    if not is_checked:
        check_mode(message, program, getattr(message, "token", 0))
    make = _site if len(message.structure) <= MAX_CACHED else _site.__wrapped__
    return make(message.structure, message.training, message.flags, getattr(message, "seed", None))


@lru_cache(maxsize=4096)
def _site(structure: bytes, training: bool | None, flags: int, seed: int | None) -> WorkerSite:
    compile_ = False if flags & messages.EAGER else True if flags & messages.TRACED else None
    return WorkerSite(
        structure,
        training,
        bool(flags & messages.ACCUMULATE),
        bool(flags & messages.ANCHORED),
        seed,
        compile_,
        bool(flags & messages.ALONE),
    )


def aval_of(raw: Any) -> Aval:
    if (
        type(raw) is not list
        or len(raw) != 2
        or type(raw[0]) is not list
        or type(raw[1]) is not list
        or len(raw[1]) != 3
    ):
        raise ProtocolError(f"an abstract value must be [shape, [code, bits, lanes]], not {raw!r:.80}")
    if not all(type(n) is int and n >= 0 for n in raw[0]):
        raise ProtocolError(f"a shape must be natural numbers, not {raw[0]!r:.80}")
    return Aval(tuple(raw[0]), checked_dtype(*raw[1]))
