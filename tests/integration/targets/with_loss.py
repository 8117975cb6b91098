"""Modules whose result is their loss, in each framework: dense, tanh, dense, the mean of the squares."""

import time


def make_torch(dtype="float64", dropout=0.0):
    import torch
    from torch import nn

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 2))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x, y, *, scale=1.0, nap=0.0):
            self.calls += 1
            time.sleep(nap)
            x += 0  # in place: what it is given is no leaf that requires a gradient
            return scale * (self.net(x) - y).pow(2).mean()

    return WithLoss().to(getattr(torch, dtype))


def make_that_waits():
    """Its calls wait until there is a file of that name; none is a name that is empty or too long."""
    import pathlib

    import torch

    class Waiting(torch.nn.Linear):
        def forward(self, x, path):
            while 0 < len(path) < 1000 and not pathlib.Path(path).exists():
                time.sleep(0.001)
            return super().forward(x).pow(2).mean()

    torch.manual_seed(0)
    return Waiting(3, 2).double()


def make_that_naps():
    """A call sleeps as long as a tensor says: it is of the same kind as one that is quick."""
    import torch

    class Napping(torch.nn.Linear):
        def forward(self, x, nap):
            time.sleep(float(nap))
            return super().forward(x).pow(2).mean()

    torch.manual_seed(0)
    return Napping(3, 2).double()


def make_that_fails_late():
    """Its backward pass raises, if it is told to, when the gradients of some parameters have been added and those of others have not."""
    import torch

    class Checked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, is_bad):
            ctx.is_bad = is_bad
            return x.clone()

        @staticmethod
        def backward(ctx, bar):
            if ctx.is_bad:
                raise ValueError("bad 42")
            return bar, None

    class Late(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)

        def forward(self, x, is_bad=False):
            return self.last(Checked.apply(self.first(x), is_bad)).pow(2).mean()

    torch.manual_seed(0)
    return Late().double()


def make_keras(dtype="float64"):
    import keras

    class WithLoss(keras.Model):
        def __init__(self):
            super().__init__(dtype=dtype)
            keras.utils.set_random_seed(0)
            self.hidden = keras.layers.Dense(5, "tanh", dtype=dtype)
            self.last = keras.layers.Dense(2, dtype=dtype)

        def call(self, x, y, scale=1.0):
            return scale * keras.ops.mean((self.last(self.hidden(x)) - y) ** 2)

    return WithLoss()


def make_jax(dtype="float64"):
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.normal(size=shape), dtype)
        for name, shape in {"a": (3, 5), "b": (5,), "c": (5, 2)}.items()
    }

    def apply(params, x, y, *, scale=1.0):
        return scale * ((jnp.tanh(x @ params["a"] + params["b"]) @ params["c"] - y) ** 2).mean()

    return apply, params


def make_with_more(kind):
    """A dict with the loss and what it is made of, or a tuple, or a tree that has no loss."""
    import torch

    class WithMore(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            loss = (y**2).mean()
            return {
                "dict": {"logits": y, "loss": loss, "best": y.argmax(-1)},
                "tuple": (loss, {"logits": y}),
                "odd": {"logits": y, "cost": loss},
            }[kind]

    torch.manual_seed(0)
    return WithMore(3, 2)


def make_without_loss():
    import torch

    return torch.nn.Linear(3, 2)


def make_failing():
    """Raises in the backward pass of its second call."""
    import torch

    class Second(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, nth):
            ctx.nth = nth
            return x.clone()

        @staticmethod
        def backward(ctx, bar):
            if ctx.nth == 2:
                raise ValueError("bad 42")
            return bar, None

    class Failing(torch.nn.Linear):
        nth = 0

        def forward(self, x):
            self.nth += 1
            return Second.apply(super().forward(x).sum(), self.nth)

    return Failing(3, 1)


def make_torch_beside_a_cusp():
    """The other results have an infinite derivative here, and one by a weight that the loss does not know."""
    import torch

    class BesideACusp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
            self.v = torch.nn.Parameter(torch.tensor([3.0]))

        def forward(self, x):
            return {"cusp": (0 * self.w).sum().sqrt(), "loss": ((self.w * x) ** 2).sum(), "other": 2 * self.v}

    return BesideACusp()


def make_jax_beside_a_cusp():
    import jax.numpy as jnp

    def apply(params, x):
        w, v = params["w"], params["v"]
        return {"cusp": jnp.sqrt((0 * w).sum()), "loss": ((w * x) ** 2).sum(), "other": 2 * v}

    return apply, {"w": jnp.array([1.0, 2.0]), "v": jnp.array([3.0])}


def make_keras_beside_a_cusp():
    import keras
    import tensorflow as tf

    class BesideACusp(keras.Model):
        def __init__(self):
            super().__init__()
            self.w = self.add_weight(
                shape=(2,), initializer=lambda *_, **__: tf.constant([1.0, 2.0]), name="w"
            )
            self.v = self.add_weight(shape=(1,), initializer=lambda *_, **__: tf.constant([3.0]), name="v")

        def call(self, x):
            cusp = tf.reduce_sum(tf.math.log(0 * self.w + 1e-45) * 0 / (0 * self.w))
            return {"cusp": cusp, "loss": tf.reduce_sum((self.w * x) ** 2), "other": 2 * self.v}

    return BesideACusp()


def make_checkpointed():
    """With the older kind of checkpoint, and a leaf that is no parameter."""
    import torch
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 1, bias=False)
            torch.nn.init.ones_(self.inner.weight)
            self.offset = torch.zeros(1, requires_grad=True)

        def forward(self, x):
            y = checkpoint(self.inner, x + self.offset, use_reentrant=True)
            return {"loss": y.sum(), "of the leaf": self.offset.grad}

    return Checkpointed()
