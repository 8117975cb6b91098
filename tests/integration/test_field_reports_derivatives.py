"""R31 to R42: what goes wrong with derivatives across a boundary, tried with real workers.

Closed forms and the caller's own framework are the oracles. (R30 and R36: test_compiled.py; R44: test_training.py.)
"""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradwire as gw

DIFFERENTIATING = ("torch", "tensorflow", "jax")
TARGETS = pathlib.Path(__file__).parent / "targets"
Workers = Callable[[str], gw.Worker]

every_worker = pytest.mark.parametrize("framework", DIFFERENTIATING)
every_mode = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """JAX with 64 bits."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def remote(worker_of: Workers, framework: str) -> Callable[[str], gw.Remote]:
    """A function of targets/reports_<framework>.py in its worker."""
    return lambda name: worker_of(framework).function(f"reports_{framework}:{name}")


def messages(worker: gw.Worker, act: Callable[[], Any]) -> int:
    """How many messages to the worker that makes; garbage and shapes have been seen to before."""
    act()
    gc.collect()
    before = worker.stats()["calls"]
    jax.block_until_ready(act())
    return int(worker.stats()["calls"] - before)


def jitted(function: Any, compiled: bool) -> Any:
    return jax.jit(function) if compiled else function


def traced(function: Any, compiled: bool) -> Any:
    return tf.function(function) if compiled else function


def close(got: Any, wanted: Any) -> None:
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wrong", [np.full(2, 1e-8), np.zeros(2, "f4"), np.zeros(3)])
def test_the_comparison_can_fail(wrong: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        close(wrong, np.zeros(2))


# ---- R31: integers and bools ---------------------------------------------------------------------------------------

W, INDEX, MASK = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0, 2, 2]), np.array([True, False, True])
W_BAR = np.array([1.0, 0.0, 1.0, 0.0])


@every_worker
@every_mode
def test_r31_integer_and_bool_arguments(remote: Any, compiled: bool) -> None:
    f = remote("gather")
    arrays = [jnp.asarray(a) for a in (W, INDEX, MASK)]
    close(jitted(jax.grad(f), compiled)(*arrays), W_BAR)
    alone, index_bar, mask_bar = jitted(jax.grad(f, (0, 1, 2), allow_int=True), compiled)(*arrays)
    close(alone, W_BAR)
    assert index_bar.dtype == mask_bar.dtype == jax.dtypes.float0

    w, index, mask = torch.tensor(W, requires_grad=True), torch.tensor(INDEX), torch.tensor(MASK)
    if not compiled:
        f(w, index, mask).backward()
        close(w.grad, W_BAR)
        assert index.grad is mask.grad is None

    def tape(*xs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(xs[0])
            y = f(*xs)
        return tape.gradient(y, xs[0])

    constants = [tf.constant(a) for a in (W, INDEX, MASK)]
    close(traced(tape, compiled)(*constants), W_BAR)
    with tf.GradientTape() as outer:
        outer.watch(constants[0])
        y = f(*constants)
    assert outer.gradient(y, constants[1:]) == [None, None]

    y, pullback = f.vjp(W, INDEX, MASK)
    bars = pullback(np.ones_like(y))
    close(bars[0], W_BAR)
    assert bars[1:] == (None, None)


@every_worker
@every_mode
def test_r31_an_integer_result_beside_a_float_one(remote: Any, compiled: bool) -> None:
    f = remote("top_two")
    values, x_bar = jitted(jax.value_and_grad(lambda x: (f(x)[0] ** 2).sum()), compiled)(jnp.asarray(W))
    close(x_bar, np.array([0.0, 0.0, 6.0, 8.0]))
    (values, indices), dots = jax.jvp(f, (jnp.asarray(W),), (jnp.asarray(W),))
    close(dots[0], W[[3, 2]])
    assert indices.tolist() == [3, 2] and dots[1].dtype == jax.dtypes.float0

    x = torch.tensor(W, requires_grad=True)
    values, indices = f(x)
    (values**2).sum().backward()
    close(x.grad, np.array([0.0, 0.0, 6.0, 8.0]))
    assert not indices.requires_grad and indices.tolist() == [3, 2]

    def tape(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(f(x)[0] ** 2)
        return tape.gradient(loss, x)

    close(traced(tape, compiled)(tf.constant(W)), np.array([0.0, 0.0, 6.0, 8.0]))


# ---- R32: complex numbers ------------------------------------------------------------------------------------------

Z = np.array([3 + 4j, -1 + 0.5j])
C = np.array([0.7 - 1.1j, 2j])  # a cotangent


@every_worker
@every_mode
def test_r32_each_caller_has_its_own_convention(remote: Any, compiled: bool) -> None:
    """|z|² at 3+4j is 6-8j to JAX and 6+8j to the others; z² and a function from real to complex with a cotangent."""
    norm, square, turn = remote("squared_norm"), remote("square"), remote("turn")
    x, z = W[:2], Z
    turned = np.real(np.conj(C) * (-np.sin(x) + 1j * np.cos(x)))  # Re<C, i exp(ix)>

    def in_jax(f: Any, at: Any, bar: Any) -> Any:
        return jitted(lambda at, bar: jax.vjp(f, at)[1](bar)[0], compiled)(jnp.asarray(at), jnp.asarray(bar))

    close(in_jax(norm, z, np.ones(2)), 2 * np.conj(z))
    close(in_jax(square, z, C), 2 * z * C)
    close(in_jax(turn, x, C), np.real(C * (-np.sin(x) + 1j * np.cos(x))))

    def in_torch(f: Any, at: Any, bar: Any) -> Any:
        at = torch.tensor(at, requires_grad=True)
        return torch.autograd.grad(f(at), at, torch.tensor(bar))[0]

    def in_tensorflow(f: Any, at: Any, bar: Any) -> Any:
        def tape(at: Any, bar: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(at)
                y = f(at)
            return tape.gradient(y, at, output_gradients=bar)

        return traced(tape, compiled)(tf.constant(at), tf.constant(bar))

    def by_hand(f: Any, at: Any, bar: Any) -> Any:
        return f.vjp(at)[1](bar)[0]

    for caller in (in_torch, in_tensorflow, by_hand):
        close(caller(norm, z, np.ones(2)), 2 * z)
        close(caller(square, z, C), 2 * np.conj(z) * C)
        close(caller(turn, x, C), turned)


@every_worker
def test_r32_forward_mode_and_second_order(remote: Any, framework: str) -> None:
    square, norm, dz = remote("square"), remote("squared_norm"), Z[::-1].copy()
    close(jax.jvp(square, (jnp.asarray(Z),), (jnp.asarray(dz),))[1], 2 * Z * dz)
    close(torch.func.jvp(square, (torch.tensor(Z),), (torch.tensor(dz),))[1], 2 * Z * dz)
    close(square.jvp((Z,), (dz,))[1], 2 * Z * dz)
    twice = lambda f: lambda z: jax.grad(lambda z: (f(z) ** 2).sum())(z)  # noqa: E731
    local = lambda z: (z * z.conj()).real  # noqa: E731
    pull = lambda f: jax.vjp(twice(f), jnp.asarray(Z))[1](jnp.asarray(C))[0]  # noqa: E731
    close(pull(norm), pull(local))


# ---- R33: unused and detached --------------------------------------------------------------------------------------


@every_worker
@every_mode
def test_r33_unused_arguments(remote: Any, compiled: bool) -> None:
    f = remote("first_only")
    a, b = jnp.asarray(W), jnp.asarray(2 * W)
    a_bar, b_bar = jitted(jax.grad(lambda a, b: f(a, b).sum(), (0, 1)), compiled)(a, b)
    close(a_bar, np.full(4, 2.0))
    close(b_bar, np.zeros(4))
    a, b = torch.tensor(W, requires_grad=True), torch.tensor(W, requires_grad=True)
    f(a, b).sum().backward()
    close(a.grad, np.full(4, 2.0))
    assert b.grad is None
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(f(a, b).sum(), (a, b))

    def tape(a: Any, b: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            y = f(a, b)
        return tape.gradient(y, [a, b])

    a_bar, b_bar = traced(tape, compiled)(tf.constant(W), tf.constant(W))
    close(a_bar, np.full(4, 2.0))
    assert b_bar is None or (compiled and not np.any(b_bar))  # a graph is made before anybody knows
    _, pullback = f.vjp(W, W)
    close(pullback(np.ones(4))[1], np.zeros(4))


@every_worker
def test_r33_a_result_that_nothing_follows(remote: Any, worker_of: Workers, framework: str) -> None:
    """b has no gradient in torch, where the worker's framework tells that from zeros; nothing is asked twice."""
    f, a = remote("apart"), torch.tensor(W, requires_grad=True)
    found = []

    def one_of_two() -> None:
        b = torch.tensor(W, requires_grad=True)
        a.grad = None
        f(a, b)[0].sum().backward()
        found.append(b.grad)

    assert messages(worker_of(framework), one_of_two) == 2
    close(a.grad, np.full(4, 2.0))
    for b_bar in found:
        assert b_bar is None if framework != "jax" else not b_bar.any()
    _, pullback = f.vjp(W, W)
    for bar, which in (((np.ones(4), None), 0), ((None, np.ones(4)), 1)):
        close(pullback(bar)[which], np.full(4, 2.0 + which))
        close(pullback(bar)[1 - which], np.zeros(4))


