"""The TensorFlow worker's program against TensorFlow itself, eager and in this process.

The oracle of a word is not what the worker does: forward-mode accumulators for J, loops for V, eager tapes for T.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradwire_wire.carriers import Aval
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import ResidualLostError, UnsupportedTensorError, UsageError
from gradwire_wire.structures import fill, flatten, positional
from gradwire_workers import tensorflow as engine
from gradwire_workers.program import WorkerSite
from gradwire_workers.tensorflow.residuals import Replayed, Taped

COMPILE = [None, False, True]
T, J = "T", "J"


def site_of(*args: Any, compile: bool | None = None, **options: Any) -> WorkerSite:
    """The site of a call with these arguments; strings that start with ``@`` stand for operands."""
    return WorkerSite(positional(len(args)), compile=compile, **options)


def tree_site(args: Sequence[Any], kwargs: dict[str, Any], **options: Any) -> tuple[WorkerSite, list[Any]]:
    structure, leaves = flatten([list(args), kwargs], tf.is_tensor)
    return WorkerSite(structure, **options), leaves


def random(*shape: int, dtype: Any = tf.float64, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).normal(size=shape)
    if tf.as_dtype(dtype).is_complex:
        values = values + 1j * np.random.default_rng(seed + 1).normal(size=shape)
    return tf.constant(values, dtype)


def close(found: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=tolerance, atol=tolerance)


def same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert [a.dtype for a in found] == [b.dtype for b in expected]
    assert all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module", autouse=True)
def prepared() -> Iterator[None]:
    engine.prepare(None, None, None)
    yield
    switches = ("constant_folding", "arithmetic_optimization", "remapping")
    tf.config.optimizer.set_experimental_options(dict.fromkeys(switches, True))


@pytest.fixture(autouse=True)
def no_global_seed() -> Iterator[None]:
    """`keras.utils.set_random_seed` sets TensorFlow's global seed too, under which traces draw the same numbers."""
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


def test_the_comparisons_can_fail() -> None:
    for compare in (close, same):
        with pytest.raises(AssertionError):
            compare([tf.constant(1.0)], [tf.constant(1.001)])
    with pytest.raises(AssertionError):
        close([None], [tf.constant(0.0)])


# ---- The oracle ------------------------------------------------------------------------------------------------------


def inexact(x: Any) -> bool:
    return x.dtype.is_floating or x.dtype.is_complex


def oracle(function: Callable[..., Sequence[Any]], word: tuple[Any, ...]) -> Callable[..., list[Any]]:
    if not word:
        return lambda *xs: [tf.convert_to_tensor(y) for y in function(*xs)]
    inner, op = oracle(function, word[:-1]), word[-1]

    def transposed(*operands: Any) -> list[Any]:
        at = len(operands) - op[2]
        with tf.GradientTape() as tape:
            tape.watch([operands[i] for i in op[1]])
            ys = [y for y in inner(*operands[:at]) if inexact(y)]
        found = tape.gradient(ys, [operands[i] for i in op[1]], output_gradients=operands[at:])
        found = [None if g is None else tf.convert_to_tensor(g) for g in found]
        return [tf.zeros_like(operands[i]) if g is None else g for i, g in zip(op[1], found, strict=True)]

    def tangent(*operands: Any) -> list[Any]:
        at = len(operands) - len(op[1])
        with tf.autodiff.ForwardAccumulator([operands[i] for i in op[1]], list(operands[at:])) as forward:
            ys = [y for y in inner(*operands[:at]) if inexact(y)]
        found = [forward.jvp(y, unconnected_gradients=tf.UnconnectedGradients.ZERO) for y in ys]
        return [tf.convert_to_tensor(t) for t in found]

    def batch(*operands: Any) -> list[Any]:
        size = next(x.shape[0] for x, m in zip(operands, op[1], strict=True) if m)
        rows = [inner(*[x[i] if m else x for x, m in zip(operands, op[1], strict=True)]) for i in range(size)]
        return [tf.stack(ys) for ys in zip(*rows, strict=True)]

    return {"T": transposed, "J": tangent, "V": batch}[op[0]]


class Case(NamedTuple):
    function: Callable[..., Any]
    operands: list[Any]
    results: int  # inexact ones


def two_results(x: Any, w: Any) -> Any:
    return tf.tanh(tf.linalg.matvec(w, x)) * tf.reduce_sum(x), tf.reduce_sum(x**3)


def gathered(w: Any, index: Any) -> Any:
    return tf.reduce_sum(tf.gather(w, index) ** 2), index * 2, tf.gather(w, index)


def complex_square(z: Any, x: Any) -> Any:
    return z**2 * tf.cast(x, z.dtype), tf.math.real(z * tf.math.conj(z))


@pytest.mark.slow
def test_loops() -> None:
    """Their gradients rewrite them, so that they are computed once more; few words, for they take long to trace."""
    operands = [random(4), random(4, 4, seed=1)]
    program, site, ct = engine.program(looped, is_module=False), site_of(1, 2), random(4, seed=2)
    t, j = (T, (0, 1), 1), (J, (1,))
    _, residual = program.keep(site, (), operands)
    assert isinstance(residual, Replayed)
    found, second = residual.derive(t, [ct], keep=True, accumulate=False)
    close(found, oracle(looped, (t,))(*operands, ct))
    tangents, _ = residual.derive(j, [operands[1]], keep=False, accumulate=False)
    close(tangents, oracle(looped, (j,))(*operands, operands[1]))
    last = ((T, (0,), 2), [ct, operands[1]])
    found, _ = second.derive(*last, keep=False, accumulate=False)
    close(found, oracle(looped, (t, last[0]))(*operands, ct, *last[1]))
    batch = (("V", (True, False)),)
    rows = [random(3, 4), operands[1]]
    close(program.run(site, batch, rows).tensors, oracle(looped, batch)(*rows))


def looped(x: Any, w: Any) -> Any:
    _, x = tf.while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, tf.sin(tf.linalg.matvec(w, x))), (tf.constant(0), x)
    )
    return (x,)


CASES = {
    "two results": Case(two_results, [random(4), random(4, 4, seed=1)], 2),
    "gather": Case(gathered, [random(4), tf.constant([0, 2, 2])], 2),
    "complex": Case(complex_square, [random(3, dtype=tf.complex128), random(3)], 2),
    "unused": Case(lambda a, b: (2.0 * a,), [random(3), random(3)], 1),
    "operand returned": Case(lambda a, b: (a, a, b * 3.0), [random(3), random(3)], 3),
}


