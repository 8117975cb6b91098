"""The same network in Flax linen, Flax nnx, Equinox and plain functions: dense, BatchNorm, tanh, dropout, dense."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

SIZES = (3, 6, 2)


class Linen(linen.Module):
    dropout: float = 0.0
    dtype: str = "float32"

    @linen.compact
    def __call__(self, x, *, train: bool):
        kind = {"param_dtype": self.dtype, "dtype": self.dtype}
        x = linen.Dense(SIZES[1], **kind)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9, **kind)(x)
        x = linen.Dropout(self.dropout, deterministic=not train)(jnp.tanh(x))
        return linen.Dense(SIZES[2], **kind)(x)


def make_linen(dropout=0.0, dtype="float32", seed=0):
    module = Linen(dropout, dtype)
    variables = module.init(jax.random.key(seed), jnp.ones((4, SIZES[0]), dtype), train=False)
    return module, jax.tree.map(lambda x: x.astype(dtype), variables)  # statistics begin in float32


def make_bound(dropout=0.0, dtype="float32", seed=0):
    module, variables = make_linen(dropout, dtype, seed)
    return module.bind(variables)


class Cnn(linen.Module):
    """Images (batch, height, width, 1) to two classes."""

    @linen.compact
    def __call__(self, x, training: bool):
        x = linen.Conv(4, (3, 3))(x)
        x = linen.BatchNorm(use_running_average=not training, momentum=0.9)(x)
        x = linen.avg_pool(linen.relu(x), (2, 2), (2, 2))
        x = linen.Dropout(0.25, deterministic=not training)(x)
        return linen.Dense(2)(x.reshape(x.shape[0], -1))


def make_cnn(seed=0):
    return Cnn(), Cnn().init(jax.random.key(seed), jnp.ones((2, 6, 6, 1)), training=False)


class Nnx(nnx.Module):
    def __init__(self, dropout, dtype, rngs):
        kind = {"param_dtype": dtype, "dtype": dtype, "rngs": rngs}
        self.first = nnx.Linear(SIZES[0], SIZES[1], **kind)
        self.norm = nnx.BatchNorm(SIZES[1], momentum=0.9, **kind)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.last = nnx.Linear(SIZES[1], SIZES[2], **kind)
        for statistic in (self.norm.mean, self.norm.var):  # they begin in float32
            statistic.set_value(statistic.get_value().astype(dtype))

    def __call__(self, x):
        return self.last(self.dropout(jnp.tanh(self.norm(self.first(x)))))


def make_nnx(dropout=0.0, dtype="float32", seed=0):
    return Nnx(dropout, dtype, nnx.Rngs(seed))


class Equinox(eqx.Module):
    """A network of one example, mapped over the batch."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, dropout, dtype, key):
        a, b = jax.random.split(key)
        self.first = eqx.nn.Linear(SIZES[0], SIZES[1], dtype=dtype, key=a)
        self.norm = eqx.nn.BatchNorm(SIZES[1], "batch", mode="batch", momentum=0.9, dtype=dtype)
        self.dropout = eqx.nn.Dropout(dropout)
        self.last = eqx.nn.Linear(SIZES[1], SIZES[2], dtype=dtype, key=b)

    def one(self, x, state, key):
        x, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jnp.tanh(x), key=key)), state

    def __call__(self, x, state, *, key):
        keys = jax.random.split(key, x.shape[0])
        return jax.vmap(self.one, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))(x, state, keys)


def make_equinox(dropout=0.0, dtype="float32", seed=0):
    return eqx.nn.make_with_state(Equinox)(dropout, jnp.dtype(dtype), jax.random.key(seed))


def make_plain(dropout=0.0, dtype="float32", seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    weights = [
        jax.random.normal(k, (n, m), dtype) / 2 for k, n, m in zip(keys, SIZES[:2], SIZES[1:], strict=True)
    ]
    zeros = jnp.zeros(SIZES[1], dtype)
    params = {"weights": weights, "scale": zeros + 1, "shift": zeros}

    def apply(params, state, x, *, train, key):
        x = x @ params["weights"][0]
        mean, var = (x.mean(0), x.var(0)) if train else (state["mean"], state["var"])
        moved = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}
        x = jnp.tanh((x - mean) / jnp.sqrt(var + 1e-5) * params["scale"] + params["shift"])
        if train and dropout:
            x = jnp.where(jax.random.bernoulli(key, 1 - dropout, x.shape), x / (1 - dropout), 0)
        return x @ params["weights"][1], moved

    return apply, params, {"mean": zeros, "var": zeros + 1}


MAKERS = {"linen": make_linen, "nnx": make_nnx, "equinox": make_equinox, "plain": make_plain}


def make_widening():
    """Statistics that begin in float32 and go on in float64, as those of Flax with parameters in float64 do."""
    return lambda params, state, x: (x * params, state + x.mean(0)), jnp.ones(3), jnp.zeros(3, "float32")


def make_mlp(key=0):
    """Without modes: `eqx.nn.MLP` of one example."""
    return eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(key))


def make_dense():
    """An (init, apply) pair whose init needs nothing but a key."""

    def init(key):
        return {"w": jax.random.normal(key, (3, 2)), "b": 0.5}

    return init, lambda params, x: x @ params["w"] + params["b"]


def local_run(obj, train):
    """What the library itself does: ``(leaves of the parameters, function(leaves, x) -> (y, leaves of what moved))``."""
    if isinstance(obj, nnx.Module):
        obj.train() if train else obj.eval()
        graph, params, rest = nnx.split(obj, nnx.Param, ...)
        leaves, tree = jax.tree.flatten(params)

        def run(leaves, x):
            module = nnx.merge(graph, jax.tree.unflatten(tree, leaves), jax.tree.map(lambda x: x, rest))
            y = module(x)
            return y, jax.tree.leaves(nnx.state(module, nnx.BatchStat))
    elif isinstance(obj[0], linen.Module):
        module, variables = obj
        leaves, tree = jax.tree.flatten(variables["params"])

        def run(leaves, x):
            given = {**variables, "params": jax.tree.unflatten(tree, leaves)}
            y, moved = module.apply(given, x, train=train, mutable=["batch_stats"])
            return y, jax.tree.leaves(moved)
    elif isinstance(obj[0], eqx.Module):
        params, static = eqx.partition(eqx.nn.inference_mode(obj[0], not train), eqx.is_inexact_array)
        leaves, tree = jax.tree.flatten(params)

        def run(leaves, x):
            module = eqx.combine(jax.tree.unflatten(tree, leaves), static)
            y, state = module(x, obj[1], key=jax.random.key(0))
            return y, jax.tree.leaves(state)
    else:
        apply, params, state = obj
        leaves, tree = jax.tree.flatten(params)

        def run(leaves, x):
            y, moved = apply(jax.tree.unflatten(tree, leaves), state, x, train=train, key=None)
            return y, jax.tree.leaves(moved)

    return leaves, run


def make_optimizer(learning_rate, clip):
    return optax.chain(optax.clip(clip), optax.sgd(learning_rate, momentum=0.9))