@every_worker
@every_mode
def test_r33_a_result_that_nothing_follows_has_no_part(remote: Any, compiled: bool) -> None:
    """Its derivative is infinite here, and zero times that is not a number."""
    f, x = remote("beside_a_cusp"), jnp.asarray(W)
    first = lambda x: f(x)[0].sum()  # noqa: E731
    close(jitted(jax.grad(first), compiled)(x), 2 * W)
    close(jitted(jax.vmap(jax.grad(first)), compiled)(jnp.asarray(X)), 2 * X)
    close(jitted(jax.grad(lambda x: (jax.grad(first)(x) ** 2).sum()), compiled)(x), 8 * W)
    close(jitted(jax.jacrev(lambda x: f(x)[0]), compiled)(x), np.diag(2 * W))
    aside = lambda x: jax.grad(lambda x: (f(x)[0].sum(), f(x)[1]), has_aux=True)(x)[0]  # noqa: E731
    close(jitted(aside, compiled)(x), 2 * W)
    assert np.isnan(jax.grad(lambda x: f(x)[1].sum())(x)).all()

    own = torch.tensor(W, requires_grad=True)
    if compiled:
        torch.compile(lambda x: f(x)[0].sum() * 1, backend="aot_eager")(own).backward()
    else:
        f(own)[0].sum().backward()
    close(own.grad, 2 * W)
    close(torch.func.grad(lambda x: f(x)[0].sum())(torch.tensor(W)), 2 * W)

    _, pullback = f.vjp(W)
    close(pullback((np.ones(4), None))[0], 2 * W)
    assert np.isnan(pullback((np.ones(4), np.zeros(4)))[0]).all()  # which was asked for


