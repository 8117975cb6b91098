"""R10 to R20 with real workers: each tensor that crosses is compared, bit by bit, with what was sent.

The worker has 64-bit types here where its framework has to be told (JAX), except in R17. R15 and R16 are in
`test_tensors.py`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.autograd import forward_ad

import gradwire as gw
import gradwire_wire.tensors.numpy
from tests.integration.conftest import TARGETS
from tests.integration.inhabitants import (
    CALLERS,
    DTYPES,
    SMALL,
    WORKERS,
    as_family,
    assert_same_bits,
    every_small,
    has,
    numpy_dtype,
    patterned,
    wide,
)
from tests.integration.targets import elements as in_process

Workers = Callable[[str], gw.Worker]
every_pair = pytest.mark.parametrize(
    ("family", "framework"), [*itertools.product(CALLERS, WORKERS)], ids=lambda x: str(x)
)
every_worker = pytest.mark.parametrize("framework", WORKERS)

SHAPES = [(4, 8), (), (0,), (0, 3), (1, 8, 0, 128), (1, 5, 1), (40, 50)]


def remote_of(worker_of: Workers, framework: str, target: str) -> gw.Remote:
    """Of a function that looks at values, which a framework that traces must not."""
    remote = worker_of(framework).function(target)
    return remote.options(compile=False) if framework in ("jax", "tensorflow") else remote


def assert_crosses(remote: gw.Remote, family: str, arrays: dict[str, np.ndarray]) -> None:
    """All in one call, there and back, unchanged."""
    with wide(family):
        results = remote({key: as_family(family, x) for key, x in arrays.items()})
    assert results.keys() == arrays.keys()
    for key, x in arrays.items():
        assert_same_bits(family, results[key], x)


def test_the_comparison_can_fail() -> None:
    x = np.array([0.0, 1.0])
    for wrong in (np.array([-0.0, 1.0]), x.astype(np.float32), x[:, None]):
        with pytest.raises(AssertionError):
            assert_same_bits("numpy", wrong, x)
    with pytest.raises(AssertionError):
        assert_same_bits("torch", x, x)


# ---- R10: bool ------------------------------------------------------------------------------------------------------


@every_pair
def test_r10_every_dtype_between_every_pair(worker_of: Workers, family: str, framework: str) -> None:
    """bool above all; each other type that both have too, in shapes with and without elements."""
    names = [name for name in DTYPES if has(family, name) and has(framework, name)]
    assert {"bool", "bfloat16", "float8_e5m2", "uint64", "complex128"} <= {*names}
    arrays = {f"{name}{shape}": patterned(name, shape) for name in names for shape in SHAPES}
    assert_crosses(worker_of(framework).function("any_framework:identity"), family, arrays)


@pytest.mark.parametrize("family", ["numpy", "torch"])
@every_worker
def test_r10_a_mask_whose_bytes_are_two_is_true(worker_of: Workers, family: str, framework: str) -> None:
    equals_true = worker_of(framework).function("elements:equals_true")
    for shape in [(), (0,), (7,), (70, 100)]:
        raw = np.where(np.arange(np.prod(shape, dtype=int)) % 2, 0, 2).astype(np.uint8).reshape(shape)
        mask = raw.view(bool) if family == "numpy" else torch.from_numpy(raw.copy()).view(torch.bool)
        same, equal = equals_true(mask)
        assert_same_bits(family, same, raw != 0)
        assert_same_bits(family, equal, raw != 0)


# ---- R11: bfloat16 and float8 ----------------------------------------------------------------------------------------


@every_pair
def test_r11_every_value_of_every_small_float(worker_of: Workers, family: str, framework: str) -> None:
    names = [name for name in (*SMALL, "float16") if has(family, name) and has(framework, name)]
    arrays = {name: every_small(name) for name in names}
    assert_crosses(worker_of(framework).function("any_framework:identity"), family, arrays)


@pytest.mark.parametrize("way", [("torch", "jax"), ("torch", "numpy"), ("jax", "torch")], ids="-".join)
def test_r11_there_and_back_through_a_second_worker(worker_of: Workers, way: tuple[str, str]) -> None:
    """What one worker returned is passed on to the next, by reference where it can be."""
    family, framework = way
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        x = np.tile(every_small(name), 2 if name == "bfloat16" else 512)
        y = as_family(family, x)
        for via in (framework, family, framework):
            y = worker_of(via).function("any_framework:identity")(y)
        assert_same_bits(family, y, x)


def test_r11_without_ml_dtypes_an_error_and_never_uint16(
    worker_of: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_bfloat16 = worker_of("torch").function("in_torch:to_dtype")
    assert to_bfloat16(np.ones(3), "bfloat16").dtype == ml_dtypes.bfloat16
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    gradwire_wire.tensors.numpy._extension.cache_clear()
    with pytest.raises(gw.DtypeError, match=r"result: a bfloat16 tensor .* pip install ml_dtypes"):
        to_bfloat16(np.ones(3), "bfloat16")
    assert to_bfloat16(np.ones(3), "float32").dtype == np.float32


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_r11_a_float8_that_the_worker_lacks_names_the_argument(worker_of: Workers, framework: str) -> None:
    identity = worker_of(framework).function("any_framework:identity")
    missing = [name for name in SMALL if not has(framework, name)]
    assert missing
    for name in missing:
        for family in ("numpy", "jax"):
            with pytest.raises(gw.DtypeError, match=rf"args\[0\]\['w'\]\[1\]: .* has no {name}"):
                identity({"w": [np.ones(3, np.float32), as_family(family, patterned(name, (4,)))]})


# ---- R12: alignment --------------------------------------------------------------------------------------------------


def at_offset(x: np.ndarray, offset: int) -> np.ndarray:
    raw = np.zeros(x.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    view = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


@contextlib.contextmanager
def no_warnings(worker: gw.Worker) -> Iterator[None]:
    """A warning there is an error here."""
    switch = worker.function("elements:warnings_are_errors").options(compile=False)
    switch(True)
    try:
        yield
    finally:
        switch(False)


@every_worker
def test_r12_inputs_at_any_address(worker_of: Workers, framework: str) -> None:
    identity = worker_of(framework).function("any_framework:identity")
    arrays = [patterned(name, (60, 50), seed=1) for name in ("float64", "complex64", "int16", "bfloat16")]
    arrays += [x[:4, :4].copy() for x in arrays]
    with no_warnings(worker_of(framework)):
        for offset in (0, 1, 2, 4, 8, 16, 32):
            for x, y in zip(arrays, identity([at_offset(x, offset) for x in arrays]), strict=True):
                assert_same_bits("numpy", y, x)


@pytest.mark.parametrize("family", ["torch", "jax", "tensorflow"])
def test_r12_misaligned_arrays_beside_every_family(worker_of: Workers, family: str) -> None:
    both = worker_of("numpy").function("elements:pair")
    for offset in (1, 4, 8, 32):
        x = at_offset(np.arange(3000, dtype=np.float32), offset)
        for y in both(as_family(family, np.arange(3000, dtype=np.float32)), x):
            assert_same_bits(family, y, np.ascontiguousarray(x))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_r12_tensors_in_a_segment_are_aligned_for_every_kernel(worker_of: Workers, framework: str) -> None:
    addresses = worker_of(framework).function("elements:addresses")
    arrays = [at_offset(np.zeros(n, np.uint8), 3) for n in (4097, 5000, 8191, 12345, 100_001)]
    assert [a % 64 for a in addresses(arrays)] == [0] * len(arrays)


# ---- R13: layouts ----------------------------------------------------------------------------------------------------


def layouts(base: np.ndarray) -> dict[str, np.ndarray]:
    """Of an array of three axes."""
    step = base.itemsize
    found = {f"transposed {axes}": base.transpose(axes) for axes in itertools.permutations(range(3))}
    return found | {
        "sliced": base[:, ::2],
        "sliced in the middle": base[1:, 1:, 1:-1],
        "Fortran": np.asfortranarray(base),
        "reversed": base[::-1],
        "reversed and transposed": base[::-1, :, ::-2].transpose(2, 0, 1),
        "broadcast": np.broadcast_to(base[:1], (3, *base.shape[1:])),
        "one element many times": np.broadcast_to(base[0, 0, 0], (3, 2)),
        "overlapping": np.lib.stride_tricks.sliding_window_view(base[0, 0], 2),
        "size 1 with any stride": np.lib.stride_tricks.as_strided(
            base, (1, base.shape[2], 1), (8 * step, step, 0)
        ),
        "nothing, transposed": base[:0].transpose(2, 0, 1),
        "0-d": base[1, 1, 1, ...],
    }


NUMBERS = np.random.default_rng(0).normal(size=(2, 3, 4))


@every_worker
def test_r13_layouts_element_by_element_inside_the_worker(worker_of: Workers, framework: str) -> None:
    tree_elements = remote_of(worker_of, framework, "elements:tree_elements")
    sent = layouts(NUMBERS)
    for name, found in zip(sent, tree_elements(sent), strict=True):
        assert found == in_process.elements(sent[name]), name


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_r13_torch_layouts_element_by_element_inside_the_worker(worker_of: Workers, framework: str) -> None:
    tree_elements = remote_of(worker_of, framework, "elements:tree_elements")
    x = torch.from_numpy(NUMBERS)
    image = torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)
    sent = [
        x.mT,
        x.permute(2, 0, 1),
        x[:, ::2],
        x[:1].expand(3, 3, 4),
        x.flip(1),
        x[0, 0, 0],
        x.flatten()[1:3],
    ]
    sent += [image, image[:, 1:], image.mT, x.flatten().as_strided((3, 3), (1, 1))]
    assert tree_elements(sent) == [in_process.elements(y) for y in sent]


@every_pair
def test_r13_large_layouts_there_and_back(worker_of: Workers, family: str, framework: str) -> None:
    """Large enough for shared memory, and for what a kernel does with the end of a row."""
    sent = layouts(np.random.default_rng(1).normal(size=(9, 17, 33)).astype(np.float32))
    if family == "torch":  # which has no negative strides
        sent = {name: x for name, x in sent.items() if all(s >= 0 for s in x.strides)}
        sent = {name: np.copy(x, order="K") for name, x in sent.items()}
    assert_crosses(worker_of(framework).function("any_framework:identity"), family, sent)


@pytest.mark.parametrize("side", [4, 40])
def test_r13_permuted_layouts_stay_as_they_are(worker_of: Workers, side: int) -> None:
    """Small ones, which travel in the message, and large ones, which lie in shared memory."""
    image = torch.randn(2, 3, side, side).to(memory_format=torch.channels_last)
    strides, same = worker_of("torch").function("elements:strides")(image)
    assert tuple(strides) == image.stride() == same.stride()
    assert same.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(same, image)
    convolve = worker_of("torch").function("in_torch:convolve")
    assert convolve(image).stride() == torch.nn.functional.conv2d(image, torch.ones(4, 3, 2, 2)).stride()
    x = np.random.default_rng(2).normal(size=(side, 5, side)).transpose(2, 0, 1)
    for framework in ("numpy", "torch"):
        strides, same = worker_of(framework).function("elements:strides")(x)
        assert tuple(strides) == tuple(s // 8 for s in x.strides)
        assert same.strides == x.strides
        np.testing.assert_array_equal(same, x)


# ---- R14: nothing in it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
@pytest.mark.parametrize("family", CALLERS)
def test_r14_zero_size_in_out_and_as_gradient(worker_of: Workers, family: str, framework: str) -> None:
    double = worker_of(framework).function("any_framework:double")
    identity = worker_of(framework).function("any_framework:identity")
    for shape in [(0,), (0, 3), (1, 8, 0, 128)]:
        empty = np.zeros(shape, np.float32)
        x = as_family(family, empty)
        assert_same_bits(family, double(x), empty)
        assert_same_bits(family, identity({"only": [(x,)]})["only"][0][0], empty)
        y, pullback = double.vjp(x)
        assert_same_bits(family, y, empty)
        assert_same_bits(family, pullback(y)[0], empty)
        assert_same_bits(family, double.jvp((x,), (x,))[1], empty)
        assert_same_bits(family, native_gradient(family, double, x), empty)


def native_gradient(family: str, f: Any, x: Any) -> Any:
    if family == "torch":
        x = x.clone().requires_grad_()
        f(x).sum().backward()
        return x.grad
    if family == "jax":
        return jax.jit(jax.grad(lambda x: f(x).sum()))(x)
    if family == "tensorflow":
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(f(x))
        return tape.gradient(y, x)
    return x


# ---- R17: 64 bits ----------------------------------------------------------------------------------------------------

WIDE = {
    "float64": np.array([1 + 1e-12]),
    "int64": np.array([2**40]),
    "uint64": np.array([2**63], np.uint64),
    "complex128": np.array([1 + 1e-12j]),
}


@pytest.fixture(scope="module")
def narrow_worker(shared_bridge: gw.Bridge, jax_python: Path) -> gw.Worker:
    """A JAX worker as JAX is: without 64-bit types."""
    return shared_bridge.worker("jax", name="jax32", python=jax_python, path=[TARGETS], threads=1)


@pytest.mark.parametrize("family", CALLERS)
@pytest.mark.parametrize("name", WIDE)
def test_r17_into_a_jax_worker_without_x64(narrow_worker: gw.Worker, family: str, name: str) -> None:
    pair = narrow_worker.function("elements:pair")
    with wide(family):
        x = as_family(family, WIDE[name])
        with pytest.raises(gw.DtypeError, match=rf"y\['w'\]: .*{name}.*bridge.worker\('jax', x64=True\)"):
            pair(as_family(family, np.ones(2, np.float32)), y={"w": x})
        with pytest.raises(gw.DtypeError, match=rf"args\[0\]: .*{name}"):
            pair.vjp(x, x)


@pytest.mark.parametrize("family", CALLERS)
def test_r17_kept_where_there_is_room(worker_of: Workers, family: str) -> None:
    for framework in WORKERS:
        assert_crosses(worker_of(framework).function("any_framework:identity"), family, WIDE)


def test_r17_numpy_results_of_a_jax_function_without_x64(narrow_worker: gw.Worker) -> None:
    """A numpy array in the result of user code is as good as any: JAX would wrap 2**40 to 0."""
    for compile_ in ("auto", False):
        made = narrow_worker.function("elements:numpy_result").options(compile=compile_)
        for name in WIDE:
            with pytest.raises(gw.DtypeError, match=rf"{name}.*x64=True"):
                made(np.ones(2, np.float32), name)
        result = made(np.ones(2, np.float32), "float32")
        assert result.dtype == np.float32


def test_r17_into_a_jax_caller_without_x64(worker_of: Workers) -> None:
    module = worker_of("torch").module("in_torch:make_float64")
    x = jnp.ones((2, 3))
    says = r"result of torch/in_torch:make_float64: .*float64.*jax_enable_x64"
    with pytest.raises(gw.DtypeError, match=says):
        module(x)
    with pytest.raises(gw.DtypeError, match=says):
        jax.jit(module)(x)
    with pytest.raises(gw.DtypeError, match=says):
        jax.grad(lambda x: module(x).sum())(x)
    with pytest.raises(gw.DtypeError, match=r"result\['inner.weight'\]: .*float64.*jax_enable_x64"):
        gw.jax.functional(module)
    with pytest.raises(gw.DtypeError, match=r"result.*float64.*jax_enable_x64"):
        module.vjp(x)
    pair = worker_of("torch").function("elements:pair")
    for name, value in WIDE.items():
        with pytest.raises(gw.DtypeError, match=rf"y: .*{name}"):
            pair(x, y=value)
        with pytest.raises(gw.DtypeError, match=rf"y: .*{name}"):
            jax.jit(lambda x, value=value: pair(x, y=value))(x)
    with jax.enable_x64(True):
        assert module(x).dtype == jnp.float64


# ---- R18: not plain ---------------------------------------------------------------------------------------------------


def not_plain() -> dict[str, torch.Tensor]:
    z = torch.randn(30, 40, dtype=torch.complex64)
    with torch.inference_mode():
        inference = torch.randn(30, 40) * 2
    return {
        "parameter": torch.nn.Parameter(torch.randn(30, 40)),
        "requires grad": torch.randn(30, 40, requires_grad=True) * 2,
        "buffer": torch.nn.Buffer(torch.randn(3)),
        "conjugate": z.conj(),
        "small conjugate": z[:2, :2].conj(),
        "conjugate transposed": z.mH,
        "one conjugate": z.conj()[0, 0],
        "no conjugate": z.conj()[:0],
        "negative": z.conj().imag,
        "small negative": z[:2, :2].conj().imag,
        "negative of complex": torch._neg_view(z),
        "inference": inference,
        "inference, transposed": inference.T,
        "zeros without memory": torch._efficientzerotensor((3, 4)),
        "subclass": torch.randn(3).as_subclass(Named),
    }


class Named(torch.Tensor):
    """A subclass that adds nothing to memory."""


@every_worker
def test_r18_tensors_that_are_not_plain_are_right(worker_of: Workers, framework: str) -> None:
    identity = worker_of(framework).function("any_framework:identity")
    sent = not_plain()
    with torch.no_grad():
        results = identity(sent)
    for name, x in sent.items():
        expected = x.detach().clone().resolve_conj().resolve_neg().contiguous().as_subclass(torch.Tensor)
        assert_same_bits("torch", results[name], expected.numpy())
        assert not results[name].is_conj() and not results[name].is_neg()
        assert not results[name].requires_grad


def test_r18_gradients_reach_parameters_and_conjugates(worker_of: Workers) -> None:
    double = worker_of("torch").function("any_framework:double")
    parameter = torch.nn.Parameter(torch.randn(30, 40))
    double(parameter).sum().backward()
    assert torch.equal(parameter.grad, torch.full((30, 40), 2.0))
    z = torch.randn(30, 40, dtype=torch.complex64, requires_grad=True)
    w = z.detach().clone().requires_grad_()
    double(z.conj()).imag.sum().backward()
    (w.conj() * 2).imag.sum().backward()
    assert torch.equal(z.grad, w.grad)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch._efficientzerotensor((3,)))
        tangent = forward_ad.unpack_dual(double(dual)).tangent
        assert tangent is None or torch.equal(tangent, torch.zeros(3))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"layout sparse_coo.*to_dense"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), r"layout sparse_csr.*to_dense"),
    "meta": (lambda: torch.zeros(3, device="meta"), r"device meta.*Remote.spec"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8),
        r"quantised tensor.*dequantize|dtype quint8",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        r"nested tensor.*unbind",
    ),
    "opaque": (lambda: torch.zeros(3).to_mkldnn(), r"layout _mkldnn.*to_dense"),
    "uninitialised": (lambda: torch.nn.LazyLinear(3).weight, r"uninitialised parameter.*example"),
    "half complex": (lambda: torch.zeros(2, dtype=torch.complex32), r"complex32.*Convert it"),
    "tf sparse": (lambda: tf.sparse.from_dense(tf.eye(3)), r"tf.SparseTensor: use tf.sparse.to_dense"),
    "tf ragged": (lambda: tf.ragged.constant([[1], [2, 3]]), r"tf.RaggedTensor: use .to_tensor"),
    "tf string": (lambda: tf.constant("a"), r"dtype string: convert"),
    "tf quantised": (lambda: tf.quantization.quantize([1.0], 0.0, 1.0, tf.qint8)[0], r"dtype qint8: convert"),
    "key": (lambda: jax.random.key(0), r"PRNG key array.*key_data"),
    "object": (lambda: np.array([None, 1]), r"dtype object.*Python objects"),
    "string": (lambda: np.array(["a"]), r"dtype <U1.*list"),
    "datetime": (lambda: np.array(["2020-01-01"], "M8[D]"), r"datetime64\[D\].*int64"),
    "structured": (lambda: np.zeros(2, [("a", "f4")]), r"structured:.*dict of arrays"),
    "record": (lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), r"structured:.*dict"),
    "long double": (lambda: np.zeros(2, np.longdouble), r"float128.*astype\('float64'\)"),
    "masked": (lambda: np.ma.masked_array([1, 2], [0, 1]), r"masked array.*filled"),
    "int4 of numpy": (lambda: np.zeros(2, ml_dtypes.int4), r"int4.*Convert it to one of bool, int8"),
    "int4 of JAX": (lambda: jnp.zeros(2, jnp.int4), r"int4.*astype"),
    "uint4 of torch": (lambda: torch.empty(2, dtype=torch.uint4), r"uint4.*Convert it to one of"),
    "int4 of TensorFlow": (
        lambda: tf.cast(np.ones(2, np.int8), tf.dtypes.experimental.int4),
        r"int4: convert",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_r18_r19_refused_by_name(worker_of: Workers, kind: str) -> None:
    """The argument, what it is, and what to do, before a byte is sent; the worker never hears of it."""
    make, says = REFUSED[kind]
    remote = worker_of("numpy").function("elements:pair")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of them are deprecated, or young
        x = make()
    calls = worker_of("numpy").stats()["calls"]
    for call in (remote, remote.vjp):
        with pytest.raises(gw.UnsupportedTensorError, match=rf"args\[1\]\['w'\]\[0\]: .*{says}"):
            call(np.ones(3, np.float32), {"w": [x]})
    assert worker_of("numpy").stats()["calls"] == calls


def test_r18_a_result_that_cannot_be_sent_is_refused_by_name(worker_of: Workers) -> None:
    make = worker_of("torch").function("in_torch:not_plain")
    for kind, says in {"sparse": "to_dense", "meta": "no values", "conjugate": ""}.items():
        if says:
            with pytest.raises(gw.UnsupportedTensorError, match=says):
                make(kind)
        else:
            np.testing.assert_array_equal(make(kind), np.array([1 - 2j, 3 + 4j], np.complex64))
    with pytest.raises(gw.UnsupportedTensorError, match=r"dtype object"):
        worker_of("numpy").function("in_numpy:objects")()


# ---- R19: extremes ---------------------------------------------------------------------------------------------------


@every_pair
def test_r19_the_extremes_of_every_integer(worker_of: Workers, family: str, framework: str) -> None:
    names = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    arrays = {
        name: np.array([np.iinfo(name).min, np.iinfo(name).max, np.iinfo(name).max // 2 + 1, 1], name)
        for name in names
    }
    assert_crosses(worker_of(framework).function("any_framework:identity"), family, arrays)
    found = remote_of(worker_of, framework, "elements:tree_elements")(arrays)
    assert found == [[repr(int(i)) for i in x] for x in arrays.values()]


# ---- R20: Python scalars ---------------------------------------------------------------------------------------------

SCALARS = [2.0, 3, True, None, "mean", 10**20, -(2**63) - 1, 2**64 - 1, -0.0, float("inf"), 1 + 2j, b"bytes"]
SCALARS += [np.float32(2), np.int64(3), np.uint64(2**63), np.float16(0.5), np.bool_(True)]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@every_worker
def test_r20_scalars_stay_scalars_and_promote_nothing(worker_of: Workers, framework: str) -> None:
    """What the function makes of them is what its framework makes of them in one process."""
    remote = remote_of(worker_of, framework, "elements:with_scalar")
    seen = remote_of(worker_of, framework, "elements:seen")
    for name in ("bfloat16", "float16", "float32", "int8"):
        x = np.arange(4).astype(numpy_dtype(name))
        for scalar in SCALARS:
            assert seen(x, scalar) == in_process.seen(x, scalar)
            try:
                with wide(framework):
                    expected = in_process.with_scalar(as_family(framework, x), scalar)
            except (TypeError, ValueError):  # TensorFlow multiplies no bfloat16 by True
                with pytest.raises(gw.RemoteError):
                    remote(x, scalar)
                continue
            if dtype_name(expected) == "complex32":  # float16 with a complex number, in torch
                with pytest.raises(gw.UnsupportedTensorError, match="complex32"):
                    remote(x, scalar)
                continue
            assert remote(x, scalar).dtype.name == dtype_name(expected), (name, scalar)


def dtype_name(x: Any) -> str:
    return x.dtype.name if hasattr(x.dtype, "name") else str(x.dtype).removeprefix("torch.")


@pytest.mark.parametrize("family", CALLERS)
def test_r20_scalars_from_every_caller(worker_of: Workers, family: str) -> None:
    """bfloat16 with a Python scalar is bfloat16 in torch, whoever calls; and no scalar becomes a tensor."""
    remote = worker_of("torch").function("elements:with_scalar")
    seen = worker_of("torch").function("elements:seen")
    x = as_family(family, np.arange(4).astype(ml_dtypes.bfloat16))
    for scalar in (2.0, 3, True, None, "mean", 10**20):
        assert_same_bits(family, remote(x, scalar), expected_of(scalar))
        assert_same_bits(family, remote(x, scalar=scalar), expected_of(scalar))
        assert seen(x, scalar) == ["builtins", type(scalar).__name__, repr(scalar)]


def expected_of(scalar: Any) -> np.ndarray:
    factor = scalar if isinstance(scalar, (bool, int, float)) and scalar < 1000 else 1
    return (np.arange(4) * float(factor)).astype(ml_dtypes.bfloat16)


def test_r20_scalars_under_jit(worker_of: Workers) -> None:
    remote = worker_of("torch").function("elements:with_scalar")
    x = jnp.arange(4, dtype=jnp.bfloat16)
    for scalar in (2.0, 3, True, None, "mean", 10**20):
        result = jax.jit(lambda x, s=scalar: remote(x, s))(x)
        assert_same_bits("jax", result, expected_of(scalar))
    weak = jax.jit(lambda x: remote(x * 2.0, 1))(x)
    assert weak.dtype == jnp.bfloat16 and not weak.weak_type


# ---- Of the same kinds ------------------------------------------------------------------------------------------------


class Plain(np.ndarray):
    """A subclass without arithmetic of its own."""


@every_worker
def test_numpy_arrays_of_every_origin(worker_of: Workers, framework: str, tmp_path: Path) -> None:
    values = np.arange(3000, dtype=np.float32).reshape(50, 60)
    written = np.memmap(tmp_path / "values", np.float32, "w+", shape=(50, 60))
    written[...] = values
    written.flush()
    record = np.frombuffer(bytes(range(240)) * 18, [("a", "i1"), ("b", "<f4")])
    sent = {
        "memmap": written,
        "read-only memmap": np.memmap(tmp_path / "values", np.float32, "r", shape=(50, 60)),
        "memmap of a row": written[3],
        "subclass": values.view(Plain),
        "big-endian": values.astype(">f8"),
        "big-endian complex": (values + 1j * values).astype(">c16"),
        "big-endian, one": np.array(1.5, ">f4"),
        "big-endian, strided": values.astype(">i2")[::-2, ::3].T,
        "field of a record, unaligned": record["b"],
        "bytes": np.frombuffer(b"abcdefgh" * 3, np.float64),
        "real part": (values + 1j * values).real,
        "imaginary part": (values - 1j * values).imag,
    }
    results = worker_of(framework).function("any_framework:identity")(sent)
    for name, x in sent.items():
        assert type(results[name]) is np.ndarray
        assert_same_bits("numpy", results[name], np.asarray(x))


def test_jax_arrays_of_every_origin(worker_of: Workers) -> None:
    identity = worker_of("torch").function("any_framework:identity")
    x = jnp.arange(50_000.0)
    expected = np.arange(50_000, dtype=np.float32)
    assert_same_bits("jax", identity(jax.device_put(x, jax.devices()[0])), expected)
    results = [identity(x) for _ in range(3)]
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    for result in results:  # a donated result is written over: nobody else may have it
        np.testing.assert_array_equal(np.asarray(bump(result)), expected + 1)
    sent = jnp.arange(50_000.0)
    result = identity(sent)
    bumped = bump(sent)
    assert_same_bits("jax", result, expected)
    np.testing.assert_array_equal(np.asarray(bumped), expected + 1)
    with pytest.raises(RuntimeError, match="deleted"):
        identity(sent)


@every_worker
def test_tensorflow_variables_and_slices(worker_of: Workers, framework: str) -> None:
    identity = worker_of(framework).function("any_framework:identity")
    for name in ("float32", "bfloat16", "int64", "float64"):
        values = np.arange(3000).astype(numpy_dtype(name))
        variable = tf.Variable(values)
        result = identity(variable)
        variable.assign(variable * 0)
        assert_same_bits("tensorflow", result, values)
    slices = tf.IndexedSlices(tf.constant([[1.0, 2], [3, 4]]), tf.constant([0, 0]), tf.constant([3, 2]))
    assert_same_bits("tensorflow", identity(slices), np.array([[4, 6], [0, 0], [0, 0]], np.float32))


def test_tensorflow_graphs_keep_every_dtype(worker_of: Workers) -> None:
    identity = worker_of("torch").function("any_framework:identity")
    traced = tf.function(lambda x: identity(x))
    for name in DTYPES:
        if has("tensorflow", name) and has("torch", name):
            for shape in [(), (0, 3), (4, 8), (40, 50)]:
                x = patterned(name, shape)
                assert_same_bits("tensorflow", traced(as_family("tensorflow", x)), x)


def test_jax_programs_keep_every_dtype(worker_of: Workers) -> None:
    identity = worker_of("torch").function("any_framework:identity")
    names = [name for name in DTYPES if has("jax", name) and has("torch", name)]
    arrays = {f"{name}{shape}": patterned(name, shape) for name in names for shape in [(), (0, 3), (40, 50)]}
    with jax.enable_x64(True):
        results = jax.jit(identity)({key: jax.device_put(x) for key, x in arrays.items()})
    for key, x in arrays.items():
        assert_same_bits("jax", results[key], x)


def test_a_view_of_an_expanded_tensor_has_its_own_elements_in_the_worker(worker_of: Workers) -> None:
    """User code may write to what it was given, element by element, even where the caller's was one row."""
    write = worker_of("torch").function("in_torch:number_in_place")
    for n in (4, 4000):
        x = torch.zeros(n).expand(3, n)
        result = write(x)
        assert torch.equal(result, torch.arange(3.0 * n).reshape(3, n))
        assert torch.equal(x, torch.zeros(3, n))
    y = np.broadcast_to(np.float32(0), (40, 50))
    for framework in ("torch", "numpy"):
        result = worker_of(framework).function(f"in_{framework}:number_in_place")(y)
        np.testing.assert_array_equal(result, np.arange(2000, dtype=np.float32).reshape(40, 50))


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_r17_a_cotangent_is_never_narrowed(worker_of: Workers, framework: str) -> None:
    """An array must have the result's dtype; a scalar may be Python's, but not complex for a real result."""
    _, pullback = worker_of(framework).function("elements:weighted").vjp(np.arange(3, dtype=np.float32))
    for fits in (1, 1.0, np.float32(1), np.ones((), ">f4"), jnp.float32(1), torch.ones(())):
        assert_same_bits("numpy", pullback(fits)[0], np.array([2, 3, 0], np.float32))
    for wide_, says in [
        (1 + 2j, "complex"),
        (np.complex64(1), "complex"),
        (np.ones(()), "float64"),
        (np.float64(0.1), "float64"),
    ]:
        with pytest.raises(gw.DtypeError, match=rf"the cotangent of result must be float32 .*{says}"):
            pullback(wide_)


