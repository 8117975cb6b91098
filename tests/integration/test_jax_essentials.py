"""What a JAX program does with real workers, short enough to be run under every version of JAX.

`test_jax_versions.py` runs this file, and the unit tests of JAX's two ends, under the oldest and the newest one. So
there is nothing here that only today's JAX has, and no other framework in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gradwire as gw
from gradwire_wire.dtypes import BY_NAME
from tests.integration.conftest import TARGETS

Workers = Callable[[str], gw.Worker]


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """64 bits, as every version of JAX can be told."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="module")
def this_jax(shared_bridge: gw.Bridge) -> gw.Worker:
    """A JAX worker of the interpreter, and so of the JAX, that runs the tests."""
    return shared_bridge.worker("jax", python=sys.executable, path=[TARGETS], threads=1, x64=True)


@pytest.fixture(params=["torch", "jax"])
def remote(request: pytest.FixtureRequest, worker_of: Workers, this_jax: gw.Worker) -> Any:
    """A function of targets/reports_<framework>.py in its worker."""
    worker = this_jax if request.param == "jax" else worker_of("torch")
    return lambda name: worker.function(f"reports_{request.param}:{name}")


# ---- Derivatives ---------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(5)
X, W, V = RNG.normal(size=(5, 4)), RNG.normal(size=(4, 3)), RNG.normal(size=(3, 2))


def local(x: Any, w: Any, v: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w) @ v)


def _scan(f: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        y = f(x, W, V)
        return carry + y.sum(), y

    return jax.lax.scan(step, 0.0, X)


def _chain(f: Any) -> Callable[[Any], Any]:
    return lambda x: jax.lax.scan(lambda c, _: (c + f(c, W, V).sum(), None), x, None, length=4)[0].sum()


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "call": lambda f: f(X, W, V),
    "grad": lambda f: jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))(X, W, V),
    "jvp": lambda f: jax.jvp(f, (X, W, V), (X, W, V)),
    "hessian": lambda f: jax.hessian(lambda x: f(x, W, V).sum())(X[0]),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda *a: f(*a).sum(), (0, 1)), (0, None, None))(X, W, V),
    "scan": _scan,
    "grad of scan": lambda f: jax.grad(_chain(f))(X[0]),
    "while_loop": lambda f: jax.lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + f(s[1], W, V).sum()), (0, X[0])
    ),
    "checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(lambda x: f(x, W, V).sum())(x))(X[0]),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_process(remote: Any, name: str, compiled: bool) -> None:
    f = remote("perceptron")
    with_arrays = lambda f: lambda *a: f(*map(jnp.asarray, a))  # noqa: E731
    run = lambda f: PROGRAMS[name](with_arrays(f))  # noqa: E731
    got, wanted = (jax.jit(lambda: run(f)) if compiled else lambda: run(f))(), run(local)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_integers_have_float0_cotangents(remote: Any) -> None:
    w, index, mask = jnp.arange(4.0), jnp.array([0, 2, 2]), jnp.array([True, False, True])
    bars = jax.jit(jax.grad(remote("gather"), (0, 1, 2), allow_int=True))(w, index, mask)
    assert bars[0].tolist() == [1, 0, 1, 0] and bars[1].dtype == bars[2].dtype == jax.dtypes.float0


def test_complex_as_jax_has_it(remote: Any) -> None:
    assert jax.jit(jax.grad(lambda z: remote("squared_norm")(z).sum()))(jnp.array([3 + 4j])) == 6 - 8j


@pytest.mark.parametrize("compile", ["auto", False])
def test_r33_a_result_that_nothing_follows_has_no_part(this_jax: gw.Worker, compile: Any) -> None:
    """Its derivative is infinite here, and zero times that is not a number. Not every JAX's pullback takes nothing for a cotangent."""
    f, x = this_jax.function("reports_jax:beside_a_cusp").options(compile=compile), jnp.arange(1.0, 4)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x)[0].sum())(x), 2 * x)
    np.testing.assert_array_equal(jax.jit(jax.jacrev(lambda x: f(x)[0]))(x), jnp.diag(2 * x))
    _, pullback = f.vjp(np.asarray(x))
    ones = np.ones(3)
    np.testing.assert_array_equal(pullback((ones, None))[0], 2 * x)
    assert not pullback((None, None))[0].any() and np.isnan(pullback((None, ones))[0]).all()


@pytest.mark.parametrize("compile", ["auto", False])
def test_r33_nor_where_a_rule_of_the_users_is_not_linear(this_jax: gw.Worker, compile: Any) -> None:
    f, x = this_jax.function("reports_jax:clipped_backward").options(compile=compile), jnp.ones(3)
    np.testing.assert_array_equal(jax.grad(lambda x: f(x)[0].sum())(x), np.full(3, 0.5))
    np.testing.assert_array_equal(jax.grad(lambda x: f(x)[1].sum())(x), np.full(3, 3.0))


# ---- Dtypes --------------------------------------------------------------------------------------------------------


def test_every_dtype_every_bit(this_jax: gw.Worker) -> None:
    arrays = {}
    for name in BY_NAME:
        if not hasattr(jnp, "bool_" if name == "bool" else name):
            continue
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
        for shape in ((), (0, 3), (40, 50)):
            count = int(np.prod(shape)) * dtype.itemsize
            bits = np.random.default_rng(0).integers(0, 2 if name == "bool" else 256, count, np.uint8)
            arrays[f"{name}{shape}"] = bits.view(dtype).reshape(shape)
    assert len(arrays) >= 3 * 15
    sent = {key: jax.device_put(x) for key, x in arrays.items()}
    identity = this_jax.function("any_framework:identity")
    for results in (identity(sent), jax.jit(identity)(sent)):
        for key, x in arrays.items():
            got = np.asarray(results[key])
            assert (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes()), key


