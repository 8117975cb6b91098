"""Element types: DLPack's codes, their names and carriers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire_wire.dtypes import BOOL, BY_NAME, DType, checked_dtype, dtype_named
from gradwire_wire.errors import ProtocolError


@pytest.mark.parametrize("name", BY_NAME)
def test_name_size_and_carrier_agree(name: str) -> None:
    dtype = BY_NAME[name]
    carrier = np.dtype(dtype.carrier)
    assert dtype.name == name and dtype_named(name) is dtype
    assert dtype.itemsize == carrier.itemsize and dtype.itemsize * 8 == dtype.bits and dtype.lanes == 1
    assert (carrier.name == name) == (not name.startswith(("bfloat", "float8")))
    assert checked_dtype(*dtype) == dtype


def test_no_two_names_for_one_type() -> None:
    assert len(set(BY_NAME.values())) == len(BY_NAME)


def test_what_can_carry_a_derivative() -> None:
    exact = {name for name, dtype in BY_NAME.items() if not dtype.is_inexact}
    assert exact == {"bool", *(f"{u}int{b}" for u in ("", "u") for b in (8, 16, 32, 64))}


def test_codes_are_those_of_dlpack() -> None:
    assert BOOL == (6, 8, 1)
    known = {"int64": (0, 64, 1), "uint8": (1, 8, 1), "float32": (2, 32, 1), "bfloat16": (4, 16, 1)}
    known |= {"complex64": (5, 64, 1), "float8_e4m3fn": (10, 8, 1), "float8_e5m2": (12, 8, 1)}
    assert {name: tuple(BY_NAME[name]) for name in known} == known


@pytest.mark.parametrize(
    "name", ["object", "str", "int4", "float128", "complex256", "datetime64", "", "Bool"]
)
def test_the_wire_has_no_such_type(name: str) -> None:
    assert dtype_named(name) is None


NUMBERS = st.one_of(st.integers(-3, 130), st.sampled_from([8, 16, 32, 64]))
ANYTHING = st.one_of(NUMBERS, st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.lists(NUMBERS))


@given(ANYTHING, ANYTHING, ANYTHING)
def test_anything_else_is_refused(code: object, bits: object, lanes: object) -> None:
    fine = all(type(x) is int for x in (code, bits, lanes)) and (code, bits, lanes) in BY_NAME.values()
    if fine:
        assert checked_dtype(code, bits, lanes) == (code, bits, lanes)
    else:
        with pytest.raises(ProtocolError):
            checked_dtype(code, bits, lanes)


def test_true_is_not_one() -> None:
    with pytest.raises(ProtocolError):
        checked_dtype(0, 8, True)
    assert DType(0, 8, True) == DType(0, 8, 1)
