"""Tensor headers: DLPack's description of a tensor, and where its bytes are.

On the wire a header is the msgpack array::

    [place, byte_offset, loan, shape, strides, [code, bits, lanes], [device_type, device_id], flags]

place
    an integer: the sender's number of the segment the bytes are in; binary: the bytes themselves,
    from the first element to the end of the last (small tensors, and all tensors where no memory is
    shared: then an index, as ``[frame]``, of the message's further frames).
byte_offset, loan
    where in the segment the first element is; which entry of the receiver's ledger to mark when
    the last view is gone. Both 0 for bytes that travel in the message.
shape, strides
    in elements; strides None means C-contiguous. Strides are never negative on the wire.
flags
    READ_ONLY 1, IS_COPIED 2 (DLPack's): the sender made this copy for the receiver alone and will
    not write it while the loan lasts. Without it the bytes are passed by reference. No other flags.

Everything received goes through `checked_header` before any memory is looked at. Pure.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, NamedTuple, Union

from gradwire_wire.carriers import Aval
from gradwire_wire.dtypes import DType, checked_dtype
from gradwire_wire.errors import ProtocolError, shown

__all__ = [
    "IS_COPIED",
    "MAX_NBYTES",
    "MAX_NDIM",
    "READ_ONLY",
    "Header",
    "check_place",
    "checked_header",
    "extent",
    "inline",
    "packed",
    "small_layout",
]

READ_ONLY, IS_COPIED = 1, 2
MAX_NDIM = 64
MAX_NBYTES = 1 << 46
MAX_FLAGS = READ_ONLY | IS_COPIED
CPU = (1, 0)


class Header(NamedTuple):
    """One tensor on the wire; fields as in the head of this file."""

    place: Union[int, bytes, tuple[int]]
    byte_offset: int
    loan: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    device: tuple[int, int] = CPU
    flags: int = IS_COPIED

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        return extent(self.shape, self.strides) * self.dtype.itemsize


_header = partial(tuple.__new__, Header)


def extent(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> int:
    """Elements from the first to one past the last that a view of this shape can touch."""
    count = 1
    last = 1
    for i, n in enumerate(shape):
        count *= n
        if strides is not None:
            last += (n - 1) * strides[i]
    return count if strides is None or count == 0 else last


def packed(h: Header) -> list[Any]:
    """The header as msgpack packs it."""
    return [h.place, h.byte_offset, h.loan, h.shape, h.strides, h.dtype, h.device, h.flags]


def inline(
    data: bytes, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...] | None = None
) -> list[Any]:
    """The header of a small tensor whose bytes travel in it, as msgpack packs it."""
    return [data, 0, 0, shape, strides, dtype, CPU, IS_COPIED]


def checked_header(raw: Any, segment_nbytes: Callable[[int], int], frames: int = 0) -> Header:
    """Turn what was received into a header whose every byte lies inside its segment.

    raw: an unpacked msgpack value, trusted in nothing.
    segment_nbytes: size of the sender's segment of that number; raises ProtocolError if unknown.
    frames: how many further frames the message has.
    """
    if type(raw) is not list or len(raw) != 8:
        raise ProtocolError("a tensor header must be an array of 8")
    place, byte_offset, loan, shape, strides, dtype, device, flags = raw
    h = Header(
        _frame_of(place, frames) if type(place) is list else place,
        _natural(byte_offset, "byte offset"),
        _natural(loan, "loan"),
        _naturals(shape, "shape"),
        None if strides is None else _naturals(strides, "strides"),
        checked_dtype(*dtype) if type(dtype) is list and len(dtype) == 3 else checked_dtype(dtype, 0, 0),
        _device_of(device),
        _natural(flags, "flags"),
    )
    if h.flags > MAX_FLAGS:
        raise ProtocolError(f"unknown flags {flags}")
    if h.strides is not None and len(h.strides) != len(h.shape):
        raise ProtocolError(f"{len(h.strides)} strides for {len(h.shape)} dimensions")
    _check_size(h)
    if type(place) is int:
        _check_place(h, place, segment_nbytes)
    elif type(place) not in (bytes, list):
        raise ProtocolError(f"a header's place cannot be {type(place).__name__}")
    elif byte_offset or loan:
        raise ProtocolError("bytes that travel in the message have no offset and no loan")
    elif type(place) is bytes and len(place) != h.nbytes:
        raise ProtocolError(f"{len(place)} bytes in a header that describes {h.nbytes}")
    return h


def check_place(
    aval: Aval,
    nbytes: int,
    number: int,
    byte_offset: int,
    loan: int,
    flags: int,
    segment_nbytes: Callable[[int], int],
) -> None:
    """As `checked_header` of a C-contiguous tensor in a segment, whose shape and dtype were checked before, and so its bytes."""
    if (
        0 < nbytes <= segment_nbytes(number) - byte_offset
        and byte_offset >= 0
        and 0 <= flags <= MAX_FLAGS
        and not byte_offset % (aval[1][1] >> 3)
    ):
        return
    _natural(byte_offset, "byte offset")
    if flags > MAX_FLAGS:
        raise ProtocolError(f"unknown flags {flags}")
    h = _header((number, byte_offset, loan, aval.shape, None, aval.dtype, CPU, flags))
    _check_place(h, number, segment_nbytes)


def small_layout(raw: Any) -> tuple[tuple[int, ...], DType] | None:
    """Shape and dtype of a small tensor as `inline` writes it; None for anything else: `checked_header` tells why.

    Checked as thoroughly; it only makes less of it, since small tensors are what calls wait for.
    """
    if type(raw) is not list or len(raw) != 8:
        return None
    place, byte_offset, loan, shape, strides, dtype, device, flags = raw
    if type(place) is not bytes or type(shape) is not list or type(dtype) is not list or strides is not None:
        return None
    if len(dtype) != 3 or device != _CPU_LIST or flags != IS_COPIED or byte_offset or loan:
        return None
    nbytes = 1
    for n in shape:
        if type(n) is not int or n <= 0:
            return None
        nbytes *= n
    known = checked_dtype(*dtype)
    if nbytes * (known.bits // 8) != len(place) or len(shape) > MAX_NDIM:
        return None
    if type(byte_offset) is not int or type(loan) is not int or bool in map(type, device):
        return None
    return tuple(shape), known


_CPU_LIST = list(CPU)


def _check_size(h: Header) -> None:
    """Neither the memory nor the elements may be more than an array can have, even where most are the same."""
    nbytes = h.nbytes
    if h.strides is not None or nbytes == 0:
        count = 1
        for n in h.shape:
            count *= n or 1
        nbytes = max(nbytes, count * h.dtype.itemsize)
    if nbytes > MAX_NBYTES:
        raise ProtocolError(f"a tensor of {nbytes} bytes is more than the protocol allows")


def _check_place(h: Header, place: int, segment_nbytes: Callable[[int], int]) -> None:
    nbytes, start = h.nbytes, h.byte_offset
    if nbytes == 0:
        raise ProtocolError("a tensor without elements has no place in a segment")
    if place < 0 or start + nbytes > segment_nbytes(place):
        raise ProtocolError(f"bytes {start}..{start + nbytes} lie outside segment {place}")
    if start % h.dtype.itemsize:
        raise ProtocolError(f"byte offset {start} is not aligned for {h.dtype.name}")


def _frame_of(place: list[Any], frames: int) -> tuple[int]:
    if len(place) != 1 or _natural(place[0], "frame") >= frames:
        raise ProtocolError(f"frame {shown(place)} of a message with {frames} further frames")
    return (place[0],)


def _natural(x: object, what: str) -> int:
    if type(x) is not int or x < 0 or x > MAX_NBYTES:
        raise ProtocolError(f"{what} must be a natural number up to 2**46, not {shown(x)}")
    return x


def _naturals(raw: object, what: str) -> tuple[int, ...]:
    if type(raw) is not list or len(raw) > MAX_NDIM:
        raise ProtocolError(f"{what} must be an array of at most {MAX_NDIM} numbers")
    return tuple(_natural(n, what) for n in raw)


def _device_of(raw: object) -> tuple[int, int]:
    if type(raw) is not list or raw != list(CPU) or not all(type(n) is int for n in raw):
        raise ProtocolError(f"a tensor on device {shown(raw)}: this version carries host memory only")
    return CPU
