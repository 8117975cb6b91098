"""Element types by DLPack's codes, and the numpy dtype that carries each one's bits.

A *carrier* dtype is a numpy dtype of the same size that every numpy has: bfloat16 travels as
uint16, the float8 kinds as uint8. Nothing is ever converted by value here.
"""

from __future__ import annotations

from typing import NamedTuple

from gradwire_wire.errors import ProtocolError, shown

__all__ = ["BOOL", "BY_NAME", "DType", "checked_dtype", "dtype_named"]

INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOLEAN = 0, 1, 2, 4, 5, 6


class DType(NamedTuple):
    """DLPack's ``DLDataType``: type code, bits of one lane, lanes (always 1 here)."""

    code: int
    bits: int
    lanes: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.bits // 8

    @property
    def name(self) -> str:
        """The usual name, such as ``"bfloat16"``."""
        return _NAMES[self]

    @property
    def is_inexact(self) -> bool:
        """Whether values of this type can carry a derivative (real or complex floating point)."""
        return self.code not in (INT, UINT, BOOLEAN)

    @property
    def is_real(self) -> bool:
        """Whether values are real floating-point numbers, of no fewer bits than arithmetic is done in."""
        return self.code in (FLOAT, BFLOAT)

    @property
    def carrier(self) -> str:
        """Name of the numpy dtype that carries the bits; differs from `name` where numpy lacks it."""
        return _CARRIERS.get(self, _NAMES[self])


BOOL = DType(BOOLEAN, 8)

BY_NAME: dict[str, DType] = {
    "bool": BOOL,
    **{f"int{b}": DType(INT, b) for b in (8, 16, 32, 64)},
    **{f"uint{b}": DType(UINT, b) for b in (8, 16, 32, 64)},
    **{f"float{b}": DType(FLOAT, b) for b in (16, 32, 64)},
    "bfloat16": DType(BFLOAT, 16),
    "complex64": DType(COMPLEX, 64),
    "complex128": DType(COMPLEX, 128),
    # DLPack 1.1's float8 codes, under ml_dtypes' names
    "float8_e3m4": DType(7, 8),
    "float8_e4m3": DType(8, 8),
    "float8_e4m3b11fnuz": DType(9, 8),
    "float8_e4m3fn": DType(10, 8),
    "float8_e4m3fnuz": DType(11, 8),
    "float8_e5m2": DType(12, 8),
    "float8_e5m2fnuz": DType(13, 8),
    "float8_e8m0fnu": DType(14, 8),
}
_NAMES = {dtype: name for name, dtype in BY_NAME.items()}
_BY_CODES = {tuple(dtype): dtype for dtype in BY_NAME.values()}
_CARRIERS = {
    d: "uint16" if d.bits == 16 else "uint8"
    for d in BY_NAME.values()
    if d.code == BFLOAT or 7 <= d.code <= 14
}


def dtype_named(name: str) -> DType | None:
    """The type of that name, or None where the wire has no such type (object, str, int4, ...)."""
    return BY_NAME.get(name)


def checked_dtype(code: object, bits: object, lanes: object) -> DType:
    """What a received (code, bits, lanes) means; ProtocolError where it means nothing."""
    if type(code) is int and type(bits) is int and type(lanes) is int:
        dtype = _BY_CODES.get((code, bits, lanes))
        if dtype is not None:
            return dtype
    raise ProtocolError(f"unknown dtype (code, bits, lanes) = {shown((code, bits, lanes))}")
