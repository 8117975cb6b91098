"""Which parameters a name, the beginning of one or a pattern means."""

from __future__ import annotations

from typing import Any

import pytest

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
