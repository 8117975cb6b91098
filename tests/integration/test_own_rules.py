"""R37 for functions with derivative rules of their own: every order is what JAX gives of the same function here."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire as gw

TARGET = pathlib.Path(__file__).parent / "targets" / "own_rules.py"
Function = Callable[..., Any]

X, W, V = np.array([0.7, -1.3]), np.array([1.1, -0.6]), np.array([0.3, 0.9])


def local(name: str) -> Function:
    spec = importlib.util.spec_from_file_location("own_rules", TARGET)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Function = getattr(module, name)
    return found


def total(f: Function) -> Function:
    return lambda x, w: (f(x, w) ** 3).sum()


def along(f: Function) -> Function:
    """A number whose derivatives are second ones of f's."""
    return lambda x, w: (jax.grad(total(f))(x, w) * V).sum()


def steps(f: Function) -> Function:
    def step(c: Any, _: Any) -> Any:
        return c - 0.1 * jax.grad(total(f))(c, W), None

    return lambda x: jax.lax.scan(step, x, None, length=2)[0].sum()


REVERSE: dict[str, Callable[[Function], Function]] = {
    "value_and_grad": lambda f: lambda x: jax.value_and_grad(total(f), (0, 1))(x, W),
    "grad of grad": lambda f: lambda x: jax.grad(along(f), (0, 1))(x, W),
    "grad of grad of grad": lambda f: jax.grad(lambda x: (jax.grad(along(f))(x, W) * V).sum()),
    "hessian": lambda f: lambda x: jax.hessian(total(f), (0, 1))(x, W),
    "jacrev of jacrev": lambda f: lambda x: jax.jacrev(jax.jacrev(f))(x, W),
    "grad by the cotangent": lambda f: (
        lambda x: jax.grad(lambda c: (jax.vjp(lambda x: f(x, W), x)[1](c)[0] * V).sum())(3 * V)
    ),
    "vmap of hessian": lambda f: lambda x: jax.vmap(jax.hessian(total(f)), (0, None))(jnp.stack([x, V]), W),
    "grad of vmap of grad": lambda f: jax.grad(
        lambda x: (jax.vmap(jax.grad(total(f)), (0, None))(jnp.stack([x, V]), W) ** 2).sum()
    ),
    "grad of scan of grad": lambda f: jax.grad(steps(f)),
}
FORWARD: dict[str, Callable[[Function], Function]] = {
    "jvp of jvp": lambda f: (
        lambda x: jax.jvp(lambda x: jax.jvp(lambda x: f(x, W), (x,), (V,)), (x,), (jnp.flip(V),))
    ),
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(lambda x: total(f)(x, W), (x,), (V,))[1]),
}


def check(name: str, transform: Callable[[Function], Function], remote: gw.Remote) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(X)
        got, wanted = jax.jit(transform(remote))(x), jax.jit(transform(local(name)))(x)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("transform", REVERSE)
def test_r37_rules_are_used_once_in_reverse_mode(worker_of: Any, transform: str) -> None:
    check("by_vjp", REVERSE[transform], worker_of("jax").function("own_rules:by_vjp"))


@pytest.mark.parametrize("transform", FORWARD)
def test_r37_rules_are_used_once_in_forward_mode(worker_of: Any, transform: str) -> None:
    check("by_jvp", FORWARD[transform], worker_of("jax").function("own_rules:by_jvp"))


@pytest.mark.parametrize("options", [{"compile": False}, {"residuals": "recompute"}], ids=str)
def test_r37_rules_are_used_once_with_options(worker_of: Any, options: Any) -> None:
    remote = worker_of("jax").function("own_rules:by_vjp").options(**options)
    check("by_vjp", REVERSE["grad of grad"], remote)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_pullback_that_is_not_linear_is_derived(worker_of: Any, framework: str) -> None:
    """The cotangent is clipped to 1: at 0.5 it is its own derivative, at 2 that is zero."""
    clipped = worker_of(framework).function(f"reports_{framework}:clipped")
    with jax.enable_x64(True):
        pullback = jax.vjp(clipped, jnp.asarray(X))[1]
        bars, moved = jax.jvp(pullback, (jnp.array([0.5, 2.0]),), (jnp.array([3.0, 3.0]),))
    np.testing.assert_array_equal(bars[0], [0.5, 1.0])
    np.testing.assert_array_equal(moved[0], [3.0, 0.0])
