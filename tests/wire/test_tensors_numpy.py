"""numpy's arrays to carriers and back: nothing changes, and what cannot cross is named."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import DtypeError, UnsupportedTensorError
from gradwire_wire.tensors import numpy as family


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def assert_same(a: np.ndarray, b: np.ndarray) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


def test_assert_same_can_fail() -> None:
    with pytest.raises(AssertionError):
        assert_same(np.array([0.0]), np.array([-0.0]))


@pytest.mark.parametrize("name", BY_NAME)
def test_there_and_back_every_dtype(name: str) -> None:
    dtype = numpy_dtype(name)
    for shape in [(), (0,), (0, 3), (1, 8, 0, 128), (3, 4)]:
        count = int(np.prod(shape)) * dtype.itemsize
        raw = np.random.default_rng(0).integers(0, 2 if name == "bool" else 255, count, "u1")
        x = raw.view(dtype).reshape(shape)
        carrier = family.export(x)
        assert carrier.dtype == BY_NAME[name] and carrier.array.dtype.name == BY_NAME[name].carrier
        assert type(carrier.array) is np.ndarray and np.shares_memory(carrier.array, x) == (x.size > 0)
        assert_same(family.adopt(carrier), x)
        assert family.aval(x) == Aval(shape, BY_NAME[name])


@given(
    x=arrays.arrays(
        st.sampled_from([">f4", "<f8", ">i2", ">c16", ">u8", "?", "f2"]),
        arrays.array_shapes(min_dims=0, min_side=0),
    ),
    step=st.sampled_from([1, -1, 2, -2]),
)
def test_R13_layouts_and_byte_orders(x: np.ndarray, step: int) -> None:
    for view in (
        x,
        x.T,
        x[..., ::step] if x.ndim else x,
        np.asfortranarray(x),
        np.broadcast_to(x, (2, *x.shape)),
    ):
        back = family.adopt(family.export(view))
        assert_same(back, view.astype(view.dtype.newbyteorder("=")))
        if view.dtype.isnative and view.dtype != bool:
            assert back.strides == view.strides


def test_R10_bool_of_other_bytes_arrives_as_true() -> None:
    x = np.array([0, 1, 2, 255], "u1").view("?")
    assert family.export(x).array.view("u1").tolist() == [0, 1, 1, 1]
    assert family.export(x.reshape(2, 2).T).array.view("u1").tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (np.array([None, 1]), "object"),
        (np.array(["a"]), "<U1"),
        (np.array([b"a"]), "S1"),
        (np.array(["2020-01-01"], "M8[D]"), "datetime64"),
        (np.array([1], "m8[s]"), "timedelta64"),
        (np.zeros(2, [("a", "f4"), ("b", "i2")]), "fields as a dict"),
        (np.zeros(2, np.longdouble), "longdouble|float128|float64"),
        (np.zeros(2, "V8"), r"\|V8"),
        (np.zeros(2, ml_dtypes.int4), "int4"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "masked"),
        (np.zeros(2, [("float0", "V")]), "the gradient of an integer"),
    ],
)
def test_refused_by_name(x: np.ndarray, says: str) -> None:
    assert family.is_tensor(x)
    for refuse in (family.export, family.aval):
        with pytest.raises(UnsupportedTensorError, match=says):
            refuse(x)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_a_matrix_is_refused_by_name() -> None:
    test_refused_by_name(np.matrix([[1.0]]), "matrix")


def test_arrays_with_arithmetic_of_their_own_are_refused() -> None:
    class Metres(np.ndarray):
        def __array_ufunc__(self, *args: object, **kwargs: object) -> None: ...

    class Named(np.ndarray):
        pass

    with pytest.raises(UnsupportedTensorError, match="Metres"):
        family.export(np.zeros(3).view(Metres))
    assert type(family.export(np.zeros(3).view(Named)).array) is np.ndarray


def test_R11_without_ml_dtypes_never_uint16(monkeypatch: pytest.MonkeyPatch) -> None:
    family._extension.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(DtypeError, match="pip install ml_dtypes"):
        family.adopt(Carrier(np.zeros(3, "u2"), BY_NAME["bfloat16"]))
    assert family.adopt(Carrier(np.zeros(3, "u2"), BY_NAME["uint16"])).dtype == np.uint16


def test_numpy_scalars_are_no_tensors() -> None:
    assert not family.is_tensor(np.float32(1)) and family.is_tensor(
        np.float32(1) * np.ones(()) + np.zeros((1,))
    )