def words_of(case: Case) -> dict[str, tuple[tuple[Any, ...], list[Any]]]:
    """Words with operands for them."""
    xs = case.operands
    wrt = tuple(i for i, x in enumerate(xs) if inexact(x))
    ys = [tf.convert_to_tensor(y) for y in case.function(*xs)]
    cts = [random(*y.shape, dtype=y.dtype, seed=9) for y in ys if inexact(y)]
    ts = [random(*xs[i].shape, dtype=xs[i].dtype, seed=8) for i in wrt]
    t, j = (T, wrt, len(cts)), (J, wrt)
    last = (T, (len(xs), *wrt[:1]), len(wrt))  # with respect to a cotangent and an operand
    axes = tuple(i == wrt[0] for i in range(len(xs)))
    rows = [tf.stack([x, 2 * x, 3 * x]) if m else x for x, m in zip(xs, axes, strict=True)]
    every = (True,) * len(cts)
    return {
        "forward": ((), xs),
        "T": ((t,), [*xs, *cts]),
        "J": ((j,), [*xs, *ts]),
        "TT": ((t, last), [*xs, *cts, *ts]),
        "TJ": ((t, (J, wrt)), [*xs, *cts, *ts]),
        "JT": ((j, (T, wrt, len(cts))), [*xs, *ts, *cts]),
        "V": ((("V", axes),), rows),
        "TV": ((t, ("V", (*axes, *every))), [*rows, *(tf.stack([c, c, -c]) for c in cts)]),
        "VT": ((("V", axes), t), [*rows, *(tf.stack([c, c, -c]) for c in cts)]),
        "JV": ((j, ("V", (*axes, *(False,) * len(wrt)))), [*rows, *ts]),
    }


WORDS = list(words_of(CASES["two results"]))
HOW = [*((case, None) for case in CASES), ("two results", False), ("unused", False)]


def filled(word: tuple[Any, ...], operands: Sequence[Any], found: Sequence[Any]) -> list[Any]:
    """Unused operands have None at the outside of a pullback, where the oracle has zeros."""
    if not word or word[-1][0] != T:
        return list(found)
    return [tf.zeros_like(operands[i]) if g is None else g for i, g in zip(word[-1][1], found, strict=True)]


