"""TensorFlow tensors to numpy memory and back: the same bits, shared where that is safe, refused by name."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BOOL, BY_NAME
from gradwire_wire.errors import DtypeError, UnsupportedTensorError
from gradwire_wire.tensors.tensorflow import adopt, aval, export, is_tensor

HERE = sorted(name for name in BY_NAME if hasattr(tf.dtypes, name) or name in tf.dtypes.experimental.__dict__)
SHAPES = [(), (0,), (0, 3), (1, 8, 0, 128), (1, 1, 3), (2, 3, 4)]


def aligned(shape: tuple[int, ...], dtype: str, offset: int = 0) -> np.ndarray:
    """Random bits at an address ``offset`` past a multiple of 64."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + 192, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    raw[start : start + nbytes] = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, nbytes)
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def carrier(name: str, shape: tuple[int, ...], offset: int = 0) -> Carrier:
    return Carrier(aligned(shape, BY_NAME[name].carrier, offset), BY_NAME[name])


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", HERE)
def test_R10_R11_R14_R19_every_bit_survives_in_every_dtype_and_shape(
    name: str, shape: tuple[int, ...]
) -> None:
    sent = carrier(name, shape)
    tensor = adopt(sent)
    assert isinstance(tensor, tf.Tensor) and tensor.dtype.name == name and tuple(tensor.shape) == shape
    back = export(tensor)
    same_bits(back.array, sent.array)
    assert back.dtype == sent.dtype and back.owned
    assert aval(tensor) == Aval(shape, BY_NAME[name])


def test_the_comparison_can_fail() -> None:
    with pytest.raises(AssertionError):
        same_bits(np.float32([0.0]), np.float32([-0.0]))


