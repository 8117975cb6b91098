"""The JAX caller: every derivative equals what JAX itself computes of the same function.

The worker is a double in this process (torch in a thread of its own); the oracle is plain JAX.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

import gradwire.jax
from gradwire.families import family_of, is_leaf
from gradwire.site import Site
from gradwire_wire.errors import UnsupportedTensorError, UsageError
from gradwire_wire.structures import flatten
from tests.doubles.patience import soon
from tests.doubles.torch_handle import TorchHandle

# torch loads scripted code of its own when it first differentiates forwards.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning"),
    pytest.mark.usefixtures("xla_way"),
]

Function = Callable[..., Any]


@pytest.fixture(autouse=True, scope="module")
def wide() -> Iterator[None]:
    """64-bit types on: rounding must not hide a wrong derivative."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


class Remote:
    """What `gradwire.Remote` does, over a double."""

    def __init__(self, target: Function, **site: Any) -> None:
        self.handle = TorchHandle(target)
        self.options = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        structure, leaves = flatten([list(args), kwargs], is_leaf)
        return gradwire.jax.call(self.handle, Site(structure, **self.options), leaves)

    @property
    def counts(self) -> dict[str, int]:
        """What the worker was asked for, spec left out; counting starts afresh."""
        counts = {k: v for k, v in self.handle.counts.items() if k not in ("spec", "message", "released")}
        self.handle.counts.clear()
        return counts


@pytest.fixture(scope="module")
def shared(xla_way: str) -> Iterator[Remote]:
    """One remote for all transformations: what an eager call compiles is kept for each remote."""
    remote = Remote(torch_f)
    yield remote
    gc.collect()
    remote.handle.close()


@pytest.fixture
def remote() -> Iterator[Callable[..., Remote]]:
    made: list[Remote] = []

    def make(target: Function, **site: Any) -> Remote:
        made.append(Remote(target, **site))
        return made[-1]

    yield make
    for r in made:
        r.handle.close()


