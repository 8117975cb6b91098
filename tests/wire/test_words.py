"""Words: what is well formed, and the shapes of derived functions by the rules in words.py's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire_wire.carriers import Aval
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import ProtocolError
from gradwire_wire.words import (
    MAX_WORD,
    Word,
    checked_word,
    linear_count,
    pullback_op,
    pulled_results,
    result_avals,
)

F32, I64, C64 = BY_NAME["float32"], BY_NAME["int64"], BY_NAME["complex64"]


def as_received(x: Any) -> Any:
    return [as_received(v) for v in x] if isinstance(x, tuple) else x


GOOD: list[tuple[Word, int]] = [
    ((), 0),
    ((), 3),
    ((("J", (0, 1)),), 4),
    ((("T", (0,), 2),), 4),
    ((("T", (), 1),), 1),
    ((("T", (0,), 2, (0, 3)),), 4),
    ((("T", (0,), 0, ()),), 1),
    ((("V", (True, False)),), 2),
    ((("T", (0,), 1), ("J", (1,))), 3),
    ((("P", (0,)), ("P", (0, 1)), ("T", (1,), 1)), 3),
    ((("T", (0,), 1), ("T", (0, 1), 1), ("V", (True, False, True))), 3),
    ((("J", (0,)), ("V", (True, True)), ("T", (1,), 1)), 3),
    ((("M", 2**48, None),), 0),
    ((("M", 0, 0.5),), 2),
]


@pytest.mark.parametrize(("word", "operands"), GOOD)
def test_well_formed_words_pass(word: Word, operands: int) -> None:
    assert checked_word(as_received(word), operands) == word


BAD: list[tuple[Any, int]] = [
    (None, 1),
    ("J", 1),
    (7, 1),
    ([None], 1),
    ([[]], 1),
    ([["X", [0]]], 2),
    ([["J"]], 1),
    ([["J", [0], 1]], 2),
    ([["J", 0]], 2),
    ([["P"]], 1),
    ([["P", [1]]], 1),
    ([["J", [0]]], 0),  # more tangents than operands
    ([["J", [1]]], 2),  # of an operand that is a tangent itself
    ([["J", [-1]]], 2),
    ([["J", [True]]], 2),
    ([["J", [0.0]]], 2),
    ([["T", [0]]], 2),
    ([["T", [0], -1]], 2),
    ([["T", [0], True]], 2),
    ([["T", [0], 2**63]], 2),
    ([["T", [1], 1]], 2),
    ([["T", [0], 1, None]], 2),
    ([["T", [0], 1, [0], 0]], 2),
    ([["T", [0], 1, [-1]]], 2),
    ([["T", [0], 2, [0]]], 3),
    ([["T", [0], 2, [0, 0]]], 3),
    ([["T", [0], 2, [1, 0]]], 3),
    ([["V", [True]]], 2),
    ([["V", [1, 0]]], 2),
    ([["V", None]], 2),
    ([["T", [0], 1], ["T", [2], 1]], 3),
    ([["V", [True]]] * (MAX_WORD + 1), 1),
    ([[["J"], [0]]], 2),
    ([["M", 1]], 1),
    ([["M", -1, None]], 1),
    ([["M", True, None]], 1),
    ([["M", [1], None]], 1),
    ([["M", 1, 0.0]], 1),
    ([["M", 1, float("nan")]], 1),
    ([["M", 1, 1]], 1),
    ([["M", 1, None], ["T", [0], 1]], 2),
    ([["V", [True]], ["M", 1, None]], 1),
]


def test_a_pullback_of_some_results_names_them() -> None:
    assert pullback_op([1], [True, True]) == ("T", (1,), 2)
    some = pullback_op([1], [False, True, True])
    assert some == ("T", (1,), 2, (1, 2))
    assert pulled_results(some, "abc") == ["b", "c"] and pulled_results(("T", (1,), 2), "ab") == ["a", "b"]
    for wrong in "ab", "a", "":
        with pytest.raises(ProtocolError):
            pulled_results(some, wrong)
    with pytest.raises(ProtocolError):
        pulled_results(("T", (1,), 2), "abc")


@pytest.mark.parametrize(("raw", "operands"), BAD)
def test_malformed_words_are_refused(raw: Any, operands: int) -> None:
    with pytest.raises(ProtocolError):
        checked_word(raw, operands)


def nested(levels: int) -> Any:
    x: Any = 0
    for _ in range(levels):
        x = [x]
    return x


@pytest.mark.parametrize("levels", [1, 4, 900, 5000])
def test_a_word_nested_without_end_is_refused(levels: int) -> None:
    for raw in ([nested(levels)], [["J", nested(levels + 1)]], [[nested(levels), [0]]]):
        with pytest.raises(ProtocolError):
            checked_word(raw, 3)


SCRAPS = st.recursive(
    st.one_of(st.sampled_from(["J", "T", "V"]), st.integers(-2, 4), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(SCRAPS, st.integers(0, 5))
def test_scraps_give_a_word_or_a_protocol_error(raw: Any, operands: int) -> None:
    try:
        word = checked_word(raw, operands)
    except ProtocolError:
        return
    assert word == () or as_received(word) == raw


def base(avals: Sequence[Aval]) -> list[Aval]:
    """F(x, y) -> (x * 2, index, x + y as complex)."""
    x, _ = avals
    return [x, Aval((), I64), Aval(x.shape, C64)]


X, Y = Aval((3,), F32), Aval((3,), C64)


@pytest.mark.parametrize(
    ("word", "avals", "expected"),
    [
        ((), [X, Y], [X, Aval((), I64), Aval((3,), C64)]),
        ((("J", (0,)),), [X, Y, X], [X, Aval((3,), C64)]),  # the exact result has no tangent
        ((("T", (1, 0), 2),), [X, Y, X, Y], [Y, X]),
        ((("T", (0,), 2), ("J", (0, 2))), [X, Y, X, Y, X, X], [X]),
        (
            (("V", (True, False)),),
            [Aval((5, 3), F32), Y],
            [Aval((5, 3), F32), Aval((5,), I64), Aval((5, 3), C64)],
        ),
        (
            (("T", (1,), 2), ("V", (False, True, True, False))),
            [X, Aval((0, 3), C64), Aval((0, 3), F32), Y],
            [Aval((0, 3), C64)],
        ),
    ],
)
def test_shapes_of_derived_functions(word: Word, avals: list[Aval], expected: list[Aval]) -> None:
    assert result_avals(word, avals, base) == expected


@pytest.mark.parametrize("avals", [[Aval((5, 3), F32), Aval((4, 3), C64)], [Aval((), F32), Aval((), C64)]])
def test_batches_that_disagree_are_refused(avals: list[Aval]) -> None:
    with pytest.raises(ProtocolError, match="batch size"):
        result_avals((("V", (True, True)),), avals, base)


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ((), 0),
        ((("V", (True,)),), 0),
        ((("J", (0, 2)),), 2),
        ((("T", (0,), 3),), 3),
        ((("T", (0,), 3), ("V", (True,) * 4)), 3),
        ((("T", (0,), 3), ("J", (1,))), 1),
    ],
)
def test_linear_operands_come_last(word: Word, count: int) -> None:
    assert linear_count(word) == count