# ---- R41: order and number; R36: errors ----------------------------------------------------------------------------

ONE = np.ones(3, np.float32)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_r41_as_often_and_in_the_order_written(worker_of: Workers, compiled: bool) -> None:
    mode = jax.jit if compiled else lambda f: f
    net = worker_of("torch").module("reports_torch:Counter").train()
    scan = lambda x: jax.lax.scan(lambda c, _: (c, net(x)[0]), x, None, length=10)[1]  # noqa: E731
    unused = lambda x: (net(x), scan(x), net(x), x)[-1]  # noqa: E731
    assert mode(unused)(jnp.asarray(ONE)).tolist() == [1, 1, 1]
    assert net.buffers()["calls"] == 12
    log = worker_of("torch").module("reports_torch:Log").train()
    mode(lambda x: [log(x * 3), log(x), log(x * 2)][1])(jnp.asarray(ONE))
    assert log.buffers()["seen"].tolist() == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_r41_once_an_iteration_of_a_differentiated_loop_or_refused(
    worker_of: Workers, compiled: bool
) -> None:
    """Also where its arguments are the same in all: JAX moves such calls out, and before 0.4.36 asks nobody."""
    mode = jax.jit if compiled else lambda f: f
    net = worker_of("torch").module("reports_torch:Counter").train()

    def of_loop(a: Any, argument: Any) -> Any:
        body = lambda c, i: (c + net(argument(i))[0] * a, None)  # noqa: E731
        return jax.lax.scan(body, jnp.float32(0) * a, jnp.arange(5, dtype=jnp.float32))[0]

    mode(jax.grad(lambda a: of_loop(a, lambda i: jnp.asarray(ONE) * i)))(jnp.float32(2))
    jax.effects_barrier()
    assert net.buffers()["calls"] == 5
    invariant = mode(jax.grad(lambda a: of_loop(a, lambda i: jnp.asarray(ONE))))
    if jax.__version_info__ < (0, 4, 36):
        with pytest.raises(gw.UsageError, match="once instead of once an iteration"):
            invariant(jnp.float32(2))
        assert net.buffers()["calls"] == 5
    else:
        invariant(jnp.float32(2))
        jax.effects_barrier()
        assert net.buffers()["calls"] == 10


# ---- Python numbers ------------------------------------------------------------------------------------------------

NUMBERS: dict[str, Callable[[Any], Any]] = {
    "now": lambda f: f,
    "arrays now": lambda f: lambda x, n: f(x, jnp.asarray(n)),
    "jit": jax.jit,
    "vmap": lambda f: lambda x, n: jax.vmap(f, (None, 0))(x, jnp.broadcast_to(jnp.asarray(n), (2,))),
    "jit of scan": lambda f: jax.jit(lambda x, n: jax.lax.scan(lambda c, y: (f(c, n), y), x, x)[0]),
}


def slope(f: Any) -> Any:
    return jax.grad(lambda x, n: f(x, n).sum().astype(jnp.float32), 1)


def typed(tree: Any) -> Any:
    """What one sees of a tree of arrays, in values: shapes, dtypes, and whether they are weak."""
    return jax.tree.map(
        lambda x: (np.asarray(x).tolist(), x.dtype.name, x.aval.weak_type) if hasattr(x, "aval") else x, tree
    )


@pytest.mark.parametrize("x64", [True, False])
def test_a_number_that_is_traced_takes_the_dtype_of_what_it_meets(
    shared_bridge: gw.Bridge, x64: bool
) -> None:
    """As in one process: it is of JAX's weak type, there and back, and so is its gradient."""
    from tests.integration.targets import reports_jax

    worker = shared_bridge.worker("jax", python=sys.executable, path=[TARGETS], threads=1, x64=x64)
    jax.config.update("jax_enable_x64", x64)
    ways = [("bfloat16", way, 1.5) for way in NUMBERS]
    for dtype, way, n in [*ways, ("bfloat16", "jit", 2), ("float32", "jit", 1.5)]:
        x, mode = jnp.arange(3).astype(dtype), NUMBERS[way]
        for name in ("scaled", "numbers")[: 1 if "scan" in way else 2]:
            f, g = getattr(reports_jax, name), worker.function(f"reports_jax:{name}")
            assert typed(mode(g)(x, n)) == typed(mode(f)(x, n)), (dtype, way, n, name)
    f, g = reports_jax.scaled, worker.function("reports_jax:scaled")
    for mode in (NUMBERS["now"], jax.jit):
        assert typed(mode(slope(g))(x, 1.5)) == typed(mode(slope(f))(x, 1.5))


def test_r36_errors_are_seen_and_the_next_call_works(this_jax: gw.Worker, shared_bridge: gw.Bridge) -> None:
    spec = gw.ShapeDtype((3,), "float32")
    bad, good = (
        this_jax.function(f"any_framework:{name}").options(out_spec=spec) for name in ("bad", "double")
    )
    x = jnp.asarray(ONE)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad 42"):
            bad(x)
        with pytest.raises(Exception, match=r"bad 42(.|\n)*any_framework\.py"):
            jax.block_until_ready(jax.jit(bad)(x))
        with pytest.raises(Exception, match="bad 42"):
            jax.block_until_ready(jax.jit(jax.grad(lambda x: bad(x).sum()))(x))
        last = shared_bridge.last_error()
        assert isinstance(last, gw.RemoteError) and "any_framework.py" in last.traceback
        assert jax.jit(good)(x).tolist() == [2, 2, 2]