def equal(got: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Same tree, shapes and dtypes, and values that differ by rounding only."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, tolerance, tolerance * max(1.0, np.abs(b).max(initial=0)))


def test_the_comparison_can_fail() -> None:
    for wrong in (jnp.ones(3), jnp.zeros(2), jnp.zeros(3, "float32"), (jnp.zeros(3),)):
        with pytest.raises(AssertionError):
            equal(wrong, jnp.zeros(3))


# ---- Every transformation, one by one and in each other ------------------------------------------------------------


def torch_f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tanh(x @ w) * x.sum(), (x**3).sum()


def jax_f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.tanh(x @ w) * x.sum(), (x**3).sum()


def loss_of(f: Function) -> Function:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        y, z = f(x, w)
        return (y**2).sum() + z

    return loss


def scanned(f: Function, length: int = 6, wrap: Function = lambda step: step) -> Function:
    step = lambda w: wrap(lambda c, _: (jnp.sin(f(c, w)[0]), None))  # noqa: E731
    return lambda x, w: lax.scan(step(w), x, None, length=length)[0].sum()


def looped(f: Function) -> Function:
    return lambda x, w: lax.while_loop(
        lambda s: s[0] < 5, lambda s: (s[0] + 1, jnp.sin(f(s[1], w)[0])), (0, x)
    )[1]


def checkpointed(f: Function, **options: Any) -> Function:
    return lambda x, w: jax.checkpoint(lambda x: loss_of(f)(jnp.sin(x), w), **options)(x)


def vmapped_sum(f: Function) -> Function:
    return lambda X, w: jax.vmap(loss_of(f), (0, None))(X, w).sum()


def linearized_twice(f: Function) -> Function:
    def both(x: Any, w: Any) -> Any:
        _, line = jax.linearize(f, x, w)
        return line(x, w), line(2 * x, w)

    return both


def pulled_twice(f: Function) -> Function:
    def both(x: Any, w: Any) -> Any:
        y, pull = jax.vjp(f, x, w)
        return pull(y), pull(jax.tree.map(lambda a: a * 2, y))

    return both


def mapped_pullbacks(f: Function) -> Function:
    def pulled(X: Any, w: Any) -> Any:
        y, pulls = jax.vmap(lambda x: jax.vjp(lambda x: f(x, w), x))(X)
        return jax.vmap(lambda pull, c: pull(c))(pulls, y)

    return pulled


def across_jits(f: Function) -> Function:
    forward, backward = jax.jit(lambda x, w: jax.vjp(f, x, w)), jax.jit(lambda pull, c: pull(c))

    def pulled(x: Any, w: Any) -> Any:
        y, pull = forward(x, w)
        return backward(pull, y), backward(pull, y)

    return pulled


rng = np.random.RandomState(0)
W, X1, X5, W5 = rng.randn(4, 4), rng.randn(4), rng.randn(5, 4), rng.randn(5, 4, 4)
SAVEABLE = jax.checkpoint_policies

ONE = {  # of (x, w)
    "forward": lambda f: f,
    "grad": lambda f: jax.grad(loss_of(f)),
    "grad of both": lambda f: jax.grad(loss_of(f), (0, 1)),
    "value_and_grad": lambda f: jax.value_and_grad(loss_of(f), (0, 1)),
    "grad of one result": lambda f: jax.grad(lambda x, w: f(x, w)[1]),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (x, w * 2)),
    "jvp of one argument": lambda f: lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (x,)),
    "linearize, used twice": linearized_twice,
    "vjp, pulled twice": pulled_twice,
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "hessian": lambda f: jax.hessian(loss_of(f), (0, 1)),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(loss_of(f))),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(loss_of(f))),
    "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(loss_of(f))),
    "grad of grad": lambda f: jax.grad(lambda x, w: (jax.grad(loss_of(f))(x, w) ** 2).sum(), (0, 1)),
    "third order": lambda f: jax.grad(
        lambda x, w: (jax.grad(lambda x, w: (jax.grad(loss_of(f))(x, w) ** 2).sum())(x, w) ** 2).sum()
    ),
    "hvp, forward over reverse": lambda f: (
        lambda x, w: jax.jvp(jax.grad(lambda x: loss_of(f)(x, w)), (x,), (x,))[1]
    ),
    "hvp, reverse over forward": lambda f: (
        lambda x, w: jax.grad(lambda x: jax.jvp(lambda x: loss_of(f)(x, w), (x,), (jnp.ones_like(x),))[1])(x)
    ),
    "scan": lambda f: lambda x, w: lax.scan(lambda c, _: (f(c, w)[0], f(c, w)[1]), x, None, length=6),
    "grad of scan": lambda f: jax.grad(scanned(f), (0, 1)),
    "hessian of scan": lambda f: jax.hessian(scanned(f, 3)),
    "while_loop": looped,
    "jvp of while_loop": lambda f: lambda x, w: jax.jvp(lambda x: looped(f)(x, w), (x,), (x,)),
    "grad of cond": lambda f: jax.grad(
        lambda x, w: lax.cond(x.sum() > 100, lambda x: f(x, w)[0], lambda x: f(2 * x, w)[0], x).sum()
    ),
    "grad of checkpoint": lambda f: jax.grad(checkpointed(f)),
    "grad of checkpoint in scan": lambda f: jax.grad(scanned(f, 4, jax.checkpoint)),
    "hessian of checkpoint": lambda f: jax.hessian(checkpointed(f)),
    "checkpoint, everything": lambda f: jax.grad(checkpointed(f, policy=SAVEABLE.everything_saveable)),
    "checkpoint, dots": lambda f: jax.grad(checkpointed(f, policy=SAVEABLE.dots_saveable)),
}
MANY = {  # of (X, w)
    "vmap": lambda f: jax.vmap(f, (0, None)),
    "vmap over axis 1": lambda f: lambda X, w: jax.vmap(f, (1, None))(X.T, w),
    "vmap over the last axis": lambda f: lambda X, w: jax.vmap(f, (-1, None), (0, -1))(X.T, w),
    "grad of vmap": lambda f: jax.grad(vmapped_sum(f), (0, 1)),
    "hessian of vmap": lambda f: jax.hessian(vmapped_sum(f)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(loss_of(f), (0, 1)), (0, None)),
    "vmap of hessian": lambda f: jax.vmap(jax.hessian(loss_of(f)), (0, None)),
    "vmap of jvp": lambda f: jax.vmap(lambda x, w: jax.jvp(f, (x, w), (x, w)), (0, None)),
    "vmap of grad, batch 1": lambda f: lambda X, w: jax.vmap(jax.grad(loss_of(f)), (0, None))(X[:1], w),
    "vmap of grad, batch 0": lambda f: lambda X, w: jax.vmap(jax.grad(loss_of(f)), (0, None))(X[:0], w),
    "grad of vmap, batch 0": lambda f: lambda X, w: jax.grad(vmapped_sum(f), (0, 1))(X[:0], w),
    "lax.map": lambda f: lambda X, w: lax.map(lambda x: f(x, w), X),
    "vmap of grad of scan": lambda f: jax.vmap(jax.grad(scanned(f)), (0, None)),
    "vmap of pullbacks": mapped_pullbacks,
}
PAIRS = {  # of (X, WW)
    "vmap over both": jax.vmap,
    "nested vmap": lambda f: jax.vmap(jax.vmap(f, (0, None)), (None, 0)),
    "grad of nested vmap": lambda f: jax.grad(
        lambda X, WW: jax.vmap(jax.vmap(loss_of(f), (0, None)), (None, 0))(X, WW).sum(), (0, 1)
    ),
    "vmap of grad over both": lambda f: jax.vmap(jax.grad(loss_of(f), (0, 1))),
}
# Each exercises rules of its own; the others are combinations.
QUICK = {
    *(
        "forward",
        "grad of both",
        "jvp of one argument",
        "linearize, used twice",
        "vjp, pulled twice",
        "third order",
    ),
    *("hessian", "while_loop", "grad of scan", "grad of checkpoint", "vmap over axis 1", "grad of vmap"),
    *(
        "vmap of grad",
        "vmap of grad, batch 0",
        "grad of vmap, batch 0",
        "vmap of pullbacks",
        "grad of nested vmap",
    ),
}
QUICK_EAGER = {
    "forward",
    "grad of both",
    "jvp of one argument",
    "vjp, pulled twice",
    "vmap of grad",
    "while_loop",
}
CELLS = [
    pytest.param(
        *(name, make, arrays, mode),
        id=f"{name}-{mode}",
        marks=[] if name in (QUICK if mode == "jit" else QUICK_EAGER) else [pytest.mark.slow],
    )
    for cells, arrays in ((ONE, (X1, W)), (MANY, (X5, W)), (PAIRS, (X5, W5)))
    for name, make in cells.items()
    for mode in ("eager", "jit")
]
assert {*ONE, *MANY, *PAIRS} >= QUICK | QUICK_EAGER
_oracles: dict[str, Any] = {}


