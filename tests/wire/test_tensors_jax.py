"""JAX arrays to carriers and back: every bit, no copy where none is needed, and refusals in plain words."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import DtypeError, UnsupportedTensorError
from gradwire_wire.tensors import jax as family
from tests.doubles.patience import soon

WIDE = ["float64", "int64", "uint64", "complex128"]


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types for one test."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def carrier_of_bits(name: str, shape: tuple[int, ...] = (4, 8)) -> Carrier:
    """A carrier of that type with every kind of bit pattern in it (bool: 0 and 1)."""
    dtype = BY_NAME[name]
    count = int(np.prod(shape)) * dtype.itemsize
    bits = np.random.default_rng(1).integers(0, 2 if name == "bool" else 256, count, dtype=np.uint8)
    return Carrier(bits.view(dtype.carrier).reshape(shape), dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    """Assert equality of shape and of every bit."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


def test_same_bits_can_fail() -> None:
    with pytest.raises(AssertionError):
        same_bits(np.array([0.0]), np.array([-0.0]))


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize("shape", [(4, 8), (), (0,), (0, 3), (1, 8, 0, 128)])
def test_every_bit_of_every_type_survives(name: str, shape: tuple[int, ...], x64: None) -> None:
    sent = carrier_of_bits(name, shape)
    if not hasattr(jnp, name):
        with pytest.raises(UnsupportedTensorError, match=name):
            family.adopt(sent)
        return
    array = family.adopt(sent)
    assert array.dtype.name == name
    assert family.aval(array) == Aval(shape, sent.dtype)
    back = family.export(array)
    assert back.dtype == sent.dtype
    same_bits(back.array, sent.array)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_r11_small_floats_are_numbers_of_their_own_kind(name: str) -> None:
    values = np.array(
        [1.5, -0.0, np.inf if name != "float8_e4m3fn" else 448, np.nan, 2**-6], getattr(ml_dtypes, name)
    )
    array = family.adopt(Carrier(values.view(BY_NAME[name].carrier), BY_NAME[name]))
    np.testing.assert_array_equal(np.asarray(array, np.float32), values.astype(np.float32))


def test_r10_a_mask_whose_bytes_are_two_is_true() -> None:
    mask = np.array([0, 2, 255, 1], np.uint8).view(np.bool_)
    array = family.adopt(Carrier(mask, BY_NAME["bool"]))
    assert array.dtype == jnp.bool_
    assert jnp.sum(array) == 3
    same_bits(family.export(array).array, np.array([False, True, True, True]))


@pytest.mark.parametrize(
    "layout",
    [
        lambda a: a.transpose(2, 0, 1),
        lambda a: a[:, ::2],
        lambda a: a[::-1, :, ::-1],
        lambda a: np.asfortranarray(a),
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: a[:, :0],
    ],
)
def test_r13_elements_are_where_numpy_has_them(layout) -> None:
    strided = layout(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    array = family.adopt(Carrier(strided, BY_NAME["float32"]))
    for index in np.ndindex(strided.shape):
        assert float(array[index]) == strided[index]


def aligned(nbytes: int, offset: int = 0) -> np.ndarray:
    """Float32 memory at a multiple of 128 bytes, plus ``offset``."""
    raw = np.zeros(nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 128 + offset
    return raw[start : start + nbytes].view(np.float32)


def test_r12_memory_is_shared_when_aligned_and_right_when_not() -> None:
    for offset in (0, 4, 8, 16, 32):
        values = aligned(400_000, offset)
        values[:] = np.arange(100_000)
        array = family.adopt(Carrier(values, BY_NAME["float32"]))
        assert (array.unsafe_buffer_pointer() == values.ctypes.data) or offset
        same_bits(family.export(array).array, values)


def test_export_is_a_read_only_view_of_the_array() -> None:
    array = jnp.arange(100_000, dtype=jnp.float32)
    exported = family.export(array).array
    assert exported.ctypes.data == array.unsafe_buffer_pointer()
    assert not exported.flags.writeable
    expected = np.arange(100_000, dtype=np.float32)
    del array
    gc.collect()
    same_bits(exported, expected)


class Segment(ctypes.c_char * 400_064):
    """Memory that says when it is gone, as a lease does."""

    alive = 0

    def __init__(self) -> None:
        Segment.alive += 1

    def __del__(self) -> None:
        Segment.alive -= 1


def test_r16_an_adopted_array_keeps_its_memory() -> None:
    segment = Segment()
    values = np.ndarray(100_000, np.float32, segment, -ctypes.addressof(segment) % 64)
    values[:] = 3
    array = family.adopt(Carrier(values, BY_NAME["float32"]))
    del values, segment
    gc.collect()
    assert Segment.alive == 1
    assert float(array[-1]) == 3
    del array
    assert soon(lambda: Segment.alive == 0)


@pytest.mark.parametrize("name", WIDE)
def test_r17_sixty_four_bits_are_refused_without_x64(name: str) -> None:
    with pytest.raises(DtypeError, match=f"{name}.*x64=True.*jax_enable_x64"):
        family.adopt(carrier_of_bits(name))


def test_r17_sixty_four_bits_are_kept_with_x64(x64: None) -> None:
    values = np.array([1 + 1e-12])
    assert float(family.adopt(Carrier(values, BY_NAME["float64"]))[0]) == 1 + 1e-12
    assert int(family.adopt(Carrier(np.array([2**40]), BY_NAME["int64"]))[0]) == 2**40


def test_r19_sub_byte_integers_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedTensorError, match="int4"):
        family.export(jnp.ones(3, jnp.int4))


def test_keys_are_refused_by_name() -> None:
    key = jax.random.key(0)
    assert family.is_tensor(key)
    for refuses in (family.export, family.aval):
        with pytest.raises(UnsupportedTensorError, match=r"key<fry>.*key_data"):
            refuses(key)


def test_tracers_are_tensors_with_a_shape_and_no_bytes() -> None:
    seen = []

    @jax.jit
    def traced(x):
        seen.append((family.is_tensor(x), family.aval(x)))
        with pytest.raises(UnsupportedTensorError, match="tracing"):
            family.export(x)
        return x

    jax.vmap(traced)(jnp.ones((5, 2), jnp.bfloat16))
    assert seen == [(True, Aval((2,), BY_NAME["bfloat16"]))]


def test_what_is_not_of_jax_is_no_tensor() -> None:
    assert not any(family.is_tensor(x) for x in (1.0, None, "x", np.ones(2), np.float32(1), [jnp.ones(1)]))
