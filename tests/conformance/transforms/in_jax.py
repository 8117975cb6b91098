"""What a JAX program does with a function of (x, w) and two results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Function = Callable[..., Any]


def loss_of(f: Function) -> Function:
    def loss(x: Any, w: Any) -> Any:
        y, z = f(x, w)
        return (y**2).sum() + z

    return loss


def rows(x: Any, n: int = 3) -> Any:
    return jnp.arange(1.0, n + 1.0).reshape(n, *([1] * x.ndim)) * x


def vjp(f: Function, x: Any, w: Any) -> Any:
    y, pull = jax.vjp(f, x, w)
    return y, pull(y), pull(jax.tree.map(lambda a: 2 * a, y))


def linearize(f: Function, x: Any, w: Any) -> Any:
    y, line = jax.linearize(f, x, w)
    return y, line(x, w), line(2 * x, w)


def scanned(f: Function, x: Any, w: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.sin(f(c, w)[0]), f(c, w)[1]), x, None, length=4)


def looped(f: Function, x: Any, w: Any) -> Any:
    return lax.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, jnp.sin(f(s[1], w)[0])), (0, x))[1]


def checkpointed(f: Function) -> Function:
    return lambda x, w: jax.checkpoint(lambda x: loss_of(f)(jnp.sin(x), w))(x)


CELLS: dict[str, Callable[[Function, Any, Any], Any]] = {
    "call": lambda f, x, w: f(x, w),
    "grad": lambda f, x, w: jax.grad(loss_of(f), (0, 1))(x, w),
    "vjp": vjp,
    "jvp": lambda f, x, w: jax.jvp(f, (x, w), (2 * x, w)),
    "linearize": linearize,
    "jacrev": lambda f, x, w: jax.jacrev(f, (0, 1))(x, w),
    "jacfwd": lambda f, x, w: jax.jacfwd(f, (0, 1))(x, w),
    "hessian": lambda f, x, w: jax.hessian(loss_of(f))(x, w),
    "grad of grad": lambda f, x, w: jax.grad(lambda x, w: (jax.grad(loss_of(f))(x, w) ** 2).sum(), (0, 1))(
        x, w
    ),
    "vmap, in_axes (0, None)": lambda f, x, w: jax.vmap(f, (0, None))(rows(x), w),
    "vmap, in_axes (1, None)": lambda f, x, w: jax.vmap(f, (1, None))(rows(x).T, w),
    "vmap, in_axes (-1, 0)": lambda f, x, w: jax.vmap(f, (-1, 0))(rows(x).T, rows(w)),
    "vmap of vmap": lambda f, x, w: jax.vmap(jax.vmap(f, (0, None)), (None, 0))(rows(x), rows(w, 2)),
    "vmap of grad": lambda f, x, w: jax.vmap(jax.grad(loss_of(f), (0, 1)), (0, None))(rows(x), w),
    "grad of vmap": lambda f, x, w: jax.grad(
        lambda x, w: jax.vmap(loss_of(f), (0, None))(x, w).sum(), (0, 1)
    )(rows(x), w),
    "jacrev of vmap": lambda f, x, w: jax.jacrev(jax.vmap(f, (0, None)), (0, 1))(rows(x), w),
    "jacfwd of vmap": lambda f, x, w: jax.jacfwd(jax.vmap(f, (0, None)), (0, 1))(rows(x), w),
    "hessian of vmap": lambda f, x, w: jax.hessian(
        lambda x, w: jax.vmap(loss_of(f), (0, None))(x, w).sum(), (0, 1)
    )(rows(x), w),
    "vmap of grad, a batch of 1": lambda f, x, w: jax.vmap(jax.grad(loss_of(f)), (0, None))(rows(x, 1), w),
    "vmap of grad, a batch of 0": lambda f, x, w: jax.vmap(jax.grad(loss_of(f)), (0, None))(rows(x, 0), w),
    "lax.map": lambda f, x, w: lax.map(lambda x: f(x, w), rows(x)),
    "scan": scanned,
    "grad of scan": lambda f, x, w: jax.grad(lambda x, w: sum(v.sum() for v in scanned(f, x, w)), (0, 1))(
        x, w
    ),
    "while_loop": looped,
    "jvp of while_loop": lambda f, x, w: jax.jvp(lambda x: looped(f, x, w), (x,), (2 * x,)),
    "grad of checkpoint": lambda f, x, w: jax.grad(checkpointed(f))(x, w),
}


def run(cell: str, f: Function, x: Any, w: Any, compiled: bool) -> Any:
    with jax.enable_x64(True):
        act = lambda x, w: CELLS[cell](f, x, w)  # noqa: E731
        return jax.block_until_ready((jax.jit(act) if compiled else act)(jnp.asarray(x), jnp.asarray(w)))