def test_one_argument_written_leaves_its_twin(worker_of: Workers, shared_bridge: gw.Bridge) -> None:
    """The same memory as two arguments is two tensors in the worker: small, copied, and passed by reference."""
    add = worker_of("torch").function("elements:add_in_place_to_first")
    large = np.arange(100_000, dtype=np.float32)
    lent = shared_bridge.empty(large.shape, large.dtype)
    lent[...] = large
    returned = worker_of("numpy").function("any_framework:identity")(large)
    for x in (large[:5], large, lent, returned):
        first, second = add(x, x)
        np.testing.assert_array_equal(first, np.arange(len(x), dtype=np.float32) + 1)
        np.testing.assert_array_equal(second, np.arange(len(x), dtype=np.float32))
        np.testing.assert_array_equal(x, np.arange(len(x), dtype=np.float32))


def test_a_remote_error_keeps_no_tensor_of_its_caller(worker_of: Workers, shared_bridge: gw.Bridge) -> None:
    """`last_error` outlives the call; the frames that the error passed, and their tensors, must not."""

    def fail() -> weakref.ref[np.ndarray]:
        result = worker_of("numpy").function("any_framework:identity")(np.zeros(100_000))
        try:
            worker_of("numpy").function("any_framework:bad")(result)
        except ValueError as error:
            assert "bad 42" in str(error)
        return weakref.ref(result)

    result = fail()
    gc.collect()
    assert result() is None
    assert "bad 42" in str(shared_bridge.last_error())
    assert isinstance(shared_bridge.last_error(), ValueError)
