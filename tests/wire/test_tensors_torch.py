"""torch's tensors to carriers and back: nothing changes, and what cannot cross is named."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BOOL, BY_NAME
from gradwire_wire.errors import DtypeError, UnsupportedTensorError
from gradwire_wire.structures import fill, flatten
from gradwire_wire.tensors import torch as family

NAMES = [name for name in BY_NAME if hasattr(torch, name)]


def bits(x: torch.Tensor) -> list[int]:
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.detach().contiguous().view(size[x.element_size()]).flatten().tolist()


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert bits(a) == bits(b)


def test_assert_same_can_fail() -> None:
    with pytest.raises(AssertionError):
        assert_same(torch.tensor([0.0]), torch.tensor([-0.0]))


def of(name: str, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape))
    dtype = getattr(torch, name)
    if name == "bool":
        return (torch.arange(count) % 3 == 0).reshape(shape)
    raw = torch.randint(0, 255, (count * torch.empty(0, dtype=dtype).element_size(),), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_every_dtype(name: str) -> None:
    for shape in [(), (0,), (0, 3), (1, 8, 0, 128), (3, 4)]:
        x = of(name, *shape)
        carrier = family.export(x)
        assert carrier.dtype == BY_NAME[name] and carrier.array.dtype == np.dtype(BY_NAME[name].carrier)
        assert type(carrier.array) is np.ndarray and carrier.array.shape == shape
        assert_same(family.adopt(carrier), x)
        assert family.aval(x) == Aval(shape, BY_NAME[name])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "float8_e5m2", "complex64"])
def test_R13_every_layout(name: str) -> None:
    base = of(name, 2, 3, 4)
    views = [base.permute(order) for order in itertools.permutations(range(3))]
    views += [base[:, ::2], base[..., 1::2], base[1:, 1:, 1:], base[:1].expand(5, 3, 4), base[0, 0, 0]]
    if name != "float8_e5m2":
        views.append(of(name, 2, 3, 4, 5).to(memory_format=torch.channels_last))
    for x in views:
        array = family.export(x).array
        assert tuple(s // array.itemsize for s in array.strides) == x.stride()
        y = family.adopt(Carrier(array, BY_NAME[name]))
        assert_same(y, x)
        assert y.stride() == x.stride() and y.data_ptr() == x.data_ptr(), "the same memory"


def test_R11_special_values_bit_exact() -> None:
    values = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 1.0]
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.tensor(values).to(dtype)
        assert_same(family.adopt(family.export(x)), x)


def test_R10_bool_of_other_bytes_arrives_as_true() -> None:
    x = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
    carrier = family.export(x)
    assert carrier.dtype == BOOL and carrier.array.view(np.uint8).tolist() == [0, 1, 1, 1]
    assert family.export(x[:2]).array.base is not None, "proper ones are not copied"


def test_R18_not_plain_but_right() -> None:
    w = torch.nn.Parameter(torch.arange(3.0))
    assert family.export(w).array.tolist() == [0, 1, 2]
    assert family.export(w * 2).array.tolist() == [0, 2, 4]
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert family.export(z.conj()).array.tolist() == [1 - 2j, 3 + 4j]
    assert family.export(z.conj().imag).array.tolist() == [-2, 4]
    assert family.export(z.conj().requires_grad_()).array.tolist() == [1 - 2j, 3 + 4j]
    with torch.inference_mode():
        inference = torch.arange(3.0).to(torch.bfloat16)
    assert_same(family.adopt(family.export(inference)), torch.arange(3.0).to(torch.bfloat16))

    class Named(torch.Tensor):
        pass

    assert family.export(torch.arange(3.0).as_subclass(Named)).array.tolist() == [0, 1, 2]


def _strange() -> dict[str, torch.Tensor]:
    x = torch.eye(3)
    with FakeTensorMode():
        fake = torch.empty(3)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    return {
        "memory of this tensor was given back": freed,
        "sparse": x.to_sparse(),
        "SparseCsr|sparse_csr": x.to_sparse_csr(),
        "mkldnn": x.to_mkldnn(),
        "meta": x.to("meta"),
        "fake": fake,
        "quantised": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([x, x[:2]]),
        "masked": torch.masked.masked_tensor(x, x > 0),
        "complex32": torch.zeros(2, dtype=torch.complex32),
        "functionalize": torch._to_functional_tensor(x),
    }


def test_R18_R19_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strange = _strange()
    for name, x in strange.items():
        with pytest.raises(UnsupportedTensorError, match=name):
            family.export(x)
    assert family.aval(strange["fake"]) == family.aval(strange["meta"][0])
    for name in ("sparse", "quantised", "nested", "complex32"):
        with pytest.raises(UnsupportedTensorError, match=name):
            family.aval(strange[name])


def test_functorch_wrappers_are_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match="wrapper"):
        torch.func.vmap(lambda t: family.export(t))(torch.ones(2, 3))


@pytest.mark.parametrize("dtype", ["f4", "u2", "?"])
def test_R15_read_only_arrays_alias_without_a_warning(dtype: str) -> None:
    array = np.zeros((4, 3), dtype)[:, ::2]
    array.flags.writeable = False
    x = family.adopt(Carrier(array, BY_NAME[array.dtype.name]))
    assert x.data_ptr() == array.ctypes.data and x.shape == (4, 2)
    empty = np.zeros((0, 3), dtype)
    empty.flags.writeable = False
    assert family.adopt(Carrier(empty, BY_NAME[array.dtype.name])).shape == (0, 3)


def test_adopted_memory_lives_as_long_as_the_tensor() -> None:
    array = np.full(100_000, 7.0)
    array.flags.writeable = False
    x = family.adopt(Carrier(array, BY_NAME["float64"]))[5:]
    del array
    assert [bool((np.full(100_000, float(i)) == i).all()) for i in range(5)] == [True] * 5
    assert bool((x == 7).all())


def test_negative_and_unaligned_strides_are_copied() -> None:
    backwards = np.arange(6.0).reshape(2, 3)[::-1, ::-1]
    assert family.adopt(Carrier(backwards, BY_NAME["float64"])).tolist() == backwards.tolist()
    field = np.zeros(3, [("a", "f4"), ("b", "i2")])["a"]
    assert family.adopt(Carrier(field, BY_NAME["float32"])).tolist() == [0, 0, 0]
    odd = np.frombuffer(bytearray(np.arange(3, dtype="f4").tobytes()).zfill(13), "u1")[1:].view("f4")
    assert family.adopt(Carrier(odd, BY_NAME["float32"])).tolist() == [0, 1, 2]


def test_what_torch_lacks_is_a_dtype_error() -> None:
    with pytest.raises(DtypeError, match="float8_e3m4"):
        family.adopt(Carrier(np.zeros(3, "u1"), BY_NAME["float8_e3m4"]))


def test_a_shape_is_a_tuple_on_the_other_side() -> None:
    x = torch.ones(2, 3)
    structure, leaves = flatten([[x, x.shape, {"pads": (x.shape, x.shape[1:])}], {}], family.is_tensor)
    (_, shape, rest), _ = fill(structure, leaves)
    assert (shape, rest) == ((2, 3), {"pads": ((2, 3), (3,))}) and type(shape) is tuple