@pytest.mark.parametrize(("name", "make", "arrays", "mode"), CELLS)
def test_transformation(shared: Any, name: str, make: Function, arrays: Any, mode: str) -> None:
    arguments = [jnp.asarray(a) for a in arrays]
    if name not in _oracles:
        _oracles[name] = jax.jit(make(jax_f))(*arguments)
    function = make(shared)
    got = (jax.jit(function) if mode == "jit" else function)(*arguments)
    equal(got, _oracles[name])


@pytest.mark.parametrize(
    "sequential", ["vmap of grad", "grad of vmap", pytest.param("vmap of hessian", marks=pytest.mark.slow)]
)
def test_vmap_row_by_row(remote: Any, sequential: str) -> None:
    arguments = [jnp.asarray(X5), jnp.asarray(W)]
    f = remote(torch_f, vmap="sequential")
    equal(jax.jit(MANY[sequential](f))(*arguments), jax.jit(MANY[sequential](jax_f))(*arguments))
    assert not {"keep_rows", "pull_rows"} & set(f.counts)


def test_a_pullback_outlives_the_program_that_made_it(remote: Any) -> None:
    arguments = [jnp.asarray(X1), jnp.asarray(W)]
    equal(across_jits(remote(torch_f))(*arguments), across_jits(jax_f)(*arguments))


# ---- What the worker is asked for ----------------------------------------------------------------------------------

