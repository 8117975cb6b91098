"""Which parameters a name, the beginning of one or a pattern means."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.selection import checked_groups, checked_options
from gradwire_wire.errors import UsageError
from gradwire_workers.selection import selected

NAMES = ["encoder.0.weight", "encoder.0.bias", "encoder2.weight", "dense/kernel", "blocks[0]"]


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (None, NAMES),
        ([], []),
        ("encoder", NAMES[:2]),
        (["encoder.0.bias", "encoder.0.weight"], NAMES[:2]),
        (["*.weight"], ["encoder.0.weight", "encoder2.weight"]),
        (["dense"], ["dense/kernel"]),
        (["blocks[0]"], ["blocks[0]"]),
        (["encoder", "*"], NAMES),
    ],
)
def test_what_is_meant_in_the_order_of_the_names(patterns: Any, wanted: list[str]) -> None:
    assert selected(patterns, NAMES) == wanted


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["encoder", "encodr.0.bias"],
            r"'encodr.0.bias' names no parameter .* did you mean 'encoder.0.bias'",
        ),
        (["zzz"], r"'zzz' names no parameter of this module; there are 'encoder.0.weight'"),
        ([3], "named by a string, not by 3"),
        (["enc"], "names no parameter"),
    ],
)
def test_what_means_nothing_is_an_error(patterns: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        selected(patterns, NAMES)


def test_a_module_without_parameters() -> None:
    assert selected(None, []) == []
    with pytest.raises(UsageError, match="it has none"):
        selected("a", [])


@pytest.mark.parametrize("parameters", [{"0.weight": 1.0}, {"names": ["0"]}, "0.weight", 0.1])
def test_an_optimizer_that_is_given_parameters_as_in_one_process_is_told_that_it_has_them(
    parameters: Any,
) -> None:
    with pytest.raises(UsageError, match=r"module's parameters already: give it none.*keywords, lr=1e-3"):
        checked_groups(parameters)


def test_groups_are_checked_one_by_one() -> None:
    assert checked_groups(None) is None
    assert checked_groups([{"names": "encoder", "lr": 1}]) == [{"names": ["encoder"], "lr": 1}]
    with pytest.raises(UsageError, match="a group of parameters is a dict"):
        checked_groups(["encoder"])  # type: ignore[list-item]


@pytest.mark.parametrize("option", [lambda epoch: 0.9, (len, len), dict])
def test_a_function_among_an_optimizers_options_is_refused_with_what_to_do(option: Any) -> None:
    with pytest.raises(UsageError, match=r"mask=.* functions stay in their process.*'models:make_optimizer'"):
        checked_options({"lr": 0.1, "mask": option})
    with pytest.raises(UsageError, match="functions stay in their process"):
        checked_groups([{"names": "encoder", "mask": option}])
    assert checked_options({"betas": (0.9, 0.99), "lr": 1, "mask": {"a": True}})["betas"] == (0.9, 0.99)