# ---- Words -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize(("case", "compile"), HOW)
def test_R31_R32_R33_R37_every_word(case: str, name: str, compile: bool | None) -> None:
    word, operands = words_of(CASES[case])[name]
    program = engine.program(CASES[case].function, is_module=False)
    site = site_of(*CASES[case].operands, compile=compile)
    expected = oracle(CASES[case].function, word)(*operands)
    close(filled(word, operands, program.run(site, word, operands).tensors), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TT", "TJ", "JT", "VT"])  # the others are their beginnings; rows: below
@pytest.mark.parametrize(("case", "compile"), HOW)
def test_R37_every_word_from_kept_forwards_any_number_of_times(
    case: str, name: str, compile: bool | None
) -> None:
    word, operands = words_of(CASES[case])[name]
    program = engine.program(CASES[case].function, is_module=False)
    site = site_of(*CASES[case].operands, compile=compile)
    start = 1 if word[0][0] == "V" else 0
    counts = [len(operands)]
    for op in word[:0:-1]:
        counts.append(counts[-1] - (len(op[1]) if op[0] == J else op[2] if op[0] == T else 0))
    ends = counts[::-1]  # operands of word[: i + 1]
    first = ends[0] - (0 if start else (len(word[0][1]) if word[0][0] == J else word[0][2]))
    result, residual = program.keep(site, word[:start], operands[:first])
    close(result.tensors, oracle(CASES[case].function, word[:start])(*operands[:first]))
    assert isinstance(residual, Taped if compile is False else (Replayed, Taped)) and residual.nbytes > 0
    at = first
    for i, op in enumerate(word[start:], start):
        linear = operands[at : ends[i]]
        at = ends[i]
        expected = oracle(CASES[case].function, word[: i + 1])(*operands[:at])
        again, _ = residual.derive(op, linear, keep=False, accumulate=False)
        found, residual_or_none = residual.derive(op, linear, keep=True, accumulate=False)
        assert residual_or_none is not None
        residual = residual_or_none
        close(filled(word[: i + 1], operands, found), expected)
        close(found, again, 0)


def test_R33_unused_operands_have_no_gradient() -> None:
    program = engine.program(lambda a, b, n: (2.0 * a, tf.stop_gradient(b)), is_module=False)
    operands = [random(3), random(3), tf.constant(3)]
    site = site_of(*operands)
    _, residual = program.keep(site, (), operands)
    pullback = ((T, (0, 1), 2), [random(3), random(3)])
    for found in (
        residual.derive(*pullback, keep=False, accumulate=False)[0],
        program.run(site, (pullback[0],), [*operands, *pullback[1]]).tensors,
    ):
        assert found[0] is not None and found[1] is None
    close(
        residual.derive((J, (1,)), [random(3)], keep=False, accumulate=False)[0],
        [tf.zeros(3, tf.float64)] * 2,
    )


def test_results_without_derivatives() -> None:
    program = engine.program(lambda x: {"n": tf.size(x), "s": "text", "none": None}, is_module=False)
    result, residual = program.keep(site_of(1), (), [random(3)])
    assert fill(result.structure, [r.numpy() for r in result.tensors]) == {"n": 3, "s": "text", "none": None}
    assert residual.derive((T, (0,), 0), [], keep=False, accumulate=False)[0] == [None]
    assert residual.derive((J, (0,)), [random(3)], keep=False, accumulate=False)[0] == []


def test_the_same_tensor_twice_has_two_gradients() -> None:
    x = random(3)
    for compile in (None, False):
        program, site = (
            engine.program(lambda a, b: a * a * b, is_module=False),
            site_of(1, 2, compile=compile),
        )
        _, residual = program.keep(site, (), [x, x])
        op, ct = (T, (0, 1), 1), [tf.ones(3, tf.float64)]
        close(residual.derive(op, ct, keep=False, accumulate=False)[0], [2 * x * x, x * x])
        close(program.run(site, (op,), [x, x, *ct]).tensors, [2 * x * x, x * x])


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("random_numbers", [False, True])
@pytest.mark.parametrize("compile", [None, False])
def test_R34_rows_of_a_kept_batch(size: int, random_numbers: bool, compile: bool | None) -> None:
    def f(x: Any, w: Any) -> Any:
        mask = tf.random.uniform((4,), dtype=tf.float64) if random_numbers else tf.ones(4, tf.float64)
        return mask * tf.tanh(tf.linalg.matvec(w, x)) * tf.reduce_sum(x)

    if size == 0 and compile is False:
        pytest.skip("eagerly, an empty batch has no shape")
    program, site = engine.program(f, is_module=False), site_of(1, 2, compile=compile)
    x, w = random(size, 4), random(4, 4, seed=1)
    result, residual = program.keep_rows(site, (("V", (True, False)),), [x, w])
    y, op, axes = result.tensors[0], (T, (0, 1), 1), (True, False, False)
    assert y.shape == (size, 4)
    ct = random(4, seed=5)
    found = residual.derive_rows(op, axes, [ct], np.arange(size))
    masks = [y[i] / (tf.tanh(tf.linalg.matvec(w, x[i])) * tf.reduce_sum(x[i])) for i in range(size)]
    rows = [
        oracle(lambda a, b, m=m: [m * tf.tanh(tf.linalg.matvec(b, a)) * tf.reduce_sum(a)], (op,))(x[i], w, ct)
        for i, m in enumerate(masks)
    ]
    empty = [tf.zeros((0, 4), tf.float64), tf.zeros((0, 4, 4), tf.float64)]
    close(found, [tf.stack(gs) for gs in zip(*rows, strict=True)] if size else empty, 1e-9)
    tangents = residual.derive_rows((J, (1,)), (True, False, True), [random(size, 4, 4)], np.arange(size))
    assert tangents[0].shape == (size, 4)
    if size:
        cts, d = random(size, 4, seed=6), random(4, 4, seed=7)
        whole, _ = residual.derive(
            (T, (0, 1), 1), [cts], keep=False, accumulate=False
        )  # with one w for all rows
        each = residual.derive_rows((T, (0, 1), 1), (True, False, True), [cts], np.arange(size))
        close(whole, [each[0], tf.reduce_sum(each[1], 0)], 1e-9)
        whole, _ = residual.derive((J, (1,)), [d], keep=False, accumulate=False)
        close(whole, residual.derive_rows((J, (1,)), (True, False, False), [d], np.arange(size)), 1e-9)
    if size > 1:
        assert residual.derive_rows(op, axes, [ct], np.arange(size)[::-1]) is None


BITS: dict[str, Callable[[Any], Any]] = {
    "scalars": lambda x: x * 2.0 / 3.0 * 0.1 * 7.0 + 1.0 - 0.3 + 0.1,
    "powers": lambda x: [x**3, x**2, tf.abs(x) ** 0.5, x + x * 2.0 + x * 3.0 + tf.exp(x)],
    "convolution": keras.Sequential([keras.Input((17, 19, 5)), keras.layers.Conv2D(7, 3, activation="elu")]),
}


@pytest.mark.parametrize("kind", BITS)
def test_a_traced_call_gives_the_bits_of_an_eager_one(kind: str) -> None:
    x = random(3, 17, 19, 5, dtype=tf.float32)
    program = engine.program(BITS[kind], is_module=False)
    same(program.run(site_of(1, compile=True), (), [x]).tensors, tf.nest.flatten(BITS[kind](x)))
    result, residual = program.keep(site_of(1, compile=True), (), [x])
    assert isinstance(residual, Replayed)
    same(result.tensors, tf.nest.flatten(BITS[kind](x)))


# ---- What user functions are like ------------------------------------------------------------------------------------


def branches(x: Any) -> Any:
    if tf.reduce_sum(x) > 0:
        return x * 2.0
    return -x


def test_control_flow_over_values_is_traced() -> None:
    program, site = engine.program(branches, is_module=False), site_of(1, compile=True)
    for x in (tf.ones(3), -tf.ones(3)):
        same(program.run(site, (), [x]).tensors, [branches(x)])
        _, residual = program.keep(site, (), [x])
        found, _ = residual.derive((T, (0,), 1), [tf.ones(3)], keep=False, accumulate=False)
        same(found, [tf.fill(3, 2.0 if float(x[0]) > 0 else -1.0)])
    assert program.spec(site, [Aval((3,), BY_NAME["float32"])])[0] == [Aval((3,), BY_NAME["float32"])]


def test_what_cannot_be_traced_runs_eagerly_unless_told_otherwise() -> None:
    calls = []

    def looks_at_values(x: Any) -> Any:
        calls.append(1)
        return x * np.float32(x.numpy().sum())

    program, x = engine.program(looks_at_values, is_module=False), tf.constant([1.0, 2.0])
    for n in range(3):
        same(program.run(site_of(1), (), [x]).tensors, [x * 3.0])
        assert len(calls) == n + 2  # the first was the attempt to trace
    _, residual = program.keep(site_of(1), (), [x])
    same(residual.derive((T, (0,), 1), [x], keep=False, accumulate=False)[0], [x * 3.0])
    assert isinstance(residual, Taped)
    with pytest.raises(AttributeError, match="numpy"):
        program.run(site_of(1, compile=True), (), [x])
    with pytest.raises(UsageError, match="out_spec"):
        program.spec(site_of(1), [Aval((2,), BY_NAME["float32"])])


def test_numpy_results_are_tensors_and_what_the_function_keeps_is_its_own() -> None:
    kept = np.arange(100_000.0)

    def f(x: Any) -> Any:
        return {"y": x + 1.0, "n": kept, "k": 3}

    program = engine.program(f, is_module=False)
    for compile in COMPILE:
        result = program.run(site_of(1, compile=compile), (), [tf.ones(2)])
        expected = kept.copy()
        tree = fill(result.structure, result.tensors)
        kept += 1 if compile is not False else 0
        assert tree["k"] == 3 and tree["n"].numpy().tobytes() == expected.tobytes()
        again = program.run(site_of(1, compile=compile), (), [tf.ones(2)])
        assert (
            compile is False
            or fill(again.structure, again.tensors)["n"].numpy().tobytes() == expected.tobytes()
        )


def test_R20_R38_trees_keywords_and_scalars() -> None:
    def f(x: Any, *, scale: float, mode: str, mask: Any = None) -> Any:
        assert type(scale) is float and mask is None
        return {"y": x["a"][0] * scale, "aux": (x["b"], None, mode, 3)}

    x = {"a": [tf.constant([1.0], tf.bfloat16)], "b": tf.constant([True])}
    site, leaves = tree_site([x], {"scale": 2.0, "mode": "s", "mask": None})
    result = engine.program(f, is_module=False).run(site, (), leaves)
    tree = fill(result.structure, result.tensors)
    assert tree["y"].dtype == tf.bfloat16 and float(tree["y"][0]) == 2.0
    assert bool(tree["aux"][0][0]) and tree["aux"][1:] == (None, "s", 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.sparse.from_dense([[1.0]]),
        lambda: tf.ragged.constant([[1.0], []]),
        lambda: tf.constant("s"),
    ],
)
def test_results_that_are_no_plain_tensors_are_refused(make: Callable[[], Any]) -> None:
    program = engine.program(lambda x: make(), is_module=False)
    with pytest.raises(UnsupportedTensorError):
        program.spec(site_of(1), [Aval((), BY_NAME["float32"])])
    with pytest.raises(UnsupportedTensorError):
        for y in program.run(site_of(1), (), [tf.constant(1.0)]).tensors:
            engine.export(y)


def raises(x: Any) -> Any:
    raise ValueError("bad 42")


@pytest.mark.parametrize("compile", COMPILE)
def test_R36_errors_of_the_target_are_its_own(compile: bool | None) -> None:
    program = engine.program(raises, is_module=False)
    for act in (
        lambda: program.run(site_of(1, compile=compile), (), [tf.constant(1.0)]),
        lambda: program.keep(site_of(1, compile=compile), (), [tf.constant(1.0)]),
        lambda: program.spec(site_of(1, compile=compile), [Aval((), BY_NAME["float32"])]),
    ):
        with pytest.raises(ValueError, match=r"^bad 42$") as caught:
            act()
        assert caught.traceback[-1].path.name == "test_tensorflow_worker.py"


def test_R36_an_error_in_the_pullback_is_told_when_it_is_asked_for() -> None:
    @tf.custom_gradient
    def no_gradient(x: Any) -> Any:
        def grad(ct: Any) -> Any:
            raise ValueError("bad 43")

        return x * 2.0, grad

    program = engine.program(no_gradient, is_module=False)
    _, residual = program.keep(site_of(1), (), [tf.constant(1.0)])
    with pytest.raises(ValueError, match="bad 43"):
        residual.derive((T, (0,), 1), [tf.constant(1.0)], keep=False, accumulate=False)