COUNTS: list[tuple[str, Function, Any, dict[str, int]]] = [
    ("a call keeps nothing", lambda f: f, (X1, W), {"plain": 1}),
    ("grad is one forward and one pullback", lambda f: jax.grad(loss_of(f)), (X1, W), {"keep": 1, "pull": 1}),
    (
        "a pullback nobody calls keeps nothing",
        lambda f: lambda x, w: jax.vjp(f, x, w)[0],
        (X1, W),
        {"plain": 1},
    ),
    (
        "vmap of grad is one forward and one pullback",
        lambda f: jax.vmap(jax.grad(loss_of(f)), (0, None)),
        (X5, W),
        {"keep_rows": 1, "pull_rows": 1},
    ),
    ("grad of vmap is too", lambda f: jax.grad(vmapped_sum(f)), (X5, W), {"keep": 1, "pull": 1}),
    ("a batch of none is no message", lambda f: jax.vmap(f, (0, None)), (X5[:0], W), {}),
    (
        "jvp is a forward and a tangent of it",
        lambda f: lambda x, w: jax.jvp(f, (x, w), (x, w)),
        (X1, W),
        {"keep": 1, "push": 1},
    ),
    ("an unused call is none", lambda f: lambda x, w: (f(x, w), x)[1], (X1, W), {}),
]


@pytest.mark.parametrize(("make", "arrays", "counts"), [c[1:] for c in COUNTS], ids=[c[0] for c in COUNTS])
def test_messages_of_a_compiled_program(remote: Any, make: Function, arrays: Any, counts: Any) -> None:
    f = remote(torch_f)
    jax.block_until_ready(jax.jit(make(f))(*arrays))
    assert f.counts == counts


def test_equal_forwards_may_be_one_pulled_twice(remote: Any) -> None:
    f = remote(torch_f)
    twice = lambda f: lambda x: (jax.grad(loss_of(f))(x, W), jax.grad(loss_of(f), 1)(x, W))  # noqa: E731
    equal(jax.jit(twice(f))(X1), jax.jit(twice(jax_f))(X1))
    assert f.counts in ({"keep": 1, "pull": 2}, {"keep": 2, "pull": 2})  # early jax does not merge


def test_recomputing_keeps_nothing(remote: Any) -> None:
    f = remote(torch_f, residuals="recompute")
    equal(jax.jit(jax.grad(loss_of(f)))(X1, W), jax.grad(loss_of(jax_f))(X1, W))
    assert f.counts == {"plain": 1, "recompute": 1}


def test_eager_tokens_are_given_back_when_they_are_dropped(remote: Any) -> None:
    f = remote(torch_f)
    y, pull = jax.vjp(f, X1, W)
    gc.collect()
    assert len(f.handle.kept) == 1
    pull(y), pull(y)
    assert f.counts == {"keep": 1, "pull": 2}
    del pull
    jax.block_until_ready(jax.vmap(jax.grad(loss_of(f)), (0, None))(X5, W))
    assert soon(lambda: not f.handle.kept)


def test_grad_of_a_long_scan(remote: Any) -> None:
    f = remote(torch_f)
    equal(jax.jit(jax.grad(scanned(f, 1000)))(X1, W), jax.jit(jax.grad(scanned(jax_f, 1000)))(X1, W))
    assert f.counts == {"keep": 1000, "pull": 1000}


# ---- Complex numbers: JAX's convention at the caller, the adjoint on the wire --------------------------------------

A = rng.randn(3, 3) + 1j * rng.randn(3, 3)
Z, DZ = rng.randn(3) + 1j * rng.randn(3), rng.randn(3) + 1j * rng.randn(3)
TORCH_A = torch.from_numpy(A)
COMPLEX = {
    "holomorphic": (lambda z: torch.exp(TORCH_A @ z) * z**2, lambda z: jnp.exp(A @ z) * z**2),
    "not holomorphic": (
        lambda z: torch.conj(z) * (TORCH_A @ z) * torch.abs(z) ** 2,
        lambda z: jnp.conj(z) * (A @ z) * jnp.abs(z) ** 2,
    ),
    "to real": (
        lambda z: torch.abs(TORCH_A @ z) ** 2 + z.imag**3,
        lambda z: jnp.abs(A @ z) ** 2 + z.imag**3,
    ),
}


