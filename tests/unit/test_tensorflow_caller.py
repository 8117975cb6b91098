"""The TensorFlow caller: every derivative equals what TensorFlow itself computes without gradwire in between."""

from __future__ import annotations

import gc
import pathlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

import gradwire.tensorflow
from gradwire import families
from gradwire.derived import Derived
from gradwire.site import Site, SpecResult
from gradwire.tensorflow import nodes
from gradwire_wire.carriers import Aval
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import RemoteError, ResidualLostError, UnsupportedTensorError, UsageError
from gradwire_wire.structures import flatten
from tests.doubles.torch_handle import TorchHandle

Function = Callable[..., Any]
EXACT, CLOSE = 0.0, 1e-9

# What the worker computes (in torch) and the same in TensorFlow.
THERE: dict[str, Function] = {
    "f": lambda x, w: (torch.tanh(x @ w) * x.sum(), (x**3).sum()),
    "rows": lambda x, w: (torch.tanh(x @ w), (x**3).sum()),
}
HERE: dict[str, Function] = {
    "f": lambda x, w: (tf.tanh(tf.linalg.matvec(tf.transpose(w), x)) * tf.reduce_sum(x), tf.reduce_sum(x**3)),
    "rows": lambda x, w: (tf.tanh(x @ w), tf.reduce_sum(x**3)),
}


class Remote:
    """What `gradwire.Remote` does with tensors alone as arguments."""

    def __init__(self, target: Function, **site: Any) -> None:
        self.handle = TorchHandle(target)
        self.options = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_leaf = lambda x: tf.is_tensor(x) or isinstance(x, np.ndarray)  # noqa: E731
        structure, leaves = flatten([list(args), kwargs], is_leaf)
        return gradwire.tensorflow.call(self.handle, Site(structure, **self.options), leaves)

    @property
    def counts(self) -> dict[str, int]:
        return {k: n for k, n in self.handle.counts.items() if k not in ("released", "spec")}

    @property
    def alive(self) -> int:
        return len(self.handle.kept)


@pytest.fixture
def remote() -> Iterator[Callable[..., Remote]]:
    """Makes remotes."""
    made: list[Remote] = []

    def make(target: Function, **site: Any) -> Remote:
        made.append(Remote(target, **site))
        return made[-1]

    yield make
    for r in made:
        r.handle.close()


def function(f: Function, **options: Any) -> Any:
    return tf.function(f, autograph=False, **options)


def constant(*shape: int, seed: int = 0, dtype: str = "float64") -> tf.Tensor:
    return tf.constant(np.random.RandomState(seed).randn(*shape).astype(dtype))