def test_R35_shapes_that_depend_on_values() -> None:
    program, x = (
        engine.program(lambda x: tf.where(x > 0)[:, 0], is_module=False),
        tf.constant([1.0, -1.0, 2.0]),
    )
    assert program.run(site_of(1), (), [x]).tensors[0].numpy().tolist() == [0, 2]
    assert program.run(site_of(1), (), [-x]).tensors[0].numpy().tolist() == [1]
    with pytest.raises(UsageError, match="out_spec"):
        program.spec(site_of(1), [Aval((3,), BY_NAME["float32"])])


def test_spec_runs_nothing() -> None:
    variable, seen = tf.Variable(0.0), []

    def f(x: Any, n: int) -> Any:
        variable.assign_add(1.0)
        tf.py_function(lambda: seen.append(1), [], [])
        return {"y": tf.cast(tf.reshape(x, (n, -1)), tf.bfloat16), "i": tf.argmax(x)}

    site, _ = tree_site([tf.ones(6), 2], {})
    avals, structure = engine.program(f, is_module=False).spec(site, [Aval((6,), BY_NAME["float64"])])
    assert avals == [Aval((2, 3), BY_NAME["bfloat16"]), Aval((), BY_NAME["int64"])]
    assert fill(structure, [1, 2]) == {"y": 1, "i": 2}
    assert float(variable) == 0.0 and not seen


def lazy() -> Callable[[Any], Any]:
    """A function that loads its model, all of whose weights are 1, when it is first called."""
    loaded: list[Any] = []

    def target(x: Any) -> Any:
        if not loaded:
            net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            net.set_weights([np.ones((3, 2)), np.ones(2)])
            loaded.append(net)
        return loaded[0](x)

    return target


@pytest.mark.parametrize("first", ["run", "keep", "spec", "pull", "rows", "compiled"])
def test_a_model_that_is_loaded_at_the_first_call_has_its_weights(first: str) -> None:
    """Where that call is traced, giving it the weights would be an operation of a graph that never runs."""
    program = engine.program(lazy(), is_module=False)
    x, y_bar, site = tf.ones((4, 3)), tf.ones((4, 2)), site_of(1)
    if first == "run":
        close(program.run(site, (), [x])[0], [tf.fill((4, 2), 4.0)])
    elif first == "keep":
        result, kept = program.keep(site, (), [x])
        close(result[0], [tf.fill((4, 2), 4.0)])
        close(
            kept.derive(("T", (0,), 1), [y_bar], keep=False, accumulate=False)[0],
            [tf.fill((4, 3), 2.0)],
        )
    elif first == "spec":
        assert program.spec(site, [Aval((5, 3), BY_NAME["float32"])])[0][0].shape == (5, 2)
    elif first == "pull":
        close(program.run(site, (("T", (0,), 1),), [x, y_bar])[0], [tf.fill((4, 3), 2.0)])
    elif first == "rows":
        found = program.run(site, (("V", (True,)),), [x[:, None]])[0]
        close(found, [tf.fill((4, 1, 2), 4.0)])
    else:
        close(program.run(site_of(1, compile=True), (), [x])[0], [tf.fill((4, 2), 4.0)])
    for rows in (4, 2):
        close(program.run(site, (), [x[:rows]])[0], [tf.fill((rows, 2), 4.0)])


