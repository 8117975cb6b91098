"""Headers: what is well formed passes unchanged, everything else is refused, and nothing reaches outside a segment."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import ProtocolError
from gradwire_wire.headers import (
    CPU,
    IS_COPIED,
    MAX_NBYTES,
    READ_ONLY,
    Header,
    checked_header,
    extent,
    packed,
)

F32, U8, C128 = BY_NAME["float32"], BY_NAME["uint8"], BY_NAME["complex128"]
SEGMENT = 1 << 20


def segment_nbytes(number: int) -> int:
    if number != 3:
        raise ProtocolError("unknown segment")
    return SEGMENT


def received(header: Header | list) -> Any:
    return msgpack.unpackb(msgpack.packb(packed(header) if isinstance(header, Header) else header))


def refuse(raw: Any, frames: int = 0) -> None:
    with pytest.raises(ProtocolError):
        checked_header(raw, segment_nbytes, frames)


GOOD = [
    (Header(3, 4096, 7, (2, 3), None, F32), 0),
    (Header(3, SEGMENT - 4, 7, (), None, F32), 0),
    (Header(3, 0, 1, (SEGMENT,), None, U8, flags=0), 0),
    (Header(3, 0, 1, (SEGMENT,), (1,), U8, flags=READ_ONLY | IS_COPIED), 0),
    (Header(3, 0, 1, (2, 3, 4), (1, 2, 6), F32), 0),
    (Header(3, 0, 1, (1, 3), (10**9, 1), F32), 0),  # the stride of an axis of one element touches nothing
    (Header(3, 0, 1, (1000, 3), (0, 1), F32), 0),
    (Header(b"12345678", 0, 0, (2,), None, F32), 0),
    (Header(b"1234", 0, 0, (), None, F32), 0),
    (Header(b"", 0, 0, (0,), None, F32), 0),
    (Header(b"", 0, 0, (1, 8, 0, 128), None, F32), 0),
    (Header((0,), 0, 0, (5000,), None, F32), 1),
    (Header((1,), 0, 0, (5000,), None, C128), 2),
    (Header(3, 0, 1, (1,) * 64, None, U8), 0),
]


@pytest.mark.parametrize(("header", "frames"), GOOD)
def test_well_formed_headers_pass_unchanged(header: Header, frames: int) -> None:
    assert checked_header(received(header), segment_nbytes, frames) == header


def with_field(at: int, value: Any, base: Header = GOOD[0][0]) -> list:
    raw = received(base)
    raw[at] = value
    return raw


PLACE, OFFSET, LOAN, SHAPE, STRIDES, DTYPE, DEVICE, FLAGS = range(8)

BAD = {
    "unknown segment": with_field(PLACE, 4),
    "segment -1": with_field(PLACE, -1),
    "segment True": with_field(PLACE, True),
    "segment 2**64-1": with_field(PLACE, 2**64 - 1),
    "no place": with_field(PLACE, None),
    "a place of text": with_field(PLACE, "3"),
    "a place of floats": with_field(PLACE, 3.0),
    "a place in a map": with_field(PLACE, {3: 3}),
    "a frame that is not there": with_field(PLACE, [0]),
    "two frames": with_field(PLACE, [0, 1]),
    "no frame": with_field(PLACE, []),
    "frame -1": with_field(PLACE, [-1]),
    "bytes that are too few": with_field(PLACE, b"x", Header(b"12345678", 0, 0, (2,), None, F32)),
    "bytes that are too many": with_field(PLACE, b"x" * 9, Header(b"12345678", 0, 0, (2,), None, F32)),
    "bytes with an offset": with_field(OFFSET, 4, Header(b"12345678", 0, 0, (2,), None, F32)),
    "bytes with a loan": with_field(LOAN, 1, Header(b"12345678", 0, 0, (2,), None, F32)),
    "bytes with strides past their end": with_field(STRIDES, [2], Header(b"12345678", 0, 0, (2,), None, F32)),
    "bytes with strides that leave a rest": with_field(
        STRIDES, [0], Header(b"12345678", 0, 0, (2,), None, F32)
    ),
    "offset -1": with_field(OFFSET, -1),
    "offset -4096": with_field(OFFSET, -4096),
    "offset past the end": with_field(OFFSET, SEGMENT),
    "one byte past the end": with_field(OFFSET, SEGMENT - 20),
    "offset 2**63": with_field(OFFSET, 2**63),
    "offset that is not aligned": with_field(OFFSET, 4098),
    "offset that is no integer": with_field(OFFSET, 4096.0),
    "loan -1": with_field(LOAN, -1),
    "loan None": with_field(LOAN, None),
    "a negative dimension": with_field(SHAPE, [-2, 3]),
    "two negative dimensions": with_field(SHAPE, [-2, -3]),
    "a shape that overflows 64 bits": with_field(SHAPE, [2**32, 2**32, 2**32]),
    "a shape that overflows to nothing": with_field(SHAPE, [2**46, 2**46]),
    "a dimension of 2**63": with_field(SHAPE, [2**63]),
    "a dimension of True": with_field(SHAPE, [True, 3]),
    "a dimension of 2.0": with_field(SHAPE, [2.0, 3]),
    "a huge ndim": with_field(SHAPE, [1] * 65),
    "a much too huge ndim": with_field(SHAPE, [1] * 100_000),
    "a shape of bytes": with_field(SHAPE, b"\2\3"),
    "no shape": with_field(SHAPE, None),
    "no elements": with_field(SHAPE, [0, 3]),
    "a shape larger than the segment": with_field(SHAPE, [SEGMENT, 3]),
    "too few strides": with_field(STRIDES, [1]),
    "too many strides": with_field(STRIDES, [3, 1, 1]),
    "a negative stride": with_field(STRIDES, [3, -1]),
    "strides past the end": with_field(STRIDES, [SEGMENT, 1]),
    "a stride of 2**62": with_field(STRIDES, [2**62, 1]),
    "a stride whose bytes overflow": with_field(STRIDES, [2**46, 2**46]),
    "strides of text": with_field(STRIDES, "31"),
    "unknown dtype": with_field(DTYPE, [2, 33, 1]),
    "two lanes": with_field(DTYPE, [2, 32, 2]),
    "a dtype of two numbers": with_field(DTYPE, [2, 32]),
    "a dtype by name": with_field(DTYPE, "float32"),
    "a dtype of lists": with_field(DTYPE, [[], [], []]),
    "no dtype": with_field(DTYPE, None),
    "another device": with_field(DEVICE, [2, 0]),
    "another processor": with_field(DEVICE, [1, 1]),
    "a device of True": with_field(DEVICE, [True, False]),
    "a device of floats": with_field(DEVICE, [1.0, 0.0]),
    "no device": with_field(DEVICE, None),
    "unknown flags": with_field(FLAGS, 4),
    "all flags": with_field(FLAGS, 2**32 - 1),
    "flags -1": with_field(FLAGS, -1),
    "flags True": with_field(FLAGS, True),
    "seven fields": received(GOOD[0][0])[:7],
    "nine fields": [*received(GOOD[0][0]), 0],
    "a map": {},
    "text": "header",
    "bytes": b"header",
    "None": None,
    "a number": 7,
    "many times nothing": with_field(SHAPE, [0, 2**46, 2**46], Header(b"", 0, 0, (0,), None, F32)),
    "one element many times": [3, 0, 1, [2**40, 2**40], [0, 0], [2, 32, 1], [1, 0], 2],
}


@pytest.mark.parametrize("name", BAD)
def test_R57_every_corrupted_field_is_refused(name: str) -> None:
    refuse(BAD[name])


def test_bytes_in_the_message_may_be_permuted() -> None:
    for place in (bytes(24), (0,)):
        good = Header(place, 0, 0, (3, 2), (1, 3), F32)
        assert checked_header(received(good), segment_nbytes, 1) == good
        assert good.nbytes == 24


def test_frames_have_no_offset_and_no_loan() -> None:
    good = Header((0,), 0, 0, (3, 2), None, F32)
    assert checked_header(received(good), segment_nbytes, 1) == good
    for at, value in ((OFFSET, 4), (LOAN, 1), (PLACE, [1])):
        refuse(with_field(at, value, good), frames=1)


def deep(levels: int) -> list:
    x: list = []
    for _ in range(levels):
        x = [x]
    return x


@pytest.mark.parametrize("at", range(8))
def test_R57_a_field_nested_without_end_is_refused(at: int) -> None:
    for levels in (1, 5000):
        refuse(with_field(at, deep(levels)))
        refuse(with_field(at, [deep(levels)] * 3))


ODD = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-2, 70),
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=9),
    st.lists(st.one_of(st.integers(-2, 2**47), st.integers(-2, 10), st.none(), st.booleans()), max_size=6),
    st.dictionaries(st.integers(0, 3), st.integers(0, 3), max_size=2),
)


@settings(max_examples=120)
@given(st.data())
def test_random_fields_give_a_sound_header_or_a_protocol_error(data: st.DataObject) -> None:
    base, frames = data.draw(st.sampled_from(GOOD))
    raw = received(base)
    for at in data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)):
        raw[at] = data.draw(ODD)
    try:
        header = checked_header(raw, segment_nbytes, frames)
    except ProtocolError:
        return
    assert_inside(header)


def assert_inside(header: Header) -> None:
    """numpy, given a buffer as large as the segment, takes the view: it checks the bounds on its own account."""
    if type(header.place) is int:
        assume(len(header.shape) <= 32)
        step = header.dtype.itemsize
        strides = None if header.strides is None else tuple(s * step for s in header.strides)
        buffer = np.zeros(SEGMENT, np.uint8)
        view = np.ndarray(header.shape, header.dtype.carrier, buffer.data, header.byte_offset, strides)
        low, high = np.lib.array_utils.byte_bounds(view)
        assert 0 <= low - buffer.ctypes.data <= high - buffer.ctypes.data <= SEGMENT
        assert header.byte_offset + header.nbytes == high - buffer.ctypes.data


DIMS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 400)), max_size=5)


@settings(max_examples=120)
@given(DIMS, st.integers(0, SEGMENT // 16), st.sampled_from(sorted(BY_NAME)))
def test_no_accepted_header_touches_a_byte_outside_its_segment(dims: list, at: int, name: str) -> None:
    dtype = BY_NAME[name]
    shape, strides = [n for n, _ in dims], [s for _, s in dims]
    raw = [3, at * dtype.itemsize, 1, shape, strides, list(dtype), list(CPU), 0]
    inside = raw[1] + (1 + sum((n - 1) * s for n, s in dims)) * dtype.itemsize <= SEGMENT
    try:
        header = checked_header(raw, segment_nbytes)
    except ProtocolError:
        assert not inside
        return
    assert inside
    assert_inside(header)


def test_extent_counts_from_the_first_to_the_last_element() -> None:
    assert extent((), None) == extent((), ()) == 1
    assert extent((2, 3), None) == extent((2, 3), (3, 1)) == extent((2, 3), (1, 2)) == 6
    assert extent((2, 3), (100, 1)) == 103 and extent((5,), (0,)) == 1
    assert extent((0, 3), (3, 1)) == extent((3, 0), None) == 0
    assert extent((1, 1), (10**12, 10**12)) == 1


def test_the_bound_itself_is_accepted() -> None:
    huge = Header(3, 0, 1, (MAX_NBYTES,), None, U8)
    assert checked_header(received(huge), lambda _: MAX_NBYTES) == huge
    with pytest.raises(ProtocolError):
        checked_header(with_field(SHAPE, [MAX_NBYTES + 1], huge), lambda _: 2 * MAX_NBYTES)