@every_worker
@every_mode
def test_r33_a_detached_result_and_some_leaves(remote: Any, compiled: bool) -> None:
    f, state = remote("detached"), remote("some_leaves")
    bars = jitted(jax.grad(lambda a, b: sum(y.sum() for y in f(a, b)), (0, 1)), compiled)(W, W)
    close(bars[0], np.full(4, 2.0))
    close(bars[1], np.zeros(4))
    a = torch.tensor(W, requires_grad=True)
    sum(y.sum() for y in f(a, torch.tensor(W))).backward()
    close(a.grad, np.full(4, 2.0))
    leaves = {"a": jnp.asarray(W), "b": [jnp.asarray(W), jnp.asarray(3.0)], "c": 7}
    whole = lambda a, b: state({"a": a, "b": [b, jnp.asarray(3.0)], "c": 7})  # noqa: E731
    a_bar, b_bar = jitted(jax.grad(whole, (0, 1)), compiled)(leaves["a"], leaves["b"][0])
    close(a_bar, 6 * W)
    close(b_bar, np.zeros(4))
    _, pullback = state.vjp({"a": W, "b": [W, np.array(3.0)], "c": 7})
    (bars,) = pullback(np.ones(()))
    close(bars["a"], 6 * W)
    close(bars["b"][0], np.zeros(4))
    close(bars["b"][1], (W**2).sum())
    assert bars["c"] is None


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_r33_a_target_that_leaves_its_framework_is_told_of_once(remote: Any, framework: str) -> None:
    f = remote("by_numpy").options(out_spec=gw.ShapeDtype((4,), "float64"))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        close(jax.jit(jax.grad(lambda x: f(x).sum()))(jnp.asarray(W)), np.zeros(4))
        x = torch.tensor(W, requires_grad=True)
        f(x).sum().backward()
        assert x.grad is None
        deadline = time.monotonic() + 20
        while "gradient of reports_" not in said.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert said.getvalue().count(f"the gradient of reports_{framework}:by_numpy is zero") == 1


# ---- R34: batches --------------------------------------------------------------------------------------------------

X, V = np.random.default_rng(0).normal(size=(5, 4)), np.random.default_rng(1).normal(size=(4, 3))
U = np.random.default_rng(2).normal(size=(3, 2))


def local_perceptron(x: Any, v: Any, u: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ v) @ u)


BATCHES: dict[str, tuple[Callable[..., Any], int]] = {
    "in_axes (0, None, None)": (lambda f: jax.vmap(f, (0, None, None))(X, V, U), 1),
    "in_axes 1": (lambda f: jax.vmap(f, (1, None, None))(X.T, V, U), 1),
    "in_axes -1": (lambda f: jax.vmap(f, (-1, None, None), -1)(X.T, V, U), 1),
    "a dict": (
        lambda f: jax.vmap(lambda d, v: f(d["x"], v, d["u"]), ({"x": 0, "u": None}, None))(
            {"x": X, "u": U}, V
        ),
        1,
    ),
    "nested": (
        lambda f: jax.vmap(jax.vmap(f, (0, None, None)), (None, 0, None))(X, np.stack([V, 2 * V]), U),
        1,
    ),
    "of grad": (lambda f: jax.vmap(jax.grad(lambda *a: f(*a).sum(), (0, 1)), (0, None, None))(X, V, U), 2),
    "grad of": (
        lambda f: jax.grad(lambda *a: jax.vmap(f, (0, None, None))(*a).sum(), (0, 1, 2))(X, V, U),
        2,
    ),
    "jacrev": (lambda f: jax.jacrev(f, (0, 1))(X[0], V, U), 2),
    "jacfwd": (lambda f: jax.jacfwd(f)(X[0], V, U), 2),
    "a batch of 1": (lambda f: jax.vmap(jax.grad(lambda *a: f(*a).sum()), (0, None, None))(X[:1], V, U), 2),
    "a batch of 0": (lambda f: jax.vmap(jax.grad(lambda *a: f(*a).sum()), (0, None, None))(X[:0], V, U), 0),
}


@cache
def local_batch(case: str) -> list[Any]:
    return jax.tree.leaves(jax.jit(lambda: BATCHES[case][0](local_perceptron))())


@every_worker
@pytest.mark.parametrize("case", BATCHES)
def test_r34_a_batch_is_one_message(remote: Any, worker_of: Workers, framework: str, case: str) -> None:
    f, (make, most) = remote("perceptron"), BATCHES[case]
    program = jax.jit(lambda: make(lambda *a: f(*map(jnp.asarray, a))))
    for got, wanted in zip(jax.tree.leaves(program()), local_batch(case), strict=True):
        close(got, wanted)
    assert messages(worker_of(framework), program) == most