class Assigning(keras.layers.Layer):
    """Its build() gives its weights their values."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 2), initializer="zeros")
        self.kernel.assign(np.ones((shape[-1], 2)))

    def call(self, x: Any) -> Any:
        return x @ self.kernel


class Unlisted(Assigning):
    """As a model of Keras 2 before its first call."""

    @property
    def weights(self) -> list[Any]:
        if not self.built:
            raise ValueError("weights have not yet been created")
        return [self.kernel]


class Holding(tf.Module):
    """A module that is no layer, and has one, or makes variables itself, when it is called first."""

    def __init__(self, layer: Any = None) -> None:
        super().__init__()
        self.layer, self.kernel = layer, None

    def __call__(self, x: Any) -> Any:
        if self.layer is not None:
            return self.layer(x)
        if self.kernel is None:
            self.kernel = tf.Variable(tf.zeros((3, 2)))
            self.kernel.assign(tf.ones((3, 2)))
        return x @ self.kernel


UNBUILT: dict[str, Callable[[], Any]] = {
    "layer": Assigning,
    "of Keras 2": Unlisted,
    "of Keras 2 in a tf.Module": lambda: Holding(Unlisted()),
    "layer in a tf.Module": lambda: Holding(Assigning()),
    "tf.Module": Holding,
}


@pytest.mark.parametrize("make", UNBUILT.values(), ids=UNBUILT.keys())
@pytest.mark.parametrize("first", ["run", "keep", "spec"])
def test_what_is_built_at_its_first_call_is_as_in_one_process(first: str, make: Callable[[], Any]) -> None:
    """Also its gradients: a trace that is stopped in the middle would leave it half built, and none would reach its weights."""
    program, x = engine.program(make(), is_module=True), tf.ones((4, 3))
    site = site_of(1, training=program.training, accumulate=True)
    assert not program.parameters()
    if first == "run":
        close(program.run(site, (), [x])[0], [tf.fill((4, 2), 3.0)])
    elif first == "spec":
        assert program.spec(site, [Aval((4, 3), BY_NAME["float32"])])[0][0].shape == (4, 2)
    for count in (1, 2):
        result, kept = program.keep(site, (), [x])
        close(result[0], [tf.fill((4, 2), 3.0)])
        kept.derive(("T", (0,), 1), [tf.ones((4, 2))], keep=False, accumulate=True)
        (bar,) = program.grads().values()
        close([bar], [tf.fill((3, 2), 4.0 * count)])


def test_code_that_switches_eager_execution_off_is_told_what_to_do() -> None:
    """As models of TensorFlow 1 do in their first lines. (There every call's operand "has no values yet".)"""
    with tf.Graph().as_default(), pytest.raises(UsageError, match=r"disable_v2_behavior.*wrap_function"):
        engine.program(tf.square, is_module=False)


def test_shapes_of_a_module_that_makes_what_each_call_moves_are_told_after_a_call() -> None:
    class Counting(tf.Module):
        count = None

        def __call__(self, x: Any) -> Any:
            if self.count is None:
                self.count = tf.Variable(0.0)
            return x + self.count.assign_add(1.0)

    avals = [Aval((2,), BY_NAME["float32"])]
    with pytest.raises(UsageError, match="call it once before this"):
        engine.program(Counting(), is_module=True).spec(site_of(1), avals)
    program = engine.program(Counting(), is_module=True)
    close(program.run(site_of(1), (), [tf.ones(2)])[0], [tf.fill((2,), 2.0)])
    program.spec(site_of(1), avals)
    close(program.run(site_of(1), (), [tf.ones(2)])[0], [tf.fill((2,), 3.0)])


@pytest.mark.parametrize("first", ["run", "keep", "spec"])
def test_a_tensor_that_is_kept_of_a_traced_call_is_told(first: str) -> None:
    kept: list[Any] = []

    def target(x: Any) -> Any:
        kept.extend([] if kept else [tf.range(3.0)])
        return x * kept[0]

    program, x = engine.program(target, is_module=False), tf.ones(3)
    if first == "spec":
        program.spec(site_of(1), [Aval((3,), BY_NAME["float32"])])
    else:
        program.run(site_of(1), (), [x])
    with pytest.raises(UsageError, match=r"keeps a tensor .* options\(compile=False\)"):
        getattr(program, "keep" if first == "keep" else "run")(site_of(1), (), [tf.ones((2, 3))])


def test_a_function_that_makes_variables_at_each_call_is_not_traced() -> None:
    def target(x: Any) -> Any:
        variable = tf.Variable(tf.zeros_like(x))
        variable.assign_add(2 * x)
        return variable + 0.0

    program = engine.program(target, is_module=False)
    for rows in (1, 2, 2):
        close(program.run(site_of(1), (), [tf.ones(rows)])[0], [tf.fill((rows,), 2.0)])
    compiled = site_of(1, compile=True)
    program.run(compiled, (), [tf.ones(1)])
    with pytest.raises(UsageError, match=r"makes variables at each call .* leave compile=True out"):
        program.run(compiled, (), [tf.ones(1)])


# ---- State between forward and pullback ------------------------------------------------------------------------------


def functions_with_variables() -> dict[str, tuple[Callable[..., Any], tf.Variable]]:
    w = tf.Variable(2.0, dtype=tf.float64)
    inner = tf.function(lambda x: x * w)
    return {
        "plain": (lambda x: x * w, w),
        "tf.function inside": (lambda x: inner(x), w),
        "assigned inside": (lambda x: x * w * 0.5 + 0.0 * w.assign_add(0.0) + x * w.assign_add(0.0) * 0.5, w),
    }


@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("kind", functions_with_variables())
def test_a_variable_changed_after_the_forward_does_not_change_the_pullback(
    kind: str, compile: bool | None
) -> None:
    f, w = functions_with_variables()[kind]
    program, x = engine.program(f, is_module=False), tf.constant(3.0, tf.float64)
    result, residual = program.keep(site_of(1, compile=compile), (), [x])
    w.assign(100.0)
    assert float(result.tensors[0]) == 6.0
    for _ in range(2):
        found, _ = residual.derive((T, (0,), 1), [tf.ones((), tf.float64)], keep=False, accumulate=False)
        assert float(found[0]) == 2.0
    found, _ = residual.derive((J, (0,)), [x], keep=False, accumulate=False)
    assert float(found[0]) == 6.0
    assert float(program.run(site_of(1), (), [x]).tensors[0]) == 300.0


def random_functions() -> dict[str, Callable[[Any], Any]]:
    generator = tf.random.Generator.from_seed(1)
    dropout = keras.layers.Dropout(0.5)
    inner = tf.function(lambda x: x**2 * tf.random.uniform((1000,)))
    return {
        "tf.random": lambda x: x**2 * tf.random.uniform((1000,)),
        "tf.nn.dropout": lambda x: tf.nn.dropout(x**2, 0.5),
        "Generator": lambda x: x**2 * generator.uniform((1000,)),
        "keras": lambda x: dropout(x**2, training=True),
        "tf.function inside": lambda x: inner(x),
        "two draws": lambda x: x**2 * tf.random.uniform((1000,)) * tf.random.uniform((1000,)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("kind", random_functions())
def test_R40_forward_and_derivatives_share_their_random_numbers(kind: str, compile: bool | None) -> None:
    program, site = engine.program(random_functions()[kind], is_module=False), site_of(1, compile=compile)
    x = tf.fill(1000, 3.0)
    masks = []
    for _ in range(2):
        result, residual = program.keep(site, (), [x])
        masks.append(result.tensors[0] / 9.0)
        for _ in range(2):
            found, second = residual.derive((T, (0,), 1), [tf.ones(1000)], keep=True, accumulate=False)
            close(found, [6.0 * masks[-1]], 1e-6)
        found, _ = second.derive((T, (0,), 1), [tf.ones(1000)], keep=False, accumulate=False)
        close(found, [2.0 * masks[-1]], 1e-6)
        found, _ = residual.derive((J, (0,)), [tf.ones(1000)], keep=False, accumulate=False)
        close(found, [6.0 * masks[-1]], 1e-6)
    assert np.abs(masks[0] - masks[1]).max() > 0.1
    assert isinstance(residual, Replayed) == (compile is None and kind != "tf.function inside")


def small_model(dropout: float = 0.5) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(3),
        ]
    )


def model_program(**options: Any) -> tuple[Any, Any]:
    model = small_model(**options)
    return model, engine.program(model, is_module=True)


def variables_of(model: Any) -> list[bytes]:
    return [np.asarray(v).tobytes() for v in model.variables]


@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("training", [False, True])
def test_a_keras_model_is_the_local_one_bit_for_bit(training: bool, compile: bool | None) -> None:
    model, program = model_program(dropout=0.0)
    twin = small_model(dropout=0.0)
    assert program.training is False and program.is_module
    program.train(training)
    x = random(5, 6, dtype=tf.float32)
    for _ in range(3):
        site = site_of(1, training=training, compile=compile)
        same(program.run(site, (), [x]).tensors, [twin(x, training=training)])
    assert variables_of(model) == variables_of(twin)


@pytest.mark.parametrize("compile", [None, False])
def test_R40_batchnorm_moves_once_per_forward_and_not_in_pullbacks_or_spec(compile: bool | None) -> None:
    model, program = model_program()
    site = site_of(1, training=True, compile=compile)
    program.train(True)
    x = random(5, 6, dtype=tf.float32)
    before = variables_of(model)
    assert program.spec(site, [Aval((5, 6), BY_NAME["float32"])])[0] == [Aval((5, 3), BY_NAME["float32"])]
    assert variables_of(model) == before
    result, residual = program.keep(site, (), [x])
    after = variables_of(model)
    assert after != before
    ct = random(5, 3, dtype=tf.float32)
    gradients = [residual.derive((T, (0,), 1), [ct], keep=True, accumulate=False)[0][0] for _ in range(2)]
    same(gradients[:1], gradients[1:])
    assert variables_of(model) == after
    twin = small_model()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = twin(x, training=True)
    close(result.tensors, [y], 1e-6)
    close(gradients[:1], [tape.gradient(y, x, output_gradients=ct)], 1e-5)
    assert len(after) == len(variables_of(twin))
    for a, b in zip(model.variables, twin.variables, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)


def test_modes() -> None:
    _, program = model_program()
    with pytest.raises(UsageError, match=r"remote\.train\(\)"):
        site, leaves = tree_site([tf.ones((1, 6))], {"training": True})
        program.run(site, (), leaves)
    program.train(True)
    program.run(site, (), leaves)
    program.train(False)
    function = engine.program(branches, is_module=False)
    assert function.training is None and not function.is_module
    with pytest.raises(UsageError, match="no variables"):
        function.train(True)
    flat = engine.program(Scale(), is_module=True)
    assert flat.training is None
    flat.train(False)
    with pytest.raises(UsageError, match="no training mode"):
        flat.train(True)


class Inner(keras.layers.Layer):
    """Does not take ``training``, but what is inside does."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, x: Any) -> Any:
        return self.dropout(x)


def test_the_mode_reaches_layers_inside() -> None:
    program, x = engine.program(Inner(), is_module=True), tf.ones((4, 100))
    same(program.run(site_of(1), (), [x]).tensors, [x])
    program.train(True)
    assert (
        0.2
        < float(tf.reduce_mean(tf.cast(program.run(site_of(1), (), [x]).tensors[0] == 0, tf.float32)))
        < 0.8
    )


@pytest.mark.slow
@pytest.mark.parametrize("first", ["spec", "run", "keep"])
@pytest.mark.parametrize("compile", [None, False])
def test_an_unbuilt_model_gets_the_weights_of_a_local_first_call(first: str, compile: bool | None) -> None:
    def unbuilt() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(2)])

    model, x = unbuilt(), tf.ones((2, 3))
    program, site = engine.program(model, is_module=True), site_of(1, compile=compile)
    assert program.parameters() == {}
    if first == "spec":
        program.spec(site, [Aval((2, 3), BY_NAME["float32"])])
    else:
        getattr(program, first)(site, (), [x])
    twin = unbuilt()
    same(program.run(site, (), [x]).tensors, [twin(x)])
    assert variables_of(model) == variables_of(twin) and len(program.parameters()) == 4


@pytest.mark.parametrize("kind", ["Sequential", "a built part and one to come", "tf.Module"])
def test_a_model_that_awaits_weights_has_no_state_to_be_taken_for_all_of_it(kind: str) -> None:
    class Head(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.body = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            self.head = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.head(self.body(x))

    class Plain(tf.Module):
        def __init__(self) -> None:
            self.layer = keras.layers.Dense(2)

        def __call__(self, x: Any) -> Any:
            return self.layer(x)

    make = {"Sequential": lambda: keras.Sequential([keras.layers.Dense(2)]), "tf.Module": Plain}.get(
        kind, Head
    )
    program = engine.program(make(), is_module=True)
    asked = [program.state_dict, lambda: program.functional(False), lambda: program.requires_grad(False, [])]
    for ask in asked:
        with pytest.raises(UsageError, match=r"makes weights when it is first called.*keras\.Input"):
            ask()
    program.run(site_of(1), (), [tf.ones((1, 3))])
    for ask in asked:
        ask()
    assert len(program.state_dict()) == 2 + 2 * (kind.startswith("a"))


def test_a_model_of_built_parts_awaits_no_weights() -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Activation("relu")])
    assert not model.built and len(engine.program(model, is_module=True).state_dict()) == 2


# ---- Training --------------------------------------------------------------------------------------------------------


def local_step(model: Any, optimizer: Any, x: Any, ct: Any) -> list[Any]:
    """One step on an all-local model; its gradients for the weights and for x."""
    weights = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=True)
    *gradients, x_bar = tape.gradient(y, [*weights, x], output_gradients=ct)
    optimizer.apply(gradients, model.trainable_variables)
    return [*gradients, x_bar]


@pytest.mark.slow
@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("anchored", [False, True])
def test_R43_R44_worker_owned_training_is_the_local_one(compile: bool | None, anchored: bool) -> None:
    model, program = model_program()
    program.train(True)
    twin, x, ct = small_model(), random(5, 6, dtype=tf.float32), random(5, 3, dtype=tf.float32)
    optimizer = program.optimizer(keras.optimizers.Adam, {"learning_rate": 0.01})
    local = keras.optimizers.Adam(0.01)
    operands = [tf.zeros(()), x] if anchored else [x]
    wrt = (0,) if anchored else ()
    site = site_of(1, training=True, accumulate=True, anchored=anchored, compile=compile)
    before = [np.asarray(v) for v in model.trainable_variables]
    for step in range(3):
        _, residual = program.keep(site, (), operands)
        bars, _ = residual.derive((T, (*wrt, len(operands) - 1), 1), [ct], keep=False, accumulate=True)
        *gradients, x_bar = local_step(twin, local, x, ct)
        close(list(program.grads().values()), gradients, 1e-5)
        close(bars[-1:], [x_bar], 1e-5)
        optimizer.step()
        optimizer.zero_grad()
        assert program.generation == step + 1
    for a, b in zip(model.variables, twin.variables, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    assert all(
        np.abs(np.asarray(a) - b).max() > 1e-3 for a, b in zip(model.trainable_variables, before, strict=True)
    )


@pytest.mark.parametrize("compile", [None, False])
def test_R44_the_first_stage_trains_by_its_anchor_alone(compile: bool | None) -> None:
    model = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(5, 3)])
    program = engine.program(model, is_module=True)
    site = site_of(1, accumulate=True, anchored=True, compile=compile)
    anchor, index, ct = tf.zeros(()), tf.constant([[1, 1]]), tf.ones((1, 2, 3))
    _, residual = program.keep(site, (), [anchor, index])
    found, _ = residual.derive((T, (0,), 1), [ct], keep=False, accumulate=True)
    assert found == [None]
    expected = np.zeros((5, 3), np.float32)
    expected[1] = 2.0
    (gradient,) = program.grads().values()
    assert gradient.numpy().tolist() == expected.tolist()
    residual.derive((T, (0,), 1), [ct], keep=False, accumulate=True)
    (gradient,) = program.grads().values()
    assert gradient.numpy().tolist() == (2 * expected).tolist()
    (before,) = program.parameters().values()
    program.optimizer(keras.optimizers.SGD, {"learning_rate": 1.0}).step()
    (after,) = program.parameters().values()
    np.testing.assert_allclose(after.numpy(), before.numpy() - 2 * expected, rtol=1e-6)


@pytest.mark.slow
def test_pullbacks_accumulate_however_they_are_asked_for() -> None:
    _, program = model_program(dropout=0.0)
    site, x, ct = site_of(1, accumulate=True), random(3, 6, dtype=tf.float32), random(3, 3, dtype=tf.float32)
    _, residual = program.keep(site, (), [x])
    residual.derive((T, (0,), 1), [ct], keep=False, accumulate=True)
    one = list(program.grads().values())
    program.forget_gradients(program.parameters())
    program.run(site, ((T, (0,), 1),), [x, ct])
    close(list(program.grads().values()), one, 1e-6)
    program.forget_gradients(program.parameters())
    batch, _ = tf.stack([x, x]), None
    _, rows = program.keep_rows(site, (("V", (True,)),), [batch])
    rows.derive_rows((T, (0,), 1), (True, False), [ct], np.arange(2))
    close(list(program.grads().values()), [2 * g for g in one], 1e-5)
    program.forget_gradients(program.parameters())
    residual.derive((T, (0,), 1), [ct], keep=False, accumulate=False)
    assert all(g is None for g in program.grads().values())


@pytest.mark.slow
def test_a_gradient_penalty_reaches_the_weights() -> None:
    """The pullback of a pullback accumulates as well."""
    model, program = model_program(dropout=0.0)
    site, x, ct = site_of(1, accumulate=True), random(3, 6, dtype=tf.float32), random(3, 3, dtype=tf.float32)
    _, residual = program.keep(site, (), [x])
    (x_bar,), second = residual.derive((T, (0,), 1), [ct], keep=True, accumulate=False)
    second.derive((T, (1,), 1), [2 * x_bar], keep=False, accumulate=True)
    weights = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=False)
        penalty = tf.reduce_sum(tape.gradient(y, x, output_gradients=ct) ** 2)
    close(list(program.grads().values()), outer.gradient(penalty, weights), 1e-5)


@pytest.mark.slow
def test_a_step_between_forward_and_pullback() -> None:
    """The gradients are those at the weights of the forward."""
    _, program = model_program(dropout=0.0)
    site, x, ct = site_of(1, accumulate=True), random(3, 6, dtype=tf.float32), random(3, 3, dtype=tf.float32)
    _, residual = program.keep(site, (), [x])
    before, _ = residual.derive((T, (0,), 1), [ct], keep=False, accumulate=True)
    program.optimizer(keras.optimizers.Adam, {"learning_rate": 0.5}).step()
    program.load_state_dict({k: v.numpy() * 3 for k, v in program.state_dict().items()})
    after, _ = residual.derive((T, (0,), 1), [ct], keep=False, accumulate=False)
    same(before, after)


def test_bad_steps() -> None:
    _, program = model_program()
    optimizer = program.optimizer(keras.optimizers.SGD, {})
    with pytest.raises(UsageError, match="no gradients were accumulated"):
        optimizer.step()
    assert program.generation == 0
    with pytest.raises(UsageError, match="no Keras optimizer"):
        program.optimizer(dict, {})
    with pytest.raises(UsageError, match="not callable"):
        program.optimizer(3, {})
    with pytest.raises(UsageError, match="nonsense"):
        program.optimizer(keras.optimizers.SGD, {"nonsense": 1})
    with pytest.raises(UsageError, match="trainable_variables"):
        engine.program(branches, is_module=False).optimizer(keras.optimizers.SGD, {})


@pytest.mark.slow
def test_frozen_weights_stay_and_have_no_gradient() -> None:
    model, program = model_program(dropout=0.0)
    names = list(program.parameters())
    model.layers[0].trainable = False
    site, x = site_of(1, accumulate=True), random(3, 6, dtype=tf.float32)
    optimizer = program.optimizer(keras.optimizers.SGD, {"learning_rate": 1.0})
    _, residual = program.keep(site, (), [x])
    residual.derive((T, (), 1), [tf.ones((3, 3))], keep=False, accumulate=True)
    frozen = [name for name in names if name not in program.parameters()]
    assert len(frozen) == len(model.layers[0].weights)
    assert not set(frozen) & set(program.grads()) and set(frozen) <= set(program.buffers())
    before = program.state_dict()
    optimizer.step()
    after = program.state_dict()
    moved = {n for n in before if before[n].numpy().tobytes() != after[n].numpy().tobytes()}
    assert moved == set(program.grads())
    model.layers[0].trainable = True
    residual.derive((T, (), 1), [tf.ones((3, 3))], keep=False, accumulate=True)
    assert all(program.grads()[name] is not None for name in frozen)


class Scale(tf.Module):
    """Modules, lists and a Keras layer inside; a weight that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable([2.0])
        self.parts = [tf.Variable([3.0]), tf.Variable([1.0], trainable=False)]
        self.unused = tf.Variable([0.0])
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

    def __call__(self, x: Any) -> Any:
        return self.dense(x * self.w * self.parts[0] * self.parts[1])


def test_a_tf_module_with_a_keras_layer_inside() -> None:
    program, site, x = (
        engine.program(Scale(), is_module=True),
        site_of(1, accumulate=True),
        tf.constant([[5.0]]),
    )
    _, residual = program.keep(site, (), [x])
    residual.derive((T, (0,), 1), [tf.ones((1, 1))], keep=False, accumulate=True)
    grads = {name: g if g is None else g.numpy().ravel().tolist() for name, g in program.grads().items()}
    (kernel,) = [name for name in grads if "kernel" in name]
    assert grads == {"w": [15.0], "parts.0": [10.0], "unused": None, kernel: [30.0]}
    assert list(program.buffers()) == ["parts.1"]
    program.optimizer(keras.optimizers.SGD, {"learning_rate": 0.1}).step()
    assert {n: v.numpy().ravel().tolist() for n, v in program.parameters().items()} == {
        "w": [0.5],
        "parts.0": [2.0],
        "unused": [0.0],
        kernel: [-2.0],
    }


class Lazy(tf.Module):
    """Makes its weight at the first call."""

    @tf.Module.with_name_scope
    def __call__(self, x: Any, training: bool) -> Any:
        if not hasattr(self, "w"):
            self.w = tf.Variable(tf.ones(x.shape[-1]))
        return x * self.w if training else -x * self.w


def test_a_tf_module_that_makes_its_weights_at_the_first_call() -> None:
    for compile in (None, False):
        program = engine.program(Lazy(), is_module=True)
        site = site_of(1, accumulate=True, compile=compile)
        result, residual = program.keep(site, (), [tf.ones(3)])
        assert float(result.tensors[0][0]) == -1.0
        residual.derive((T, (0,), 1), [tf.ones(3)], keep=False, accumulate=True)
        assert program.grads()["w"].numpy().tolist() == [-1.0] * 3
        program.train(True)
        assert float(program.run(site_of(1), (), [tf.ones(3)]).tensors[0][0]) == 1.0


def test_state_dict_round_trip_and_its_errors() -> None:
    _, program = model_program()
    state = {name: v.numpy() for name, v in program.state_dict().items()}
    assert set(state) == set(program.parameters()) | set(program.buffers()) and len(state) == 8
    doubled = {name: 2 * v for name, v in state.items()}
    program.load_state_dict(doubled)
    assert program.generation == 1
    for name, v in program.state_dict().items():
        assert v.numpy().tobytes() == doubled[name].tobytes()
    first, *others = state
    bad = {
        "missing": {n: state[n] for n in others},
        "unexpected": {**state, "x": state[first]},
        "shape": {**state, first: np.zeros((1, 2), np.float32)},
        "dtype": {**state, first: state[first].astype(np.float64)},
    }
    for text, values in bad.items():
        with pytest.raises(UsageError, match=f"{text}.*{'x' if text == 'unexpected' else ''}"):
            program.load_state_dict(values)
    for name, v in program.state_dict().items():
        assert v.numpy().tobytes() == doubled[name].tobytes()
    program.load_state_dict({first: tf.constant(state[first]), "x": state[first]}, strict=False)
    assert program.state_dict()[first].numpy().tobytes() == state[first].tobytes()


# ---- Random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("kind", [*random_functions(), "model"])
def test_a_seed_makes_a_call_reproducible_and_leaves_the_others_alone(
    kind: str, compile: bool | None
) -> None:
    if kind == "Generator":
        pytest.skip("a tf.random.Generator has a state of its own")
    target: Any = small_model() if kind == "model" else random_functions()[kind]
    tf.random.set_seed(None)
    program = engine.program(target, is_module=kind == "model")
    training = None
    if kind == "model":
        program.train(True)
        training = True
    elif kind == "keras":
        pytest.skip("a layer in a closure cannot be seen")
    x = tf.ones((50, 6)) if kind == "model" else tf.ones(1000)

    def call(seed: int | None) -> bytes:
        site = site_of(1, seed=seed, compile=compile, training=training)
        result, residual = program.keep(site, (), [x])
        residual.derive((T, (0,), 1), [tf.ones_like(result.tensors[0])], keep=False, accumulate=False)
        return bytes(program.run(site, (), [x]).tensors[0].numpy().tobytes())

    one, free, other, again, later = call(1), call(None), call(2), call(1), call(None)
    assert one == again != other and len({one, free, later}) == 3


@pytest.mark.parametrize("is_random", [False, True])
def test_many_seeds_are_traced_once(is_random: bool) -> None:
    traces = []

    def noisy(x: Any) -> Any:
        traces.append(tf.executing_eagerly())
        return x * tf.random.uniform(x.shape) if is_random else x * 2

    program = engine.program(noisy, is_module=False)
    made = [program.run(site_of(1, seed=i % 50), (), [tf.ones(9)]).tensors[0].numpy() for i in range(100)]
    np.testing.assert_array_equal(made[:50], made[50:])
    assert (made[0] != made[1]).any() == is_random
    assert traces.count(False) == 1, "and where it is random, it runs eagerly"


def test_seeds_and_compile_true() -> None:
    program = engine.program(random_functions()["tf.random"], is_module=False)
    with pytest.raises(UsageError, match="compile=True"):
        program.run(site_of(1, seed=1, compile=True), (), [tf.ones(1000)])
    pure = engine.program(two_results, is_module=False)
    pure.run(site_of(1, 2, seed=1, compile=True), (), CASES["two results"].operands)


# ---- The engine ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(UsageError, match="the factory returned a dict"):
        engine.program({}, is_module=True)


PREPARED = """
from gradwire_workers import tensorflow as engine
from gradwire_wire.errors import UsageError
engine.prepare(3, True, "cpu")
facts = engine.facts()
assert facts["framework"] == "tensorflow" and facts["threads"] == 3 and facts["devices"][0] == "cpu:0", facts
try:
    engine.prepare(None, None, "gpu:7")
except UsageError as error:
    assert "gpu:7" in str(error) and "cpu:0" in str(error)
    print("fine")
"""


@pytest.mark.slow
def test_prepare_and_facts_in_a_fresh_process() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREPARED],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.slow
def test_traces_are_bounded() -> None:
    program = engine.program(lambda x, n: x * n, is_module=False)
    for n in range(140):
        site, leaves = tree_site([tf.ones(1), float(n)], {})
        assert float(program.run(site, (), leaves).tensors[0][0]) == n
    assert len(program._functions) == 128


