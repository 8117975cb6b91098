"""The functions of the conformance table, in JAX."""

import jax.numpy as jnp


def affine(x, w):
    return jnp.tanh(x @ w)


def two(x, w):
    return jnp.tanh(x @ w) * x.sum(), (x**3).sum()


def keywords(x, *, scale=2.0, mode="a", mask=None):
    y = jnp.sin(x) * scale if mode == "a" else x
    return {"y": y, "aux": (y * 2, mask, mode, 3)}


def pick(w, index):
    return (w[index] ** 2).sum(), index * 2


def tree(state, *, step):
    a, (b, factor) = state["a"], state["b"]
    return {"sum": a + b * factor, "items": [a * b, {"step": step}]}


def smooth(x, w):
    return jnp.tanh(jnp.tensordot(x, w, 1)) * x.sum(), (x**3).sum()