@every_worker
def test_r34_a_batch_from_torch_is_one_message(remote: Any, worker_of: Workers, framework: str) -> None:
    f, (x, v, u) = remote("perceptron"), map(torch.tensor, (X, V, U))
    local = lambda x, v, u: torch.tanh(torch.tanh(x @ v) @ u)  # noqa: E731
    of_grad = lambda f: torch.func.vmap(torch.func.grad(lambda *a: f(*a).sum(), (0, 1)), (0, None, None))  # noqa: E731
    for got, wanted in zip(of_grad(f)(x, v, u), of_grad(local)(x, v, u), strict=True):
        close(got, wanted)
    assert messages(worker_of(framework), lambda: torch.func.vmap(f, (0, None, None))(x, v, u).numpy()) == 1
    assert messages(worker_of(framework), lambda: of_grad(f)(x, v, u)[0].numpy()) == 2


def test_r34_sequential_is_a_call_for_each_row(worker_of: Workers) -> None:
    """options(vmap="sequential"): for functions that must not see a batch; also of derivatives."""
    worker = worker_of("torch")
    f = worker.function("reports_torch:perceptron").options(vmap="sequential")
    row = lambda f: lambda x: f(x, jnp.asarray(V), jnp.asarray(U))  # noqa: E731
    program = jax.jit(jax.vmap(row(f)))
    close(program(jnp.asarray(X)), local_perceptron(X, V, U))
    assert messages(worker, lambda: program(jnp.asarray(X))) == len(X)
    of_grad = lambda f: jax.vmap(jax.grad(lambda x: row(f)(x).sum()))(jnp.asarray(X))  # noqa: E731
    close(of_grad(f), of_grad(local_perceptron))


# ---- R35: shapes in compiled programs ------------------------------------------------------------------------------


@every_worker
def test_r35_nobody_writes_shapes(remote: Any) -> None:
    f = remote("perceptron")
    program, graph = jax.jit(f), tf.function(lambda x: f(x, V, U))
    for n in (5, 2, 1):
        close(program(jnp.asarray(X[:n]), jnp.asarray(V), jnp.asarray(U)), local_perceptron(X[:n], V, U))
        close(graph(tf.constant(X[:n])), local_perceptron(X[:n], V, U))
    narrow = [jnp.asarray(a, jnp.float32) for a in (X, V, U)]
    assert jax.eval_shape(f, *narrow).dtype == program(*narrow).dtype == np.float32
    spec = f.spec(gw.ShapeDtype((7, 4), "float64"), V, U)
    assert spec == gw.ShapeDtype((7, 2), "float64")


@every_worker
def test_r35_shapes_that_depend_on_values_say_what_to_do(remote: Any) -> None:
    f, x = remote("positive"), np.array([1.0, -1.0, 2.0])
    wanted = np.array([1.0, 2.0])
    close(f(jnp.asarray(x)), wanted)
    close(f(torch.tensor(x)), wanted)
    close(f(tf.constant(x)), wanted)
    with pytest.raises(gw.UsageError, match="out_spec"):
        jax.jit(f)(jnp.asarray(x))
    with pytest.raises(Exception, match="out_spec"):
        tf.function(lambda x: f(x))(tf.constant(x))
    declared = f.options(out_spec=gw.ShapeDtype((2,), "float64"))
    close(jax.jit(declared)(jnp.asarray(x)), wanted)
    close(jax.jit(jax.grad(lambda x: (declared(x) ** 2).sum()))(jnp.asarray(x)), np.array([2.0, 0.0, 4.0]))
    for wrong in (gw.ShapeDtype((3,), "float64"), gw.ShapeDtype((2,), "float32")):
        with pytest.raises(Exception, match="announced"):
            jax.block_until_ready(jax.jit(f.options(out_spec=wrong))(jnp.asarray(x)))


# ---- R36: errors in compiled programs (JAX: test_compiled.py) ------------------------------------------------------


@pytest.mark.parametrize("caller", ["numpy", "torch", "torch.compile", "tensorflow", "tf.function"])
def test_r36_errors_in_every_caller(worker_of: Workers, shared_bridge: gw.Bridge, caller: str) -> None:
    """Message, file and line; the whole traceback in last_error; the second time as the first; then all is well."""
    spec = gw.ShapeDtype((3,), "float32")
    bad, good = (
        worker_of("torch").function(f"any_framework:{name}").options(out_spec=spec)
        for name in ("bad", "double")
    )
    torch._dynamo.reset()
    make: dict[str, Callable[[Any], tuple[Any, Any]]] = {
        "numpy": lambda f: (f, ONE),
        "torch": lambda f: (f, torch.tensor(ONE, requires_grad=True)),
        "torch.compile": lambda f: (
            torch.compile(lambda x: f(x), backend="aot_eager", fullgraph=True),
            torch.tensor(ONE),
        ),
        "tensorflow": lambda f: (f, tf.constant(ONE)),
        "tf.function": lambda f: (tf.function(lambda x: f(x)), tf.constant(ONE)),
    }
    function, x = make[caller](bad)
    for _ in range(2):
        with pytest.raises(Exception, match=r"bad 42(.|\n)*any_framework\.py") as caught:
            function(x)
        assert isinstance(caught.value, ValueError) or caller == "tf.function"
        last = shared_bridge.last_error()
        assert isinstance(last, gw.RemoteError) and 'any_framework.py", line' in last.traceback
    function, x = make[caller](good)
    y = function(x)
    assert (y.detach() if isinstance(y, torch.Tensor) else np.asarray(y)).tolist() == [2, 2, 2]


