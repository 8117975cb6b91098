"""What a worker says beside its tensors is checked before anything is taken out of it (R57)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradwire import answers
from gradwire.broker_news import BrokerNews
from gradwire.worker_records import facts_of
from gradwire_wire import control
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import ProtocolError
from gradwire_wire.recordings import COLUMNS
from gradwire_wire.structures import LONE_LEAF, flatten

FLOAT32, INT64 = [2, 32, 1], BY_NAME["int64"]
RIGHT_LOAD = {
    "remote": 1,
    "is_module": True,
    "training": None,
    "moves_in_evaluation": False,
    "may_have_parameters": True,
    "may_have_rules": False,
}


def told(tree: Any) -> bytes:
    return flatten(tree, callable)[0]


def test_right_answers() -> None:
    assert answers.loaded(told(RIGHT_LOAD)) == (1, True, None, False, True, False)
    assert answers.number(told(7)) == 7
    assert answers.spec_result(told([[[[2, 0], FLOAT32]], LONE_LEAF, True])) == (
        (Aval((2, 0), BY_NAME["float32"]),),
        LONE_LEAF,
        True,
    )
    rows = np.zeros((0, len(COLUMNS)), np.int64)
    found = answers.times(told({"columns": list(COLUMNS), "dropped": 3}), [Carrier(rows, INT64)])
    assert (found.rows is rows, found.columns, found.dropped) == (True, list(COLUMNS), 3)


@pytest.mark.parametrize(
    "facts",
    [
        None,
        [],
        {},
        {"a": 1},
        {**RIGHT_LOAD, "more": 1},
        *({**RIGHT_LOAD, "remote": wrong} for wrong in (-1, True, "1", None, 1.0)),
        *({**RIGHT_LOAD, "is_module": wrong} for wrong in (None, 1)),
        {**RIGHT_LOAD, "may_have_parameters": None},
        {**RIGHT_LOAD, "may_have_rules": 1},
        {**RIGHT_LOAD, "moves_in_evaluation": None},
        *({**RIGHT_LOAD, "training": wrong} for wrong in (0, "x", [])),
    ],
)
def test_r57_facts_of_a_load(facts: Any) -> None:
    with pytest.raises(ProtocolError, match="a Load is answered with"):
        answers.loaded(told(facts))


@pytest.mark.parametrize(
    "facts",
    [
        None,
        [[]],
        [[[[2], FLOAT32]], LONE_LEAF],
        [[[[2], FLOAT32]], LONE_LEAF, 0],
        [{}, LONE_LEAF, False],
        [[], "text", False],
        [[], LONE_LEAF, False],
        [[[[2], FLOAT32]], b"\xc1", False],
        *(
            [[wrong], LONE_LEAF, False]
            for wrong in (None, [], [[2]], [[2], None], [[2], [2, 32]], ["2", FLOAT32])
        ),
        *([[[wrong, FLOAT32]], LONE_LEAF, False] for wrong in ([-1], [True], ["2"], [2**60], [1] * 65)),
        [[[[2], [99, 1, 1]]], LONE_LEAF, False],
    ],
)
def test_r57_facts_of_a_spec(facts: Any) -> None:
    with pytest.raises(ProtocolError):
        answers.spec_result(told(facts))


def table(dtype: str = "int64", shape: tuple[int, ...] = (2, len(COLUMNS))) -> list[Carrier | None]:
    return [Carrier(np.zeros(shape, dtype), BY_NAME[dtype])]


@pytest.mark.parametrize(
    ("facts", "carriers"),
    [
        (None, table()),
        ({"columns": list(COLUMNS), "dropped": -1}, table()),
        ({"columns": ["sent"], "dropped": 0}, table(shape=(2, 1))),
        ({"columns": [1, *COLUMNS[1:]], "dropped": 0}, table()),
        *(
            ({"columns": list(COLUMNS), "dropped": 0}, wrong)
            for wrong in ([], [None], table("float64"), table(shape=(2, 3)), table(shape=()), table() * 2)
        ),
    ],
)
def test_r57_facts_of_a_trace(facts: Any, carriers: list[Carrier | None]) -> None:
    with pytest.raises(ProtocolError):
        answers.times(told(facts), carriers)


@pytest.mark.parametrize(
    ("verb", "tree"),
    [
        *(
            (verb, wrong)
            for verb in ("parameters", "buffers", "state_dict", "grads")
            for wrong in (3, [], {1: 2})
        ),
        *((verb, wrong) for verb in ("frozen", "regularizers") for wrong in (3, "abc", [1], {"a": "b"})),
        *(("aliases", wrong) for wrong in (None, {"a": 1}, [["a", "b"]])),
        *(("training", wrong) for wrong in (1, "x")),
        *(("optimizer", wrong) for wrong in (-1, None, "x", True)),
        *(("step", wrong) for wrong in ("x", True, [1.0])),
    ],
)
def test_r57_what_a_verb_gives(verb: str, tree: Any) -> None:
    with pytest.raises(ProtocolError, match=verb):
        answers.checked_state(verb, tree)


@pytest.mark.parametrize(
    "check",
    [
        lambda: answers.number(told(True)),
        lambda: answers.check_results((), [[1], None]),
        lambda: answers.check_results((("V", (True,)),), [None]),
        lambda: answers.check_results((("T", (0, 2), 1),), [None]),
        lambda: answers.check_results((("T", (0, 2), 1), ("V", (True,))), [None] * 3),
        lambda: answers.check_count(1, 2, "tangents"),
        lambda: answers.check_like(table()[0], (2, len(COLUMNS) + 1), INT64, "a tangent"),
        lambda: answers.check_like(table()[0], (2, len(COLUMNS)), BY_NAME["int32"], "a tangent"),
    ],
)
def test_r57_results_that_nobody_asked_for(check: Callable[[], Any]) -> None:
    with pytest.raises(ProtocolError):
        check()


def test_results_that_may_be_missing() -> None:
    answers.check_results((("T", (0, 2), 1),), [None, None])
    answers.check_like(None, (2,), INT64, "a tangent")
    assert answers.checked_state("step", 0.5) == 0.5 and answers.checked_state("set", "x") == "x"


# ---- Of a broker ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [control.Log(1, "x"), control.Looked(1), control.Cancel(1)])
def test_r57_what_is_no_answer_to_a_start(message: Any) -> None:
    with pytest.raises(ProtocolError, match=f"the start of a worker with {type(message).__name__}"):
        facts_of(message)


@pytest.mark.parametrize("kind", control.KINDS.values())
def test_r57_news_of_every_kind_end_nothing(kind: Any) -> None:
    """Also what only a program says to a broker; and what nobody has asked for."""
    news = BrokerNews("the broker ended", "connect anew")
    with news.request() as request:
        for number in (request.number, request.number + 1):
            news.learn(kind(*[number] * len(kind._fields)))
        assert news.broker_alive