def changing_functions() -> dict[str, Callable[[Any], Any]]:
    """Targets whose Python gives something else at each trace."""
    count: list[int] = []
    return {
        "np.random": lambda x: x**2 * np.random.normal(),
        "integers": lambda x: x**2 * tf.cast(tf.constant(np.random.randint(1 << 30)), tf.float32),
        "counter": lambda x: x**2 * float(count.append(1) or len(count)),
        "capture": lambda x: x**2 * eager_constant(),
    }


def eager_constant() -> Any:
    with tf.init_scope():
        return tf.constant(np.random.normal(size=1000), tf.float32)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", changing_functions())
def test_forward_and_pullback_agree_where_traces_do_not(kind: str) -> None:
    program, x = engine.program(changing_functions()[kind], is_module=False), tf.constant(3.0)
    for compile in (None, False):
        result, residual = program.keep(site_of(1, compile=compile), (), [x])
        factor = float(result.tensors[0]) / 9.0
        for op, linear, expected in (
            ((T, (0,), 1), tf.constant(1.0), 6 * factor),
            ((J, (0,)), x, 18 * factor),
        ):
            found, _ = residual.derive(op, [linear], keep=False, accumulate=False)
            np.testing.assert_allclose(found[0].numpy(), expected, rtol=1e-5)


