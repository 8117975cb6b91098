"""A seed that is traced: the same compiled program, other random numbers at each call, and each call reproducible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire as gw

X = jnp.linspace(-1, 1, 400, dtype=jnp.float32).reshape(20, 20)


@pytest.fixture
def dropout(worker_of: Callable[[str], gw.Worker]) -> gw.Remote:
    return worker_of("torch").module("seeds:make_dropout").train()


def test_a_traced_seed_gives_what_the_number_gives(dropout: gw.Remote) -> None:
    traces = []

    @jax.jit
    def noisy(x: Any, seed: Any) -> Any:
        traces.append(1)
        return dropout.options(seed=seed)(x)

    first, again, other = noisy(X, 3), noisy(X, 3), noisy(X, 4)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, dropout.options(seed=3)(X))
    assert (first != other).any() and len(traces) == 1


def test_forward_and_pullback_share_the_mask_of_a_traced_seed(dropout: gw.Remote) -> None:
    @jax.jit
    def mask_and_gradient(x: Any, seed: Any) -> Any:
        f = dropout.options(seed=seed)
        y, pullback = jax.vjp(f, x)
        return y, *pullback(jnp.ones_like(y))

    for seed in (1, 2):
        y, x_bar = mask_and_gradient(X, seed)
        np.testing.assert_allclose(y, X * x_bar, rtol=1e-6)
        assert 0 < (x_bar == 0).mean() < 1


def test_a_key_is_a_seed_and_rows_may_have_seeds_of_their_own(dropout: gw.Remote) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    f = jax.jit(jax.vmap(lambda x, key: dropout.options(seed=key)(x), in_axes=(None, 0)))
    rows = f(X, keys)
    for row, key in zip(rows, keys, strict=True):
        np.testing.assert_array_equal(row, dropout.options(seed=key)(X))
    assert (rows[0] != rows[1]).any()


def test_seeds_in_a_scan_with_gradients(dropout: gw.Remote) -> None:
    def loss(x: Any) -> Any:
        def body(total: Any, seed: Any) -> Any:
            return total + dropout.options(seed=seed)(x).sum(), None

        return jax.lax.scan(body, jnp.float32(0), jnp.arange(5))[0]

    gradient = jax.jit(jax.grad(loss))(X)
    apart = sum(jax.grad(lambda x, s=s: dropout.options(seed=s)(x).sum())(X) for s in range(5))
    np.testing.assert_allclose(gradient, apart, rtol=1e-6)


@pytest.mark.parametrize("kind", [{}, {"owner": "worker"}, {"buffers": "explicit"}])
def test_a_traced_seed_of_a_functional_form(
    worker_of: Callable[[str], gw.Worker], kind: dict[str, str]
) -> None:
    remote = worker_of("torch").module("seeds:make_noisy_linear").train()
    _, *state = gw.jax.functional(remote, **kind)

    def noisy(seed: Any, x: Any) -> Any:
        apply = gw.jax.functional(remote.options(seed=seed), **kind)[0]
        return jax.tree.leaves(apply(*state, x))[0]

    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.jit(lambda keys: jax.lax.scan(lambda _, key: (0, noisy(key, X)), 0, keys)[1])(keys)
    for row, key in zip(rows, keys, strict=True):
        np.testing.assert_allclose(row, noisy(key, X), rtol=1e-6, atol=1e-6)
    assert (rows[0] != rows[1]).any()


def test_new_seeds_compile_nothing_in_jax_callers(dropout: gw.Remote) -> None:
    """Eagerly, with gradients, and of a target in any framework: the seed is an operand of one program."""
    from gradwire.jax import callback

    def both(seed: int) -> Any:
        return jax.value_and_grad(lambda x: dropout.options(seed=seed)(x).sum())(X)

    value, bar = both(0)
    programs = dropout.handle.caches.of(callback._compiled)
    compiled = programs.cache_info().misses
    masks = {bytes(np.asarray(both(seed)[1]).tobytes()) for seed in range(1, 20)}
    assert programs.cache_info().misses == compiled and len(masks) == 19
    again, same = both(0)
    assert again == value and (bar == same).all()
    large = [dropout.options(seed=2**40 + i)(X) for i in (0, 0, 1)]
    assert (large[0] == large[1]).all() and (large[0] != large[2]).any()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (jnp.zeros(3, int), "integer scalar"),
        (jnp.float32(1), "integer scalar"),
        (np.array([1, 2]), "integer"),
        (-1, "from 0"),
    ],
)
def test_what_is_no_seed_is_refused(dropout: gw.Remote, wrong: Any, sentence: str) -> None:
    with pytest.raises(gw.UsageError, match=sentence):
        dropout.options(seed=wrong)


def test_a_traced_seed_below_zero_is_refused_by_the_worker(dropout: gw.Remote) -> None:
    with pytest.raises(Exception, match="natural number"):
        jax.block_until_ready(jax.jit(lambda s: dropout.options(seed=s)(X))(-1))