def complex_cells(f: Function, ct: Any, ct_dot: Any) -> dict[str, Any]:
    pull = lambda z, c: jax.vjp(f, z)[1](c)[0]  # noqa: E731
    squares = lambda z: (jnp.abs(f(z)) ** 2).sum()  # noqa: E731
    return {
        "vjp": lambda z, dz: pull(z, ct),
        "jvp": lambda z, dz: jax.jvp(f, (z,), (dz,)),
        "vjp of vjp": lambda z, dz: jax.vjp(pull, z, ct)[1](dz),
        "jvp of vjp": lambda z, dz: jax.jvp(pull, (z, ct), (dz, ct_dot)),
        "vjp of jvp": lambda z, dz: jax.vjp(lambda z, d: jax.jvp(f, (z,), (d,))[1], z, dz)[1](ct),
        "grad of a real loss": lambda z, dz: jax.grad(squares)(z),
        "jacrev of grad": lambda z, dz: jax.jacrev(lambda z: jax.grad(squares)(z).real)(z),
        "vmap of vjp": lambda z, dz: jax.vmap(lambda z: pull(z, ct))(jnp.stack([z, dz])),
        "third order": lambda z, dz: jax.vjp(lambda z: jax.vjp(lambda z: pull(z, ct), z)[1](dz)[0], z)[1](dz),
    }


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.slow), "jit"])
@pytest.mark.parametrize("kind", COMPLEX)
def test_r32_complex(remote: Any, kind: str, mode: str) -> None:
    torch_side, jax_side = COMPLEX[kind]
    one = jnp.ones_like(jax_side(Z))
    is_real = not jnp.iscomplexobj(one)
    cotangents = (1.3 * one, 2.0 * one) if is_real else ((0.7 - 1.1j) * one, 2j * one)
    f = remote(torch_side)
    got = lambda z, dz: {k: cell(z, dz) for k, cell in complex_cells(lambda z: f(z), *cotangents).items()}  # noqa: E731
    oracle = lambda z, dz: {k: cell(z, dz) for k, cell in complex_cells(jax_side, *cotangents).items()}  # noqa: E731
    equal(
        (jax.jit(got) if mode == "jit" else got)(jnp.asarray(Z), jnp.asarray(DZ)),
        jax.jit(oracle)(Z, DZ),
        1e-9,
    )


def test_r32_the_convention_itself(remote: Any) -> None:
    f = remote(lambda z: (z * z.conj()).real)
    assert jax.grad(f)(jnp.array(3 + 4j)) == 6 - 8j


def test_conjugation_keeps_every_bit() -> None:
    tiny = np.array([5e-324 - 5e-324j, complex(np.inf, -0.0), complex(-0.0, np.nan)])
    turned = gradwire.jax.callback._conjugate(tiny)
    assert turned.real.tobytes() == tiny.real.tobytes()
    assert (np.signbit(turned.imag) != np.signbit(tiny.imag)).all()
    assert (np.abs(turned.imag) == np.abs(tiny.imag))[:2].all()
    assert gradwire.jax.callback._conjugate(tiny[:0].reshape(0, 2)).shape == (0, 2)
    assert gradwire.jax.callback._conjugate(np.array(1j)) == -1j