def test_bool_and_bfloat16_and_float8_are_among_them() -> None:
    assert {"bool", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint64", "complex128"} <= set(HERE)


def test_R11_a_float8_kind_that_tensorflow_lacks_is_refused_by_name() -> None:
    with pytest.raises(DtypeError, match=r"has no float8_e3m4; .*bfloat16"):
        adopt(carrier("float8_e3m4", (3,)))


def test_R10_bytes_other_than_0_and_1_are_true() -> None:
    mask = Carrier(np.array([0, 2, 255, 1], np.uint8).view(bool), BOOL)
    tensor = adopt(mask)
    assert tensor.numpy().view(np.uint8).tolist() == [0, 1, 1, 1]
    assert int(tf.reduce_sum(tf.cast(tensor, tf.int32))) == 3


@pytest.mark.parametrize("name", ["float32", "bool", "int64", "complex64", "bfloat16"])
def test_aligned_memory_is_shared_and_kept_alive(name: str) -> None:
    sent = carrier(name, (5, 7))
    tensor = adopt(sent)
    assert export(tensor).array.ctypes.data == sent.array.ctypes.data
    array = sent.array
    while array.base is not None:
        array = array.base
    alive, expected = weakref.ref(array), sent.array.copy()
    del sent, array
    view = tf.identity(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    same_bits(export(view).array, expected)
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("offset", [4, 8, 16, 32])
def test_R12_unaligned_memory_is_copied_not_a_crash(offset: int) -> None:
    sent = carrier("float32", (1000,), offset)
    sent.array[:] = 1.0
    tensor = adopt(sent)
    sent.array[:] = 5.0
    assert float(tf.reduce_sum(tensor * 2)) == 2000.0


def layouts() -> dict[str, np.ndarray]:
    base = aligned((2, 3, 4), "float32")
    return {
        **{
            f"transposed {p}": base.transpose(p)
            for p in [(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
        },
        "sliced": base[:, ::2],
        "negative": base[::-1, :, ::-1],
        "Fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(base[:1], (5, 3, 4)),
        "big-endian": base.astype(">f4"),
        "read-only": np.frombuffer(base.tobytes(), np.float32),
    }


@pytest.mark.parametrize("layout", layouts())
def test_R13_R15_every_layout_arrives_element_by_element(layout: str) -> None:
    array = layouts()[layout]
    before = array.tobytes()
    tensor = adopt(Carrier(array, BY_NAME["float32"]))
    for index in np.ndindex(array.shape):
        assert tensor[index].numpy().tobytes() == array[index].astype("=f4").tobytes()
    assert array.tobytes() == before


def test_R16_kernels_do_not_write_into_adopted_memory() -> None:
    sent = carrier("float32", (100_000,))
    sent.array[:] = 0.0
    add = tf.function(lambda x: x + 1.0)
    for _ in range(20):
        add(adopt(sent))
        tf.nn.relu(adopt(sent) + 1.0)
    assert not sent.array.any()


def variables() -> dict[str, Any]:
    value = np.arange(100_000, dtype=np.float32)
    return {"tf": tf.Variable(value), "keras": keras.Variable(value)}


@pytest.mark.parametrize("kind", variables())
def test_R16_R18_a_variable_is_exported_as_it_was(kind: str) -> None:
    variable = variables()[kind]
    assert is_tensor(variable) and aval(variable) == Aval((100_000,), BY_NAME["float32"])
    array, expected = export(variable).array, np.arange(100_000, dtype=np.float32)
    variable.assign(variable + 1.0)
    if kind == "tf":
        variable.assign_add(tf.ones(100_000))
        variable.scatter_nd_update([[0]], [7.0])
    keras.optimizers.SGD(0.1).apply([tf.ones(100_000)], [variable])
    same_bits(array, expected)


def test_exported_memory_is_read_only() -> None:
    for dtype in (tf.float32, tf.bfloat16, tf.bool):
        assert not export(tf.cast(tf.ones(3), dtype)).array.flags.writeable


def test_R18_indexed_slices_are_added_up() -> None:
    slices = tf.IndexedSlices(tf.ones((2, 3)), tf.constant([1, 1]), tf.constant([4, 3]))
    assert is_tensor(slices)
    assert export(slices).array.tolist() == [[0] * 3, [2] * 3, [0] * 3, [0] * 3]
    assert aval(slices) == Aval((4, 3), BY_NAME["float32"])


REFUSED = {
    "tf.SparseTensor": lambda: tf.sparse.from_dense([[1.0, 0.0]]),
    "tf.RaggedTensor": lambda: tf.ragged.constant([[1.0], [1.0, 2.0]]),
    "dtype string": lambda: tf.constant(["a"]),
    "dtype resource": lambda: tf.Variable(1.0).handle,
    "dtype variant": lambda: tf.data.Dataset.from_tensors(1)._variant_tensor,
    "dtype qint8": lambda: tf.quantization.quantize(tf.ones(2), 0.0, 1.0, tf.qint8).output,
    "dtype int4": lambda: tf.constant([1], tf.dtypes.experimental.int4),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_R18_R19_what_is_not_a_plain_tensor_is_refused_by_name(kind: str) -> None:
    value = REFUSED[kind]()
    for convert in (export, aval):
        with pytest.raises(UnsupportedTensorError, match=kind):
            convert(value)


def test_symbolic_tensors_have_an_aval_and_no_values() -> None:
    seen = []

    @tf.function(input_signature=[tf.TensorSpec((2, 3), tf.float64), tf.TensorSpec((None, 3), tf.float64)])
    def traced(x: Any, y: Any) -> Any:
        assert is_tensor(x) and is_tensor(y)
        seen.append(aval(x))
        with pytest.raises(UnsupportedTensorError, match="no values yet"):
            export(x)
        with pytest.raises(UnsupportedTensorError, match="no size yet"):
            aval(y)
        return x

    traced.get_concrete_function()
    assert seen == [Aval((2, 3), BY_NAME["float64"])]


def test_other_things_are_not_tensors() -> None:
    for other in (np.ones(3), 1.0, [tf.ones(3)], None, "x", tf.float32):
        assert not is_tensor(other)
