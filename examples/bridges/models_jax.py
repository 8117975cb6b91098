"""Models of JAX, for a JAX worker. Neither knows of any other framework."""

import jax
import jax.numpy as jnp
from flax import linen

DROPOUT = 0.5


def make_sequential(sizes=(4, 16, 2), seed=0):
    """A stack of dense layers with dropout: ``apply(params, x, key=, train=)``, and its parameters."""
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    params = [
        {"weight": jax.random.normal(key, (n, m)) / n**0.5, "bias": jnp.zeros(m)}
        for key, n, m in zip(keys, sizes, sizes[1:])  # noqa: B905 - as a user would
    ]

    def apply(params, x, *, key, train):
        *hidden, last = params
        for layer in hidden:
            x = jnp.tanh(x @ layer["weight"] + layer["bias"])
            if train:
                key, mine = jax.random.split(key)
                x = jnp.where(jax.random.bernoulli(mine, 1 - DROPOUT, x.shape), x / (1 - DROPOUT), 0)
        return x @ last["weight"] + last["bias"]

    return apply, params


def sequential(weights, x):
    """The same without dropout, of its parameters as a flat list: for comparisons."""
    *hidden, last = [weights[i : i + 2] for i in range(0, len(weights), 2)]
    for bias, weight in hidden:
        x = jnp.tanh(x @ weight + bias)
    return x @ last[1] + last[0]


class Classifier(linen.Module):
    """Features (batch, n) to logits (batch, classes)."""

    classes: int

    @linen.compact
    def __call__(self, x):
        return linen.Dense(self.classes)(linen.relu(linen.Dense(32)(x)))


def make_classifier(features=8, classes=3, seed=0):
    module = Classifier(classes)
    return module, module.init(jax.random.key(seed), jnp.ones((1, features)))