def equal(got: Any, expected: Any, tolerance: float = CLOSE) -> None:
    """Same tree, dtypes, shapes and (nearly, relative to the largest) the same values."""
    tf.nest.assert_same_structure(got, expected)
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(expected), strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        a, b = (tf.convert_to_tensor(v).numpy() if tf.is_tensor(v) else np.asarray(v) for v in (a, b))
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        scale = max(1.0, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def loss_of(f: Function) -> Function:
    """A scalar of both results."""

    def loss(x: Any, w: Any) -> Any:
        y, z = f(x, w)
        return tf.reduce_sum(y**2) + z

    return loss


# ---- Derivatives, each written once and applied to the remote function and to TensorFlow's own -----------------------


def first_order(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        loss = loss_of(f)(x, w)
    return tape.gradient(loss, [x, w])


def one_input(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = f(tf.sin(x), w)[1]
    return tape.gradient(loss, x)


def second_order(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as outer:
        outer.watch([x, w])
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = loss_of(f)(x, w)
        squares = tf.reduce_sum(inner.gradient(loss, x) ** 2)
    return outer.gradient(squares, [x, w])


def third_order(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        squares = tf.reduce_sum(second_order(f, x, w)[0] ** 2)
    return tape.gradient(squares, x)


def persistent(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        y, z = f(x, w)
    return tape.gradient(y, x), tape.gradient(z, x), tape.gradient(y, [x, w])


def jacobian(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, _ = f(x, w)
    return tape.jacobian(y, x)


def jacobian_by_loop(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, _ = f(x, w)
    return tape.jacobian(y, x, experimental_use_pfor=False)


def hessian(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = loss_of(f)(x, w)
        g = inner.gradient(loss, x)
    return outer.jacobian(g, x, experimental_use_pfor=False)


def while_loop(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        _, y = tf.while_loop(lambda i, _: i < 3, lambda i, c: (i + 1, tf.sin(f(c, w)[0])), (0, x))
        loss = tf.reduce_sum(y)
    return tape.gradient(loss, x)


def gather(f: Function, x: Any, w: Any) -> Any:
    """The cotangent is a tf.IndexedSlices."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.gather(f(x, w)[0], [0, 0, 1]) ** 2)
    return tape.gradient(loss, x)


def broadcast_cotangent(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, _ = f(x, w)
    return tape.gradient(y, x, output_gradients=tf.broadcast_to(tf.constant(2.0, tf.float64), [4]))


def variable(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = loss_of(f)(x, VARIABLE)
    return tape.gradient(loss, VARIABLE)


def map_fn(f: Function, x: Any, w: Any) -> Any:
    return tf.map_fn(lambda x: first_order(f, x, w)[0], tf.stack([x, 2 * x]))


def jacobian_differentiated(f: Function, x: Any, w: Any) -> Any:
    """TensorFlow copies the pullback into a loop over the rows, which is then differentiated."""
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        squares = tf.reduce_sum(jacobian(f, x, w) ** 2)
    return tape.gradient(squares, [x, w])


def vectorized_map(f: Function, x: Any, w: Any) -> Any:
    """Here the forward is copied; its second result has no cotangent."""
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        rows, _ = tf.vectorized_map(lambda x: f(x, w), tf.stack([x, 2 * x]))
        loss = tf.reduce_sum(rows**2)
    return tape.gradient(loss, [x, w])


def outer_tape(f: Function, x: Any, w: Any) -> Any:
    """The function is compiled, the tape is not."""
    compiled = function(f)
    return first_order(lambda x, w: compiled(x, w), x, w)


def outer_tapes(f: Function, x: Any, w: Any) -> Any:
    compiled = function(f)
    return second_order(lambda x, w: compiled(x, w), x, w)


def inner_tape(f: Function, x: Any, w: Any) -> Any:
    """The outer of two tapes is around the compiled gradient."""
    compiled = function(lambda x, w: first_order(f, x, w)[0])
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        squares = tf.reduce_sum(compiled(x, w) ** 2)
    return tape.gradient(squares, [x, w])


def accumulator(f: Function, x: Any, w: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(x, 2 * x) as moving:
        y = f(x, w)
    return [moving.jvp(v) for v in y]


def accumulator_around(f: Function, x: Any, w: Any) -> Any:
    compiled = function(f)
    return accumulator(lambda x, w: compiled(x, w), x, w)


def hessian_vector_product(f: Function, x: Any, w: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(x, 2 * x) as moving:
        g, _ = first_order(f, x, w)
    return moving.jvp(g)


VARIABLE = tf.Variable(np.random.RandomState(3).randn(4, 4))
CELLS: dict[str, Function] = {
    name.__name__.replace("_", " "): name
    for name in (
        *(first_order, one_input, second_order, third_order, persistent, jacobian, while_loop, gather),
        *(broadcast_cotangent, variable, map_fn, jacobian_differentiated, vectorized_map),
    )
}
COMPILED = {"jacobian", "jacobian differentiated", "vectorized map"}  # by TensorFlow itself
EAGER_ONLY: dict[str, Function] = {
    name.__name__.replace("_", " "): name
    for name in (
        *(jacobian_by_loop, hessian, outer_tape, outer_tapes, inner_tape),
        *(accumulator, accumulator_around, hessian_vector_product),
    )
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("cell", CELLS)
def test_equals_tensorflow_alone(cell: str, compiled: bool, remote: Callable[..., Remote]) -> None:
    x, w, derivative = constant(4), constant(4, 4, seed=1), CELLS[cell]
    r = remote(THERE["f"])
    run = function(derivative) if compiled else derivative
    got = run(r.__call__, x, w)
    equal(got, derivative(HERE["f"], x, w))
    if compiled:
        equal(run(r.__call__, 2 * x, w), derivative(HERE["f"], 2 * x, w))
    elif cell not in COMPILED:  # TensorFlow never forgets a graph with a custom gradient
        gc.collect()
        assert r.alive == 0


@pytest.mark.parametrize("cell", EAGER_ONLY)
def test_equals_tensorflow_alone_eager(cell: str, remote: Callable[..., Remote]) -> None:
    x, w, derivative = constant(4), constant(4, 4, seed=1), EAGER_ONLY[cell]
    equal(derivative(remote(THERE["f"]), x, w), derivative(HERE["f"], x, w))


def test_the_comparison_can_fail() -> None:
    with pytest.raises(AssertionError):
        equal(constant(3), constant(3) + 1e-8)
    with pytest.raises(AssertionError):
        equal(None, constant(3))


@pytest.mark.parametrize(
    "cell, expected",
    {
        "first order": {"message": 2, "keep": 1, "pull": 1},
        "second order": {"message": 4, "keep": 1, "pull": 3},
        "persistent": {"message": 4, "keep": 1, "pull": 3},
    }.items(),
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
def test_messages(cell: str, expected: dict[str, int], compiled: bool, remote: Callable[..., Remote]) -> None:
    r, x, w = remote(THERE["f"]), constant(4), constant(4, 4)
    derivative = CELLS[cell]
    (function(lambda x, w: derivative(r, x, w)) if compiled else lambda x, w: derivative(r, x, w))(x, w)
    assert r.counts == expected


# ---- How long tokens live -------------------------------------------------------------------------------------------


def test_a_tape_that_is_used_up_gives_the_token_back(remote: Callable[..., Remote]) -> None:
    r, x = remote(THERE["f"]), constant(4)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = loss_of(r)(x, constant(4, 4))
    assert r.alive == 1
    tape.gradient(loss, x)
    assert r.alive == 0


def test_a_dropped_tape_gives_the_token_back(remote: Callable[..., Remote]) -> None:
    r, x = remote(THERE["f"]), constant(4)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        loss = loss_of(r)(x, constant(4, 4))
    tape.gradient(loss, x)
    tape.gradient(loss, x)
    assert r.alive == 1
    del tape
    gc.collect()
    assert r.alive == 0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
def test_nothing_is_kept_where_nobody_differentiates(compiled: bool, remote: Callable[..., Remote]) -> None:
    r, x, w = remote(THERE["f"]), constant(4), constant(4, 4)
    run = function(lambda x, w: r(x, w)) if compiled else r
    equal(run(x, w), HERE["f"](x, w))
    with tf.GradientTape() as tape:
        tape.watch(tf.constant(1.0))
        with tape.stop_recording():
            run(x, w)
    assert r.counts == {"message": 2, "plain": 2}


def test_a_graph_that_ran_before_is_differentiated(remote: Callable[..., Remote]) -> None:
    r, x, w = remote(THERE["f"], stateful=True), constant(4), constant(4, 4)
    compiled = function(lambda x, w: r(x, w))
    compiled(x, w)
    equal(first_order(compiled, x, w), first_order(HERE["f"], x, w))
    assert r.counts == {"message": 3, "plain": 1, "keep": 1, "pull": 1}


def test_a_constant_operand_is_not_pulled_back(remote: Callable[..., Remote]) -> None:
    r = remote(THERE["f"])
    words: list[Any] = []
    invoke = r.handle.invoke
    r.handle.invoke = lambda site, word, *a, **k: words.append(word) or invoke(site, word, *a, **k)
    equal(one_input(r, constant(4), constant(4, 4)), one_input(HERE["f"], constant(4), constant(4, 4)))
    assert words == [(), (("T", (0,), 2),)]


# ---- Arguments and results of every kind ----------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
def test_integer_arguments_and_results(compiled: bool, remote: Callable[..., Remote]) -> None:
    r = remote(lambda w, i: {"y": (w[i] ** 2).sum(), "i": (i * 2, None, "s", 3)})
    w, i = constant(4), tf.constant([0, 2, 2], tf.int64)

    def derivative(w: Any, i: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            out = r(w, i)
        assert out["i"][1:] == (None, "s", 3)
        return tape.gradient(out["y"], w), out["i"][0]

    g, twice = (function(derivative) if compiled else derivative)(w, i)
    equal(twice, 2 * i, EXACT)
    expected = np.zeros(4)
    np.add.at(expected, i.numpy(), 2 * w.numpy()[i.numpy()])
    equal(g, tf.constant(expected))


def test_integer_arguments_have_no_gradient(remote: Callable[..., Remote]) -> None:
    r, w, i = remote(lambda w, i: (w[i] ** 2).sum()), constant(4), tf.constant([0, 2, 2], tf.int64)
    with tf.GradientTape() as tape:
        tape.watch(w)
        y = r(w, i)
    assert tape.gradient(y, [w, i])[1] is None


def test_unused_arguments(remote: Callable[..., Remote]) -> None:
    r, a, b = remote(lambda a, b: 2 * a), constant(3), constant(3)

    def derivative(f: Function) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            y = f(a, b)
        return tape.gradient(y, [a, b])

    equal(derivative(r), derivative(lambda a, b: 2 * a))
    assert derivative(r)[1] is None
    # The results of a graph are there or not before it runs: zeros.
    equal(function(lambda: derivative(r))(), [tf.fill([3], tf.constant(2.0, tf.float64)), tf.zeros_like(b)])


def test_second_order_of_a_gradient_with_unused_arguments(remote: Callable[..., Remote]) -> None:
    def derivative(f: Function) -> Any:
        a, b, c = constant(3), constant(3, seed=1), constant(3, seed=2)
        with tf.GradientTape() as outer:
            outer.watch([a, b, c])
            with tf.GradientTape() as inner:
                inner.watch([a, b, c])
                y = tf.reduce_sum(f(a, b, c))
            ga, gb, gc_ = inner.gradient(y, [a, b, c])
            assert gb is None
            y = tf.reduce_sum(ga * gc_)
        return outer.gradient(y, [a, b, c])

    g = lambda a, b, c: a**3 * c  # noqa: E731
    equal(derivative(remote(g)), derivative(g))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
def test_complex(compiled: bool, remote: Callable[..., Remote]) -> None:
    z = tf.complex(constant(3), constant(3, seed=1))
    r = remote(lambda z: (z * z.conj()).real)

    def derivative(z: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(z)
            y = r(z)
        return tape.gradient(y, z)

    equal((function(derivative) if compiled else derivative)(z), 2 * z)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "int32", "bool", "uint8"]
)
def test_dtypes(dtype: str, compiled: bool, remote: Callable[..., Remote]) -> None:
    r = remote(lambda x: torch.cat([x, x]))
    x = tf.cast(tf.constant([0, 1, 1, 0]), dtype)
    for y in (x, x[:0]):
        equal((function(lambda x: r(x)) if compiled else r)(y), tf.concat([y, y], 0), EXACT)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
def test_numpy_arguments_are_constants(compiled: bool, remote: Callable[..., Remote]) -> None:
    r, x, w = remote(THERE["f"], residuals="recompute"), constant(4), constant(4, 4).numpy()
    expected = first_order(lambda x, _: HERE["f"](x, w), x, constant(4, 4))[0]

    def derivative(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(r)(x, w)
            if not compiled:
                w[:] = 0
        return tape.gradient(loss, x)

    equal((function(derivative) if compiled else derivative)(x), expected)


def test_refused_tensors(remote: Callable[..., Remote]) -> None:
    r = remote(lambda x: x)
    for bad in (tf.constant(["a"]), tf.sparse.eye(3), tf.ragged.constant([[1], [2, 3]])):
        with pytest.raises(UnsupportedTensorError):
            r(bad)
    with pytest.raises(UnsupportedTensorError):
        function(lambda x: r(x))(tf.constant(["a"]))


# ---- tf.function ------------------------------------------------------------------------------------------------------


def test_static_shapes_are_set(remote: Callable[..., Remote]) -> None:
    r, seen = remote(THERE["f"]), []

    @function
    def run(x: Any, w: Any) -> Any:
        y, z = r(x, w)
        seen.extend([y.shape, z.shape])
        return y

    run(constant(4), constant(4, 4))
    assert seen == [(4,), ()]


def test_an_unknown_batch(remote: Callable[..., Remote]) -> None:
    r, seen = remote(THERE["rows"]), []
    spec = [tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([4, 3], tf.float64)]

    def derivative(f: Function, x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y, z = f(x, w)
            seen.append((y.shape.as_list(), z.shape.as_list()))
            loss = tf.reduce_sum(y**2) + z
        return tape.gradient(loss, [x, w])

    compiled = function(lambda x, w: derivative(r, x, w), input_signature=spec)
    for n in (1, 3, 5, 0):
        x, w = constant(n, 4), constant(4, 3, seed=1)
        equal(compiled(x, w), derivative(HERE["rows"], x, w))
    assert seen[0] == ([None, 3], [])


def test_an_unknown_image_size(remote: Callable[..., Remote]) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, stride=2), torch.nn.Conv2d(2, 2, 5)).double()
    r = remote(net)
    compiled = function(lambda x: r(x), input_signature=[tf.TensorSpec([None, 1, None, None], tf.float64)])
    x = constant(2, 1, 15, 17)
    assert compiled.get_concrete_function().output_shapes == tf.TensorShape([None, 2, None, None])
    equal(compiled(x), tf.constant(net(torch.from_numpy(x.numpy())).detach().numpy()))


def test_what_cannot_be_known_is_said(remote: Callable[..., Remote]) -> None:
    r = remote(lambda x: x.reshape(7, -1))
    with pytest.raises(UsageError, match="input_signature"):
        function(lambda x: r(x), input_signature=[tf.TensorSpec(None, tf.float64)]).get_concrete_function()
    with pytest.raises(UsageError, match="out_spec"):
        function(lambda x: r(x), input_signature=[tf.TensorSpec([None], tf.float64)]).get_concrete_function()


def test_a_result_that_is_not_as_declared(remote: Callable[..., Remote]) -> None:
    r = remote(lambda x: x[x > 0])
    r.handle.spec = lambda site, avals: SpecResult(
        (Aval((2,), BY_NAME["float64"]),), flatten(x, tf.is_tensor)[0]
    )
    x = tf.constant([1.0, 2.0, -1.0], tf.float64)
    compiled = function(lambda x: r(x))
    equal(compiled(x), x[:2])
    with pytest.raises(tf.errors.OpError, match=r"result 0 as float64 of shape \(0,\).*out_spec"):
        compiled(-tf.abs(x))


def test_calls_happen_as_often_and_in_the_order_written(remote: Callable[..., Remote]) -> None:
    log: list[float] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        log.append(float(x))
        return x + 1

    r = remote(note, stateful=True)
    numbers = [tf.constant(float(n)) for n in range(8)]

    @function
    def run(*numbers: Any) -> Any:
        for n in numbers[:3]:
            r(n)  # the result is unused
        y = r(numbers[3]) + r(numbers[3])  # equal calls
        z = tf.while_loop(lambda i, _: i < 3, lambda i, _: (i + 1, r(10.0 + tf.cast(i, tf.float32))), (0, y))[
            1
        ]
        r(numbers[4])
        return z

    run(*numbers)
    log.clear()
    run(*numbers)
    assert log == [0, 1, 2, 3, 3, 10, 11, 12, 4]


def test_tape_of_eager_calls_used_in_a_function(remote: Callable[..., Remote]) -> None:
    r, x, w = remote(THERE["f"], stateful=True), constant(4), constant(4, 4)

    def pulled() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, w])
            loss = loss_of(r)(x, w)
        return function(lambda: tape.gradient(loss, [x, w])).get_concrete_function()

    graph = pulled()
    gc.collect()
    assert r.alive == 1  # by the graph, which alone has the token now
    equal(graph(), first_order(HERE["f"], x, w))
    del graph
    gc.collect()
    assert r.alive == 0


# ---- Modules whose parameters the worker owns -------------------------------------------------------------------------


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def equal_gradients(there: torch.nn.Module, here: torch.nn.Module) -> None:
    for p, q in zip(there.parameters(), here.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("compiled", ["eager", "tape inside", "tape outside"])
def test_r44_the_first_stage_trains(compiled: str, remote: Callable[..., Remote]) -> None:
    images, head = constant(5, 4), tf.Variable(np.ones(2))
    there, here = module(), module()
    r = remote(there, accumulate=True, stateful=True, training=True)

    def loss(images: Any) -> Any:
        return tf.reduce_sum(tf.linalg.matvec(r(images), head) ** 2)

    forward = function(loss) if compiled == "tape outside" else loss

    def step(images: Any) -> Any:
        with tf.GradientTape() as tape:
            y = forward(images)
        return tape.gradient(y, [head])

    for _ in range(2):
        (g,) = (function(step) if compiled == "tape inside" else step)(images)
        assert g is not None
        (here(torch.from_numpy(images.numpy())) @ torch.ones(2).double()).pow(2).sum().backward()
    equal_gradients(there, here)


def test_the_anchor_has_gradient_zero(remote: Callable[..., Remote]) -> None:
    r = remote(module(), accumulate=True)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(r(constant(5, 4)))
    (anchor,) = tape.watched_variables()
    equal(tape.gradient(y, anchor), tf.constant(0.0), EXACT)


def test_what_is_traced_is_told_before_anything_was_called_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing that a step does is to zero gradients."""
    monkeypatch.delitem(sys.modules, "gradwire.tensorflow")
    found: list[bool] = []
    tf.function(lambda: found.append(families.is_tracing()), autograph=False)()
    assert found == [True] and not families.is_tracing()


@pytest.mark.parametrize("fails", [True, False])
def test_the_anchor_is_no_variable_of_the_function_that_needs_it_first(
    remote: Callable[..., Remote], fails: bool
) -> None:
    """It was traced twice; and where its first trace failed, TensorFlow gave None ever after."""
    gradwire.tensorflow._anchor.cache_clear()
    r, traced = remote(module(), accumulate=True), 0

    def forward(x: Any) -> Any:
        nonlocal traced
        traced += 1
        y = r(x)
        if fails:
            raise ValueError("bad 42")
        return y

    compiled = function(forward)
    for i in range(3):
        if fails:
            with pytest.raises(ValueError, match="bad 42"):
                compiled(constant(5, 4))
        else:
            assert compiled(constant(5, 4)).shape == (5, 2)
        assert traced == (i + 1 if fails else 1)


def test_gradient_penalty_reaches_the_parameters_once(remote: Callable[..., Remote]) -> None:
    there, here = module(), module()
    r, x = remote(there, accumulate=True), constant(5, 4)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(r(x) ** 2)
        penalty = tf.reduce_sum(inner.gradient(y, x) ** 2)
    outer.gradient(penalty, outer.watched_variables())
    leaf = torch.from_numpy(x.numpy()).requires_grad_()
    (g,) = torch.autograd.grad(here(leaf).pow(2).sum(), leaf, create_graph=True)
    (g**2).sum().backward()
    equal_gradients(there, here)


@pytest.mark.parametrize("persistent", [True, False])
def test_undecided_derivatives_of_a_compiled_call_are_refused(
    persistent: bool, remote: Callable[..., Remote]
) -> None:
    r, x = remote(module(), accumulate=True), constant(5, 4)
    compiled = function(lambda x: tf.reduce_sum(r(x) ** 2))
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        if persistent:
            y = compiled(x)
        else:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = compiled(x)
    with pytest.raises(tf.errors.OpError, match="Put the tapes inside"):
        (outer if persistent else inner).gradient(y, x)


def test_inside_a_keras_model(remote: Callable[..., Remote]) -> None:
    import keras

    there = module().float()
    r = remote(there, accumulate=True, stateful=True, training=True)

    class Encoder(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return r(x)

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), Encoder(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((20, 4), "float32"), np.ones((20, 1), "float32")
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert r.counts["keep"] == r.counts["pull"] == 6
    assert all(p.grad is not None for p in there.parameters())
    assert model.predict(x[:3], verbose=0).shape == (3, 1)
    assert r.counts["plain"] == 1 and r.counts["keep"] == 6


def test_inference_leaves_the_anchor_away(remote: Callable[..., Remote]) -> None:
    r = remote(module(), accumulate=True)
    r(constant(5, 4))
    assert r.counts == {"message": 1, "plain": 1}


# ---- Refused by a sentence, and errors --------------------------------------------------------------------------------


def test_a_forward_accumulator_inside_a_function_is_refused(remote: Callable[..., Remote]) -> None:
    r, x, w = remote(THERE["f"]), constant(4), constant(4, 4)
    with pytest.raises(UsageError, match="ForwardAccumulator cannot pass"):
        function(lambda x, w: accumulator(r, x, w))(x, w)


def test_jit_compile_is_refused_by_name(remote: Callable[..., Remote]) -> None:
    r = remote(THERE["f"])
    with pytest.raises(tf.errors.InvalidArgumentError, match="use_jit_compile_False"):
        function(lambda x, w: r(x, w)[0], jit_compile=True)(constant(4), constant(4, 4))


def test_a_stateful_forward_is_never_repeated(remote: Callable[..., Remote]) -> None:
    r = remote(THERE["f"], stateful=True, residuals="recompute")
    with pytest.raises(ResidualLostError, match="second time"):
        first_order(r, constant(4), constant(4, 4))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
def test_r36_remote_errors_are_visible(compiled: bool, remote: Callable[..., Remote]) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise ValueError("bad 42")
        if x.requires_grad:
            x.register_hook(_bad_gradient)
        return x**2

    r, x = remote(g), tf.ones(3)
    r.handle.spec = lambda site, avals: SpecResult(avals, flatten(x, tf.is_tensor)[0])
    run = function(lambda x: r(x)) if compiled else r
    for _ in range(2):
        with pytest.raises((ValueError, tf.errors.OpError), match="bad 42") as caught:
            run(x)
        assert "test_tensorflow_caller.py" in str(caught.value)
        assert isinstance(caught.value, RemoteError) or compiled
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = run(-x)
    with pytest.raises((ValueError, tf.errors.OpError), match="bad 43"):
        tape.gradient(y, x)
    equal(run(-x), x)


def _bad_gradient(g: torch.Tensor) -> torch.Tensor:
    raise ValueError("bad 43")


def test_a_graph_of_another_process_calls_nothing_here(remote: Callable[..., Remote]) -> None:
    """TensorFlow numbers Python functions by process, so a saved graph finds one of the same number."""
    r, x = remote(torch.sin), constant(3)
    graph = function(lambda x: r(x) + r(x)).get_concrete_function(x).graph.as_graph_def()
    marks = [
        node.attr["value"].tensor.int64_val[0]
        for node in graph.node
        if node.op == "Const" and node.attr["value"].tensor.int64_val
    ]
    assert len({m for m in marks if m}) == 2
    entry = nodes._Entry(marks[0], Derived(r.handle, Site(b"")), [])
    with pytest.raises(UsageError, match="saved in another process"):
        entry(np.int64(marks[0] + 1), np.int64(0), 1, 2)


def slope(f: Function, x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = f(x)
    return tape.gradient(loss, x)


class Saved(tf.Module):
    def __init__(self, r: Remote) -> None:
        super().__init__()
        self.loss = loss_of(r)

    @tf.function(input_signature=[tf.TensorSpec([4], tf.float64)])
    def __call__(self, x: Any) -> Any:
        return self.loss(x, constant(4, 4))


def test_r39_a_saved_graph_is_differentiated_in_the_process_that_saved_it(
    remote: Callable[..., Remote], tmp_path: pathlib.Path
) -> None:
    r, x = remote(THERE["f"]), constant(4)
    saved = Saved(r)
    tf.saved_model.save(saved, str(tmp_path))
    gc.collect()  # of what TensorFlow has traced for the derivatives that it saves
    loaded = tf.saved_model.load(str(tmp_path))
    equal(slope(loaded, x), slope(saved, x))
    with pytest.raises(
        (TypeError, ValueError, tf.errors.InvalidArgumentError)
    ):  # loud, whatever TensorFlow says
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = tf.vectorized_map(loaded, tf.stack([x, x]))
        tape.gradient(rows, x)


def test_r39_a_saved_graph_works_for_as_long_as_the_process_that_saved_it(tmp_path: pathlib.Path) -> None:
    def save() -> Any:
        saved = Saved(Remote(THERE["f"]))
        tf.saved_model.save(saved, str(tmp_path))
        return slope(saved, constant(4))

    expected = save()
    gc.collect()
    loaded = tf.saved_model.load(str(tmp_path))
    equal(slope(loaded, constant(4)), expected)
    with tf.GradientTape() as outer, pytest.raises(UsageError, match="this derivative was not saved"):
        outer.watch(x := constant(4))
        slope(loaded, x)


def test_r39_a_graph_saved_without_derivatives_works_for_as_long_as_its_remote(
    tmp_path: pathlib.Path,
) -> None:
    r, x = Remote(THERE["f"]), constant(4)
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    saved = Saved(r)
    expected = saved(x)
    tf.saved_model.save(saved, str(tmp_path), options=options)
    loaded = tf.saved_model.load(str(tmp_path))
    del saved
    gc.collect()
    equal(loaded(x), expected)
    del r
    gc.collect()
    with pytest.raises(tf.errors.UnknownError, match="UsageError: the remote that this graph calls is gone"):
        loaded(x)


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("is_trainable", [False, True])
def test_a_graph_whose_variables_are_gone_holds_its_remote_while_it_can_be_called(
    remote: Callable[..., Remote], is_persistent: bool, is_trainable: bool
) -> None:
    """TensorFlow's graphs hold the variables' memory, not the variables, which only a tape asks for."""
    x, w = constant(4), constant(4, 4)
    made: list[weakref.ref[Any]] = []

    def build() -> Any:
        there = Remote(THERE["f"])
        made.append(weakref.ref(there.handle))
        factor = tf.Variable(tf.constant(3.0, tf.float64), trainable=is_trainable)
        graph = function(lambda x: loss_of(there)(x, w) * factor).get_concrete_function(x)
        with tf.GradientTape(persistent=is_persistent) as tape:
            tape.watch(x)
            y = graph(x)
        return graph, y, tape

    def trace_another() -> None:
        gc.collect()
        other = remote(torch.sin)
        function(lambda x: other(x))(x)

    graph, y, tape = build()
    trace_another()
    equal(graph(x), y)
    del graph
    trace_another()
    expected = slope(lambda x: loss_of(HERE["f"])(x, w) * 3.0, x)
    equal(tape.gradient(y, x), expected)
    del y, tape
    trace_another()
    gc.collect()
    assert made[0]() is None


def test_r39_a_size_that_is_padded_is_not_taken_for_fixed(remote: Callable[..., Remote]) -> None:
    """With a few rows 32 come out, whatever they are."""
    r = remote(lambda x: torch.nn.functional.pad(x, (0, -len(x) % 32)))
    padded = function(lambda x: r(x) * 2, input_signature=[tf.TensorSpec([None], tf.float64)])
    for n in (3, 32, 40):
        equal(padded(constant(n)), tf.pad(constant(n) * 2, [[0, -n % 32]]))