# ---- What has no derivative ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_r31_integer_and_bool_arguments(remote: Any, mode: str) -> None:
    f = remote(lambda w, i, m: (w[i] * m).sum())
    arguments = (jnp.asarray(X1), jnp.array([0, 2, 2]), jnp.array([True, False, True]))
    oracle = lambda w, i, m: (w[i] * m).sum()  # noqa: E731
    make = lambda f: jax.grad(f, (0, 1, 2), allow_int=True)  # noqa: E731
    equal((jax.jit(make(f)) if mode == "jit" else make(f))(*arguments), make(oracle)(*arguments))
    equal(jax.grad(f)(*arguments), jax.grad(oracle)(*arguments))


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_r31_integer_results(remote: Any, mode: str) -> None:
    f = remote(lambda x: tuple(torch.topk(x, 2)))

    def oracle(x: Any) -> Any:
        values, indices = lax.top_k(x, 2)
        return values, indices.astype(jnp.int64)

    def cells(f: Function) -> Function:
        def run(x: Any) -> Any:
            (values, indices), pull = jax.vjp(f, x)
            pulled = pull((values, np.zeros(indices.shape, jax.dtypes.float0)))
            cubes = lambda x: (f(x)[0] ** 3).sum()  # noqa: E731
            return values, indices, pulled, jax.hessian(cubes)(x), jax.vmap(f)(jnp.stack([x, -x]))

        return run

    equal((jax.jit(cells(f)) if mode == "jit" else cells(f))(jnp.asarray(X1)), cells(oracle)(jnp.asarray(X1)))
    primal, tangent = jax.jvp(f, (jnp.asarray(X1),), (jnp.asarray(X1),))
    assert tangent[1].dtype == jax.dtypes.float0 and primal[1].dtype == jnp.int64


def test_results_that_are_all_integers_keep_nothing(remote: Any) -> None:
    f = remote(lambda x: torch.argmax(x))
    _, tangent = jax.jvp(f, (jnp.asarray(X1),), (jnp.asarray(X1),))
    assert tangent.dtype == jax.dtypes.float0 and f.counts == {"plain": 1}


@pytest.mark.parametrize("mode", ["eager", "jit"])
@pytest.mark.parametrize(
    "body", [lambda a, b: 2 * a, lambda a, b: 2 * a + b.detach(), lambda a, b: (2 * a).detach()]
)
def test_r33_unused_and_detached(remote: Any, body: Any, mode: str) -> None:
    f = remote(body)
    grad = jax.grad(lambda a, b: f(a, b).sum(), (0, 1))
    for g in (jax.jit(grad) if mode == "jit" else grad)(jnp.asarray(X1), jnp.asarray(X1)):
        assert g.shape == X1.shape and set(np.unique(g)) <= {0.0, 2.0}


# ---- Trees, scalars, numpy -----------------------------------------------------------------------------------------


def tree_f(x: Any, *, scale: float = 1.0, mode: str = "a", mask: Any = None) -> Any:
    y = x * scale
    return {"y": y if mask is None else y * mask, "aux": (x.sum(), None, mode, 3), 7: [x * x]}


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_r38_trees_and_keywords(remote: Any, mode: str) -> None:
    f = remote(tree_f)
    mask = jnp.array([1.0, 0.0, 1.0, 0.0])

    def run(f: Function) -> Function:
        def picked(x: Any, m: Any) -> Any:
            out = f(x, scale=2.5, mode="b", mask=m)
            assert out["aux"][1:] == (None, "b", 3) and list(out) == ["y", "aux", 7]
            gradient = jax.grad(lambda x, m: (f(x, scale=2.5, mask=m)["y"] ** 2).sum(), (0, 1))(x, m)
            return out["y"], out["aux"][0], out[7], gradient

        return jax.jit(picked) if mode == "jit" else picked

    equal(run(f)(jnp.asarray(X1), mask), run(tree_f)(jnp.asarray(X1), mask))


SCALAR = {
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of grad": lambda f: jax.grad(jax.grad(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (2.0,)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](1.0),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](2.0),
    "hessian": jax.hessian,
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
}


@pytest.mark.parametrize("transform", SCALAR.values(), ids=SCALAR.keys())
def test_r20_python_scalars_as_primals(remote: Any, transform: Function) -> None:
    """JAX takes them for arrays where it differentiates, and hands them to the rules as they are."""
    equal(transform(remote(lambda x: x**3 + x))(0.5), transform(lambda x: x**3 + x)(0.5))