# ---- R37: second order and forward mode ----------------------------------------------------------------------------


@every_worker
@every_mode
def test_r37_a_silent_zero_is_the_worst_outcome(remote: Any, compiled: bool) -> None:
    f, x = remote("cube"), np.array([1.5, -2.0])
    total = lambda x: f(x).sum()  # noqa: E731
    at = jnp.asarray(x)
    close(jitted(jax.grad(lambda x: jax.grad(total)(x).sum()), compiled)(at), 6 * x)
    close(jitted(jax.hessian(total), compiled)(at), np.diag(6 * x))
    close(jitted(lambda x: jax.jvp(f, (x,), (x,))[1], compiled)(at), 3 * x**3)
    close(jitted(lambda x: jax.linearize(f, x)[1](x), compiled)(at), 3 * x**3)
    third = jax.grad(lambda x: jax.grad(lambda x: jax.grad(total)(x).sum())(x).sum())
    close(jitted(third, compiled)(at), np.full(2, 6.0))

    def nested(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = f(x)
            g = inner.gradient(y, x)
        return outer.gradient(g, x)

    close(traced(nested, compiled)(tf.constant(x)), 6 * x)
    if not compiled:
        a = torch.tensor(x, requires_grad=True)
        (g,) = torch.autograd.grad(total(a), a, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), a, create_graph=True)
        close(h.detach(), 6 * x)
        close(torch.autograd.grad(h.sum(), a)[0], np.full(2, 6.0))
        close(torch.func.hessian(total)(a.detach()), np.diag(6 * x))
        close(f.jvp((x,), (x,))[1], 3 * x**3)


# ---- R38: trees and keywords ---------------------------------------------------------------------------------------


OURS = ("params", "parameters", "buffers", "call", "function", "module")


@every_worker
def test_r38_keywords_may_have_any_name(worker_of: Workers, framework: str) -> None:
    f = worker_of(framework).function("any_framework:claims_our_names")
    names = dict.fromkeys((*OURS, "self", "target", "args", "kwargs"), 2.0)
    close(f(W, **names), 1024 * W)
    close(f.submit(W, **names).result(60), 1024 * W)
    close(f.vjp(W, **names)[1](W)[0], 1024 * W)
    assert f.spec(W, **names).shape == (4,)


def test_r38_keywords_of_a_module_may_have_any_name(worker_of: Workers) -> None:
    net, names = worker_of("torch").module("in_torch:Claiming", target=0.25), dict.fromkeys(OURS, 2.0)
    whole = np.full(4, 16 * W.sum())
    close(net(W, **names), whole)
    close(gw.torch.Module(net)(torch.tensor(W), **names).detach(), whole)
    for kind in ({}, {"buffers": "explicit"}):
        apply, *state = gw.jax.functional(net, **kind)
        close(jax.tree.leaves(apply(*state, jnp.asarray(W), **names))[0], whole)


