"""What a worker's answer says beside its tensors, checked before anything is taken out of it. Pure.

`messages.unpack` has seen to the types of an answer's fields, and `structures.fill` to the tree's form and its number of
leaves. What remains is what the tree holds: here, and nowhere else. Whatever is not as docs/protocol.md has it is a
ProtocolError, and nothing of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradwire.site import SpecResult
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import DType, checked_dtype
from gradwire_wire.errors import ProtocolError, shown
from gradwire_wire.headers import MAX_NBYTES, MAX_NDIM
from gradwire_wire.recordings import COLUMNS
from gradwire_wire.structures import fill, leaf_count
from gradwire_wire.words import Word

__all__ = [
    "Loaded",
    "Times",
    "check_count",
    "check_like",
    "check_results",
    "checked_state",
    "loaded",
    "number",
    "spec_result",
    "times",
]


class Loaded(NamedTuple):
    """Of a Load: the target's number; whether it is a module, and the mode of that, if it has one.

    moves_in_evaluation: whether it moves state in evaluation mode too. may_have_parameters: whether gradients can accumulate in it, if it is
    a module. may_have_rules: whether a Spec can tell of derivative rules of its own.
    """

    remote: int
    is_module: bool
    training: bool | None
    moves_in_evaluation: bool
    may_have_parameters: bool
    may_have_rules: bool


class Times(NamedTuple):
    """Of a Trace: (n, columns) numbers, the columns' names, and how many earlier rows are missing."""

    rows: np.ndarray
    columns: list[str]
    dropped: int


def _wrong(what: str, came: Any) -> ProtocolError:
    return ProtocolError(f"the worker's answer is not as the protocol has it: {what}, not {shown(came)}")


def _is_natural(x: Any) -> bool:
    return type(x) is int and x >= 0


def _is_mode(x: Any) -> bool:
    return x is None or type(x) is bool


def loaded(structure: bytes) -> Loaded:
    """Of the answer to a Load."""
    facts = fill(structure, [])
    if type(facts) is dict and facts.keys() == set(Loaded._fields):
        found = Loaded(**facts)
        _, is_module, training, *may = found
        are_flags = all(type(x) is bool for x in (is_module, *may))
        if _is_natural(found.remote) and are_flags and _is_mode(training):
            return found
    raise _wrong(f"a Load is answered with {', '.join(Loaded._fields)}", facts)


def number(structure: bytes) -> int:
    """Of an answer that is one: what was made is called by it."""
    found: int = fill(structure, [])
    if not _is_natural(found):
        raise _wrong("the number of what was made is a natural one", found)
    return found


def spec_result(structure: bytes) -> SpecResult:
    """Of the answer to a Spec: ``[[[shape, dtype], ...], structure, has rules]``."""
    facts = fill(structure, [])
    if (
        type(facts) is not list
        or len(facts) != 3
        or type(facts[0]) is not list
        or type(facts[1]) is not bytes
        or type(facts[2]) is not bool
    ):
        raise _wrong(
            "a Spec is answered with shapes and dtypes, a structure, and whether there are rules", facts
        )
    avals, tree, has_rules = tuple(map(_aval, facts[0])), facts[1], facts[2]
    if leaf_count(tree) != len(avals):
        raise _wrong(
            f"a Spec's structure has as many holes as there are results, {len(avals)}", leaf_count(tree)
        )
    return SpecResult(avals, tree, has_rules)


def _aval(raw: Any) -> Aval:
    if type(raw) is list and len(raw) == 2 and all(type(part) is list for part in raw) and len(raw[1]) == 3:
        shape, dtype = raw
        if len(shape) <= MAX_NDIM and all(_is_natural(n) and n <= MAX_NBYTES for n in shape):
            return Aval(tuple(shape), checked_dtype(*dtype))
    raise _wrong("a result of a Spec is [shape, dtype]", raw)


def times(structure: bytes, carriers: Sequence[Carrier | None]) -> Times:
    """Of the answer to a Trace that ends a recording."""
    facts = fill(structure, [])
    if type(facts) is not dict or facts.keys() != {"columns", "dropped"} or not _is_natural(facts["dropped"]):
        raise _wrong("a Trace is answered with columns and dropped", facts)
    columns = facts["columns"]
    if not _names(columns) or not set(COLUMNS) <= set(columns):
        raise _wrong(f"the columns of a Trace are {', '.join(COLUMNS)}", columns)
    rows = carriers[0] if len(carriers) == 1 else None
    if rows is None or rows.dtype.name != "int64" or rows.array.shape[1:] != (len(columns),):
        raise _wrong(f"a Trace comes with one table of {len(columns)} columns of int64", len(carriers))
    return Times(rows.array, columns, facts["dropped"])


def check_results(word: Word, headers: Sequence[Any]) -> None:
    """Whether so many tensors can be what that function gives. (A structure's leaves are counted by whoever fills it.)"""
    if not word:
        if None in headers:
            raise _wrong("a result is a tensor", None)
        return
    derivatives = [op for op in word if op[0] in "JT"]
    if not derivatives:
        return check_results((), headers)
    kind, wrt = derivatives[-1][:2]
    if kind == "T":
        check_count(len(headers), len(wrt), "cotangents")


def check_count(came: int, asked: int, what: str) -> None:
    """Whether so many came."""
    if came != asked:
        raise _wrong(f"{asked} {what} were asked for", came)


def check_like(carrier: Carrier | None, shape: Sequence[int], dtype: DType, what: str) -> None:
    """Whether a derivative is of the shape and dtype of what it belongs to; None stands for zeros."""
    if carrier is not None and (carrier.array.shape != tuple(shape) or carrier.dtype != dtype):
        came = f"{carrier.dtype.name}{list(carrier.array.shape)}"
        raise _wrong(f"{what} is {dtype.name}{list(shape)} as that is", came)


# ---- What a verb about a module's state gives ----------------------------------------------------------------------


def _by_name(x: Any) -> bool:
    return type(x) is dict and all(type(name) is str for name in x)


def _names(x: Any) -> bool:
    return type(x) is list and all(type(name) is str for name in x)


_STATES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("parameters", "buffers", "state_dict", "grads"), ("a state is by name", _by_name)),
    **dict.fromkeys(("frozen", "regularizers"), ("these are names", _names)),
    "aliases": (
        "aliases are names by name",
        lambda x: _by_name(x) and all(type(name) is str for name in x.values()),
    ),
    "training": ("a mode is true, false or None", _is_mode),
    "optimizer": ("the number of what was made is a natural one", _is_natural),
    "step": ("the norm of a step is a number or None", lambda x: x is None or type(x) in (int, float)),
}


def checked_state(verb: str, tree: Any) -> Any:
    """The tree that a verb gave, if it is one that this verb gives."""
    what, is_right = _STATES.get(verb, ("", None))
    if is_right is not None and not is_right(tree):
        raise _wrong(f"{verb}: {what}", tree)
    return tree