@pytest.mark.parametrize(
    "transposed",
    [
        lambda f: f,
        jax.vmap,
        lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones(3),))[1],
        lambda f: jax.grad(lambda x: f(x).sum()),
    ],
    ids=["the call", "its batch", "its tangent", "its gradient"],
)
def test_what_is_not_known_to_be_linear_is_not_transposed(remote: Any, transposed: Function) -> None:
    f = transposed(remote(lambda x: x**2 if x.ndim else 3 * x))
    with pytest.raises(UsageError, match=r"cannot be transposed .* jax.linearize\(f, x\)\[1\]"):
        jax.linear_transpose(f, jnp.ones(3))(jnp.ones(3))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_the_derivative_of_a_linear_target_is_transposed(remote: Any, wrap: Function) -> None:
    """As its error says: so solves with a remote operator have gradients."""
    matrix = np.array([[4.0, 1.0, 0.0], [0.0, 3.0, 1.0], [1.0, 0.0, 5.0]])
    f = remote(lambda x: torch.tensor(matrix) @ x)

    def solved(b: jax.Array) -> jax.Array:
        return jax.scipy.sparse.linalg.gmres(jax.linearize(f, b)[1], b, tol=1e-12)[0].sum()

    equal(wrap(jax.grad(solved))(jnp.ones(3)), jnp.linalg.solve(matrix.T, jnp.ones(3)))


def symbolic(*shapes: str) -> list[Any]:
    """Abstract arrays of shapes such as "n, 3", with the same symbols."""
    export = pytest.importorskip("jax.export", reason="in JAX 0.4 it needs absl, which nothing else does")
    scope = export.SymbolicScope()
    found = [export.symbolic_shape(shape, scope=scope) for shape in shapes]
    return [jax.ShapeDtypeStruct(shape, np.float64) for shape in found]


def test_r35_a_program_for_shapes_with_symbols_is_refused(remote: Any) -> None:
    shapes = symbolic("n, 3")
    exporting = jax.export.export(jax.jit(remote(lambda x: x**3)))
    with pytest.raises(UnsupportedTensorError, match=r"a shape with symbols, \(n, 3\)"):
        exporting(*shapes)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.grad(lambda *a: f(*a).sum())])