@every_worker
@every_mode
def test_r38_a_gradient_through_one_leaf_of_the_result(remote: Any, compiled: bool) -> None:
    f, mask = remote("tree"), np.array([1.0, 0.0, 1.0, 0.0])
    through_y = lambda x, m: (f(x, scale=3.0, mode="b", mask=m)["y"] ** 2).sum()  # noqa: E731
    x_bar, m_bar = jitted(jax.grad(through_y, (0, 1)), compiled)(jnp.asarray(W), jnp.asarray(mask))
    close(x_bar, 18 * W * mask)
    close(m_bar, 18 * W**2 * mask)
    x, m = torch.tensor(W, requires_grad=True), torch.tensor(mask, requires_grad=True)
    through_y(x, m).backward()
    close(x.grad, 18 * W * mask)
    close(m.grad, 18 * W**2 * mask)

    def tape(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = f(x, mode="s")
            assert out["aux"][1:] == (None, "s", 3) and list(out) == ["y", "aux"]
        return tape.gradient(out["y"], x)

    close(traced(tape, compiled)(tf.constant(W)), np.full(4, 2.0))
    out, pullback = f.vjp(W, scale=3.0, mode="b", mask=mask)
    assert out["aux"][1:] == (None, "b", 3) and type(out["aux"]) is tuple
    (x_bar,), bars = pullback({"y": np.ones(4), "aux": (None, None, None, None)}, kwargs=True)
    close(x_bar, 3 * mask)
    close(bars["mask"], 3 * W)
    assert bars["scale"] is bars["mode"] is None


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize("framework", ["torch"])
def test_r38_namedtuples_dataclasses_and_keys_that_are_no_strings(remote: Any, worker_of: Workers) -> None:
    from dataclasses import make_dataclass

    f = remote("containers")
    box = make_dataclass("Box", ["inside", "label"])
    ordered = collections.OrderedDict(z=np.ones(2), a=np.zeros(2))
    a, b = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    (pair, kept), pullback = f.vjp(Pair(a, b), box(np.array(5.0), "label"), ordered, {3: a, 4: None})
    close(pair.a, 3 * a + 5 * b)
    assert list(kept) == ["z", "a"] and pair.b.label == "label"
    out_bar = (type(pair)(np.ones(2), None), collections.OrderedDict(z=None, a=None))
    pair_bar, box_bar, ordered_bar, numbered_bar = pullback(out_bar)
    close(pair_bar.a, np.full(2, 2.0))
    close(pair_bar.b, np.full(2, 5.0))
    close(box_bar.inside, b.sum())
    assert box_bar.label is None and list(numbered_bar) == [3, 4]
    close(numbered_bar[3], np.ones(2))
    close(ordered_bar["z"], np.zeros(2))


@pytest.mark.parametrize("framework", ["torch"])
def test_r38_records_that_only_the_worker_knows_are_results_of_compiled_programs(remote: Any) -> None:
    for target in ("pair_of_its_own", "box_of_its_own", "output_of_its_own"):
        f, x = remote(target), jnp.arange(3.0)
        rows, (y, y_dot) = jax.vmap(f)(jnp.stack([x, x])), jax.jvp(jax.jit(f), (x,), (x,))
        assert type(rows) is type(y) is type(y_dot), target
        close(rows.twice[1], 2 * x)
        close(y.twice, 2 * x)
        close(y_dot.twice, 2 * x)
        t = torch.arange(3.0, dtype=torch.float64)
        close(torch.func.vmap(f)(torch.stack([t, t])).twice[1], 2 * x)
        close(tf.function(f)(tf.range(3.0, dtype=tf.float64)).twice, 2 * x)
    assert list(y) == ["twice"] and y["twice"] is y[0] is y.twice and y.nothing is None


@pytest.mark.parametrize("framework", ["torch"])
def test_r38_what_torch_has_names_for_is_a_tree_to_jax_where_torch_is_loaded_beside_it(remote: Any) -> None:
    f, x = remote("largest"), jnp.array([1.0, 3.0, 2.0])
    for found in (f(x), jax.jit(f)(x)):
        assert type(found) is torch.return_types.max
        assert [int(y) for y in jax.tree.leaves(found)] == [6, 1]
    rows = jax.vmap(f)(jnp.stack([x, -x]))
    close(rows.values, [6.0, -2.0])
    close(jax.grad(lambda x: f(x).values)(x), [0.0, 2.0, 0.0])


@pytest.mark.parametrize("framework", ["torch"])
def test_r18_a_result_that_cannot_be_sent_is_refused_by_its_place(remote: Any) -> None:
    f = remote("sparse_among")
    for x in (np.ones(3), torch.ones(3, requires_grad=True), jnp.ones(3)):  # the second is kept as well
        with pytest.raises(gw.UnsupportedTensorError, match=r"^result\['matrix'\]: .*layout sparse_coo"):
            f(x)


# ---- R37, from TensorFlow: forward mode --------------------------------------------------------------------------


@every_worker
def test_r37_accumulators_around_a_tf_function(remote: Any) -> None:
    """Right, in a loop too, whether the function was traced before or is traced now."""
    f, x, dot = remote("cube"), tf.constant([1.5, -2.0], tf.float64), tf.constant([1.0, 3.0], tf.float64)

    def program(f: Any) -> Callable[[Any], Any]:
        step = lambda i, x: (i + 1, tf.sin(f(x)))  # noqa: E731
        return lambda x: tf.while_loop(lambda i, x: i < 2, step, (tf.constant(0), tf.cos(f(x))))[1]

    def tangent(function: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(x, dot) as accumulator:
            y = function(x)
        return accumulator.jvp(y)

    wanted = tangent(program(lambda x: x**3))
    fresh, traced_before = tf.function(program(f)), tf.function(program(f))
    traced_before(x)
    for function in (program(f), fresh, traced_before):
        close(tangent(function), wanted)
    with pytest.raises(Exception, match=r"cannot pass through a remote call inside a(.|\n)*remote\.jvp"):
        tf.function(lambda x: tangent(f))(x)


def test_r37_an_accumulator_and_a_numpy_worker(worker_of: Workers) -> None:
    """TensorFlow's forward mode is two pullbacks, of which numpy functions have one: the sentence says so."""
    f = worker_of("numpy").function("in_numpy:square")
    x = tf.constant(W)
    with pytest.raises(gw.UsageError, match=r"ForwardAccumulator asks for the pullback of a pullback"):
        with tf.autodiff.ForwardAccumulator(x, x):
            f(x)
    close(f.jvp((W,), (W,))[1], 2 * W * W)


# ---- R40: state that moves -----------------------------------------------------------------------------------------

ROWS = np.random.default_rng(4).normal(size=(8, 6)).astype(np.float32)
MODULES = {"torch": "reports_torch:make_noisy", "tensorflow": "reports_tensorflow:make_noisy"}


def mean_of(net: gw.Remote) -> np.ndarray:
    return next(value for name, value in net.buffers().items() if "mean" in name)


@pytest.mark.parametrize("framework", MODULES)
@pytest.mark.parametrize("caller", ["jax", "jit", "torch", "tensorflow", "tf.function", "numpy"])
def test_r40_one_batch_is_counted_once(worker_of: Workers, framework: str, caller: str) -> None:
    """The mean moves once for a forward with its pullback; the pullback has the forward's dropout mask."""
    net = worker_of(framework).module(MODULES[framework]).train()
    momentum = {"torch": 0.1, "tensorflow": 0.01}[framework]
    for n in range(2):
        y, x_bar = FORWARD_AND_PULLBACK[caller](net)
        wanted = ROWS.mean(0) * (1 - (1 - momentum) ** (n + 1))
        np.testing.assert_allclose(mean_of(net), wanted, rtol=1e-4, atol=1e-6)
        assert 0 < (y == 0).sum() < y.size
        # the mask of the pullback is the one that the forward's zeros show
        np.testing.assert_allclose(x_bar, normalised_pullback(np.where(y == 0, 0, 2).astype("f4")), atol=2e-3)
    net.spec(ROWS)
    np.testing.assert_allclose(mean_of(net), wanted, rtol=1e-4, atol=1e-6)


def normalised_pullback(bar: np.ndarray) -> np.ndarray:
    """The pullback of train-mode batch normalisation at `ROWS`, scale 1."""
    x = torch.tensor(ROWS, requires_grad=True)
    torch.nn.functional.batch_norm(x, None, None, training=True).backward(torch.tensor(bar))
    assert x.grad is not None
    return x.grad.numpy()


def _from_jax(net: Any, compiled: bool = False) -> Any:
    def act(x: Any) -> Any:
        y, pull = jax.vjp(net, x)
        return y, pull(jnp.ones_like(y))[0]

    return [np.asarray(v) for v in jitted(act, compiled)(jnp.asarray(ROWS))]


def _from_torch(net: Any) -> Any:
    x = torch.tensor(ROWS, requires_grad=True)
    y = net(x)
    y.sum().backward()
    return y.detach().numpy(), x.grad.numpy()  # type: ignore[union-attr]


def _from_tensorflow(net: Any, compiled: bool = False) -> Any:
    def act(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = net(x)
        return y, tape.gradient(y, x)

    return [v.numpy() for v in traced(act, compiled)(tf.constant(ROWS))]


def _by_hand(net: Any) -> Any:
    y, pullback = net.vjp(ROWS)
    x_bar = pullback(np.ones_like(y))[0]
    np.testing.assert_array_equal(x_bar, pullback(np.ones_like(y))[0])
    return y, x_bar


FORWARD_AND_PULLBACK: dict[str, Callable[[Any], Any]] = {
    "jax": _from_jax,
    "jit": lambda net: _from_jax(net, True),
    "torch": _from_torch,
    "tensorflow": _from_tensorflow,
    "tf.function": lambda net: _from_tensorflow(net, True),
    "numpy": _by_hand,
}


@pytest.mark.parametrize("reentrant", [False, True])
def test_r40_checkpoint_does_not_draw_another_mask(worker_of: Workers, reentrant: bool) -> None:
    """It would compute the forward again in the backward pass: refused, but for calls with a seed of their own."""
    from torch.utils.checkpoint import checkpoint

    net = worker_of("torch").module(MODULES["torch"]).train()
    x = torch.tensor(ROWS, requires_grad=True)
    y = checkpoint(lambda x: torch.sin(net(x)), x, use_reentrant=reentrant)
    with pytest.raises(gw.UsageError, match=r"torch\.utils\.checkpoint.*another dropout mask"):
        y.sum().backward()
    y = checkpoint(net.options(seed=3), x, use_reentrant=reentrant)
    y.sum().backward()
    mask = np.where(y.detach() == 0, 0, 2).astype("f4")
    np.testing.assert_allclose(x.grad, normalised_pullback(mask), atol=2e-3)


# ---- R41: dropped, repeated or reordered ---------------------------------------------------------------------------

ONE = np.ones(3, np.float32)


def _scan(net: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c, net(x)[0]), x, None, length=10)[1]


COUNTED: dict[str, tuple[Callable[..., Any], int]] = {
    "an unused result": (lambda net, x: (net(x), x)[1], 1),
    "a scan of 10": (_scan, 10),
    "a scan of 10 with unused results": (lambda net, x: (_scan(net, x), x)[1], 10),
    "twice with equal arguments": (lambda net, x: (net(x), net(x)), 2),
    "grad with an unused value": (lambda net, x: jax.grad(lambda x: (net(x), x.sum())[1])(x), 1),
}


@every_mode
@pytest.mark.parametrize("case", COUNTED)
def test_r41_xla_makes_as_many_calls_as_written(worker_of: Workers, case: str, compiled: bool) -> None:
    net, (act, wanted) = worker_of("torch").module("reports_torch:Counter").train(), COUNTED[case]
    program = jitted(lambda x: act(net, x), compiled)
    for n in (1, 2):
        results = jax.tree.leaves(program(jnp.asarray(ONE)))
        assert net.buffers()["calls"] == n * wanted
    if "unused" not in case:
        seen = sorted(float(v) for y in results for v in (y if case == "a scan of 10" else y[:1]))
        assert seen == [1.0 + wanted + i for i in range(wanted)]


@pytest.mark.parametrize("caller", ["jax", "jit", "torch", "torch.compile", "tensorflow", "tf.function"])
def test_r41_three_independent_calls_happen_in_the_order_written(worker_of: Workers, caller: str) -> None:
    net = worker_of("torch").module("reports_torch:Log").train()
    three = lambda x: [net(x * 3), net(x), net(x * 2)][1]  # noqa: E731
    if caller in ("jax", "jit"):
        jitted(three, caller == "jit")(jnp.asarray(ONE))
    elif caller == "torch":
        three(torch.tensor(ONE))
    elif caller == "torch.compile":
        torch._dynamo.reset()
        torch.compile(three, backend="aot_eager", fullgraph=True)(torch.tensor(ONE))
    else:
        traced(three, caller == "tf.function")(tf.constant(ONE))
    assert net.buffers()["seen"].tolist() == [3.0, 1.0, 2.0]


# ---- R42: kept forwards --------------------------------------------------------------------------------------------

LONG, LONGER = np.ones(4096), np.ones(2 * 65536)


def resident_mb(worker: gw.Worker) -> float:
    status = pathlib.Path(f"/proc/{worker.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def _differentiable_forward(caller: str, f: gw.Remote, at: np.ndarray) -> Callable[[], Any]:
    if caller == "jax":
        x = jnp.asarray(at)
        return lambda: jax.vjp(f, x)
    if caller == "torch":
        leaf = torch.tensor(at, requires_grad=True)
        return lambda: f(leaf)
    if caller == "tensorflow":
        constant = tf.constant(at)

        def taped() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(constant)
                return f(constant), tape

        return taped
    return lambda: f.vjp(at)


def growth_mb(worker: gw.Worker, forward: Callable[[], Any], times: int) -> float:
    """By how much the worker's memory grows, after it has had what it needs."""
    for _ in range(50):
        forward()
    gc.collect()
    before = resident_mb(worker)
    for _ in range(times):
        forward()
    return resident_mb(worker) - before


@every_worker
@pytest.mark.parametrize("caller", ["torch", "tensorflow", "jax", "numpy"])
def test_r42_forwards_nobody_pulls_back(remote: Any, worker_of: Workers, framework: str, caller: str) -> None:
    forward = _differentiable_forward(caller, remote("cube"), LONGER)
    assert growth_mb(worker_of(framework), forward, 125) < 32  # the arguments alone would take 64 MB


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "times"), [("torch", 10_000), ("tensorflow", 3000), ("jax", 3000)])
def test_r42_ten_thousand_of_them(remote: Any, worker_of: Workers, framework: str, times: int) -> None:
    forward = _differentiable_forward("torch", remote("cube"), LONG)
    assert growth_mb(worker_of(framework), forward, times) < 32  # of 96 MB and more


def test_r42_the_measure_can_fail(worker_of: Workers) -> None:
    f, kept = worker_of("torch").function("reports_torch:cube"), []
    assert growth_mb(worker_of("torch"), lambda: kept.append(f.vjp(LONGER)[1]), 100) > 64


@pytest.mark.slow
def test_r42_compiled_programs_release_nothing_and_are_bounded(worker_of: Workers) -> None:
    """Of forwards that were pulled back, a quarter of the bound of 512 MB stays; from there on memory is flat."""
    worker = worker_of("torch")
    f = worker.function("reports_torch:cube")
    step, x, x_bar = jax.jit(jax.grad(lambda x: f(x).sum())), jnp.asarray(LONG), None
    for n in range(4500):  # 72 KB each
        x_bar = step(x)
        if n == 2500:
            before = resident_mb(worker)
    close(x_bar, np.full(4096, 3.0))
    assert resident_mb(worker) - before < 64


@every_worker
def test_r42_the_gradient_of_a_scan_of_1000(remote: Any) -> None:
    """A thousand forwards are kept at once: no bound in number drops the first of them."""
    f = remote("first_only")
    scan = lambda x: jax.lax.scan(lambda c, _: (f(c, x) * 0.5, None), x, None, length=1000)[0].sum()  # noqa: E731
    close(jax.jit(jax.grad(scan))(jnp.asarray(W)), np.ones(4))


@every_worker
def test_r42_a_pullback_twice(remote: Any) -> None:
    f = remote("cube")
    y, pullback = f.vjp(W)
    close(pullback(np.ones(4))[0], 3 * W**2)
    close(pullback(np.full(4, 2.0))[0], 6 * W**2)
    pullback.release()
    with pytest.raises(gw.ResidualLostError):
        pullback(np.ones(4))
    y, pull = jax.vjp(f, jnp.asarray(W))
    close(pull(jnp.ones(4))[0], 3 * W**2)
    close(pull(2 * jnp.ones(4))[0], 6 * W**2)
    x = torch.tensor(W, requires_grad=True)
    y = f(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    close(x.grad, 6 * W**2)


PROGRAM = """
import gradwire as gw, numpy as np, torch
with gw.connect() as bridge:
    worker = bridge.worker("torch", python={python!r}, path=[{targets!r}], threads=1)
    cube = worker.function("reports_torch:cube")
    x = torch.ones(3, requires_grad=True)
    y, (_, pullback) = cube(x), cube.vjp(np.ones(3))
    worker.restart()
    y.sum().backward()  # pure, and torch has the primals: computed again
    assert x.grad.tolist() == [3, 3, 3]
    try:
        pullback(np.ones(3))
    except gw.ResidualLostError as error:
        assert "recompute" in str(error)
        print("done")
"""


def test_r42_after_a_restart_a_pure_call_is_computed_again(torch_python: str) -> None:
    program = PROGRAM.format(python=str(torch_python), targets=str(TARGETS))
    run = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=110
    )
    assert run.returncode == 0 and run.stdout.strip() == "done", run.stderr[-3000:]


@pytest.mark.parametrize("framework", ["jax"])
def test_a_remote_has_its_targets_name(remote: Any) -> None:
    cube = remote("cube")
    assert cube.__name__ == "cube"
    close(jax.jit(jax.named_call(cube))(W), W**3)