def python_functions() -> dict[str, Callable[[Any], Any]]:
    """Targets that call Python from inside TensorFlow's graph, as a remote function inside one does."""

    @tf.custom_gradient
    def custom(x: Any) -> Any:
        y = tf.numpy_function(lambda x: np.sin(x), [x], tf.float32)
        y.set_shape(x.shape)
        return y, lambda ct: ct * tf.numpy_function(lambda x: np.cos(x), [x], tf.float32)

    def py_function(x: Any) -> Any:
        y = tf.py_function(tf.sin, [x], tf.float32)
        y.set_shape(x.shape)
        return y

    return {"py_function": py_function, "custom gradient": custom}


@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("kind", python_functions())
def test_python_inside_the_graph(kind: str, compile: bool | None) -> None:
    program, x = engine.program(python_functions()[kind], is_module=False), random(3, dtype=tf.float32)
    result, residual = program.keep(site_of(1, compile=compile), (), [x])
    close(result.tensors, [tf.sin(x)], 1e-6)
    for _ in range(1 if kind == "py_function" else 2):  # TensorFlow keeps its tape for one pullback
        found, _ = residual.derive((T, (0,), 1), [x], keep=False, accumulate=False)
        close(found, [tf.cos(x) * x], 1e-6)


@pytest.mark.slow
def test_derivatives_outlive_the_traces_they_were_cut_from() -> None:
    program, site, operands = (
        engine.program(looped, is_module=False),
        site_of(1, 2),
        [random(4), random(4, 4)],
    )
    _, residual = program.keep(site, (), operands)
    found = []
    for _ in range(2):
        found.append(residual.derive((T, (0,), 1), [random(4)], keep=False, accumulate=False)[0])
        gc.collect()
    same(*found)