def test_r35_shapes_with_symbols_are_told(remote: Any, transform: Function) -> None:
    """Keras with the JAX backend asks so for each layer of a model whose batch has no size yet."""
    f = remote(lambda x, y: x @ y[:, :1].expand(-1, 3) * 2)
    operands = symbolic("n, m", "m, 5")
    expected = jax.eval_shape(
        transform(lambda x, y: x @ jnp.broadcast_to(y[:, :1], (y.shape[0], 3)) * 2), *operands
    )
    told = jax.eval_shape(transform(f), *operands)
    assert (told.shape, told.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("f", [lambda x: x.reshape(-1), lambda x: x[::2], lambda x: x[:-1]])
def test_r35_other_sizes_than_constants_and_symbols_are_refused(remote: Any, f: Function) -> None:
    called = remote(f)
    with pytest.raises(UsageError, match="neither constant nor one of these symbols"):
        jax.eval_shape(called, *symbolic("n, 8"))


def test_r20_python_scalars_beside_much(remote: Any) -> None:
    """Large operands take another way than small ones."""
    f, x = remote(lambda x, s: x * s), jnp.ones(200_000)
    equal(jax.grad(lambda s: f(x, s).sum())(0.5), jnp.asarray(2e5))


def test_r20_scalars_beside_what_is_differentiated(remote: Any) -> None:
    def power(x: Any, n: Any) -> Any:
        assert isinstance(x, jax.Array) or type(n) is int
        return x**n

    x = jnp.arange(3.0)
    y, pull = jax.vjp(remote(power), x, 3)
    equal(y, x**3)
    equal(pull(y)[0], 3 * x**2 * y)
    equal(jax.jvp(lambda x: remote(power)(x, 2), (x,), (x,))[1], 2 * x * x)


def test_r20_python_scalars_promote_nothing(remote: Any) -> None:
    f = remote(lambda x, *rest: x * 2 if rest else x)
    x = jnp.ones(3, jnp.bfloat16)
    for scalar in (2.0, 3, True, None, "mean", 10**20, np.float64(2)):
        assert f(x, scalar).dtype == jnp.bfloat16


@pytest.mark.parametrize("mode", ["eager", "jit", "grad"])
def test_numpy_operands_are_constants(remote: Any, mode: str) -> None:
    f = remote(torch_f)
    weights = W.copy()
    if mode == "grad":
        f = remote(torch_f, residuals="recompute")
        y, pull = jax.vjp(lambda x: f(x, weights), jnp.asarray(X1))
        weights[:] = 0
        equal(pull(y), jax.vjp(lambda x: jax_f(x, W), jnp.asarray(X1))[1](y))
        return
    run = lambda x: f(x, weights)  # noqa: E731
    run = jax.jit(run) if mode == "jit" else run
    equal(run(jnp.asarray(X1)), jax_f(X1, W))


def test_weak_types_and_empty_arrays(remote: Any) -> None:
    f = remote(lambda x: x * 2)
    assert jax.grad(f)(jnp.asarray(1.0)) == 2
    for shape in [(0,), (0, 3), (1, 8, 0, 2)]:
        empty = jnp.zeros(shape, jnp.float32)
        assert f(empty).shape == jax.jit(f)(empty).shape == shape
        assert jax.jit(jax.grad(lambda x: f(x).sum()))(empty).shape == shape


def test_new_shapes_are_traced_anew(remote: Any) -> None:
    f = jax.jit(remote(lambda x: x.sum(0)))
    for shape in [(3,), (5,), (2, 3), (0, 4)]:
        assert f(jnp.ones(shape)).shape == shape[1:]


def test_under_disable_jit(remote: Any) -> None:
    f = remote(torch_f)
    with jax.disable_jit():
        equal(jax.grad(loss_of(f))(jnp.asarray(X1), W), jax.grad(loss_of(jax_f))(jnp.asarray(X1), W))


@pytest.mark.parametrize("size", [3, 300_000])
def test_a_call_at_once_is_a_transfer_that_was_asked_for(remote: Any, size: int) -> None:
    """Not an implicit one, which a transfer guard would refuse."""
    f, x = remote(lambda x, w: x * w), jnp.ones(size)
    with jax.transfer_guard("disallow"):
        y = f(x, np.full(size, 2.0))
        with pytest.raises(Exception, match="Disallowed"):  # the program's own
            jnp.sin(np.ones(size))
    equal(y, 2 * x)
    with jax.transfer_guard_host_to_device("disallow"):
        x_bar, _ = jax.vjp(f, x, x)[1](x)
    equal(x_bar, x)


def test_r37_numpy_arrays_that_jax_has_typed(remote: Any) -> None:
    """Where a numpy array is differentiated by, `stop_gradient` and the rules of a custom_vjp have one of a class of JAX's own."""
    f, families = remote(lambda x, y: x * y), set()

    @jax.custom_vjp
    def product(x: Any, y: Any) -> Any:
        families.update(map(family_of, (x, y)))
        return f(x, y)

    product.defvjp(lambda x, y: (product(x, y), (x, y)), lambda given, c: (f(c, given[1]), f(given[0], c)))
    x = np.arange(1.0, 5.0)
    x_bar, y_bar = jax.grad(lambda x, y: product(x, y).sum(), (0, 1))(x, 2 * x)
    assert families == {"jax"} and (x_bar == 2 * x).all() and (y_bar == x).all()
    assert (jax.grad(lambda x: f(x, lax.stop_gradient(x)).sum())(x) == x).all()


def test_under_debug_nans(remote: Any) -> None:
    """It names the remote function, where it looked for the operation in the call itself for ever."""
    f, bad = remote(lambda x: x * 2), jnp.array([1.0, np.nan])
    with jax.debug_nans(True):
        assert f(jnp.ones(2)).tolist() == [2.0, 2.0]
        for call in (f, jax.jit(f)):
            with pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in double"):
                call(np.asarray(bad))


@pytest.mark.parametrize("elements", [10, 100_000, 3_000_000])
def test_r30_between_other_operations(remote: Any, elements: int) -> None:
    f = remote(lambda x: x * 2)
    run = jax.jit(lambda x: jnp.sin(f(jnp.cos(x))))
    x = jnp.linspace(0, 1, elements)
    for _ in range(3):
        result = run(x)
    np.testing.assert_allclose(result[:: elements // 10], np.sin(2 * np.cos(x))[:: elements // 10], 1e-12)
