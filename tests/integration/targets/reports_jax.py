"""The functions of R31 to R42, in JAX."""

import jax
import jax.numpy as jnp


def gather(w, index, mask):
    return (w[index] * mask).sum()


def top_two(x):
    values, indices = jax.lax.top_k(x, 2)
    return values, indices


def squared_norm(z):
    return (z * z.conj()).real


def square(z):
    return z * z


def turn(x):
    return jax.lax.complex(jnp.cos(x), jnp.sin(x))


def first_only(a, b):
    return 2 * a


def apart(a, b):
    return 2 * a, 3 * b


def beside_a_cusp(x):
    return x**2, jnp.sqrt(0 * x)


@jax.custom_vjp
def _clipped(x):
    return x


_clipped.defvjp(lambda x: (x, None), lambda _, bar: (jnp.clip(bar, -0.5, 0.5),))


def clipped_backward(x):
    return _clipped(x), 3 * x


def detached(a, b):
    return 2 * a, jax.lax.stop_gradient(a * b)


def some_leaves(state):
    return (state["a"] ** 2).sum() * state["b"][1]


def scaled(x, scale):
    return x * scale


def numbers(x, n):
    return {"next": n + 1, "sign": jnp.where(x.sum() > 0, 1.0, -1.0), "twice": (2 * n * x, 3)}


def cube(x):
    return x**3


def perceptron(x, w, v):
    return jnp.tanh(jnp.tanh(x @ w) @ v)


def positive(x):
    return x[x > 0]


def tree(x, *, scale=2.0, mode="a", mask=None):
    y = x * scale if mask is None else x * scale * mask
    return {"y": y, "aux": (x * x, None, mode, 3)}
