"""A JAX function whose parts have derivative rules of their own, none of which is their derivative."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, c: (jnp.clip(c, -1.0, 1.0),))


@jax.custom_vjp
def reverse(x):
    return x


reverse.defvjp(lambda x: (x, None), lambda _, c: (-2.0 * c,))


@jax.custom_jvp
def rounded(x):
    return jnp.round(x)


rounded.defjvp(lambda x, t: (jnp.round(x[0]), t[0]))


@jax.custom_jvp
def halved(x):
    return jnp.sin(x)


halved.defjvp(lambda x, t: (halved(x[0]), 0.5 * jnp.cos(x[0]) * t[0]))


@jax.custom_vjp
def nested(x):
    return halved(x) * x


nested.defvjp(lambda x: (halved(x) * x + 1, x), lambda x, c: (c * halved(x) * 3.0,))


def by_vjp(x, w):
    return jnp.tanh(clipped(x**2 * w)) + jnp.sin(reverse(x * w)) * nested(x) + rounded(3 * x) ** 2 * w


def by_jvp(x, w):
    return halved(x * w) ** 2 + rounded(3 * w) * rounded(2 * x) ** 2