class Decorated(tf.Module):
    """A tf.function of its own, with variables: its derivatives cannot be cut out."""

    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable([1.0, 2.0])

    @tf.function
    def __call__(self, x: Any) -> Any:
        return x * self.w


def test_a_tf_module_that_is_a_tf_function() -> None:
    program, site, x = (
        engine.program(Decorated(), is_module=True),
        site_of(1, accumulate=True),
        tf.constant([3.0, 4.0]),
    )
    result, residual = program.keep(site, (), [x])
    assert isinstance(residual, Taped)
    same(result.tensors, [tf.constant([3.0, 8.0])])
    for n in (1, 2):
        found, _ = residual.derive((T, (0,), 1), [tf.ones(2)], keep=False, accumulate=True)
        same(found, [tf.constant([1.0, 2.0])])
        same([program.grads()["w"]], [n * x])


def test_a_lost_derivative_says_what_to_do() -> None:
    """A target whose Python does something else at each trace."""
    count = []

    def f(x: Any) -> Any:
        count.append(1)
        noise = tf.random.uniform((), name="a" if len(count) < 4 else f"b{len(count)}")
        return x**2 * noise

    program = engine.program(f, is_module=False)
    _, residual = program.keep(site_of(1), (), [tf.constant(1.0)])
    assert isinstance(residual, Replayed)
    with pytest.raises(ResidualLostError, match="compile=False"):
        residual.derive((J, (0,)), [tf.constant(1.0)], keep=False, accumulate=False)
