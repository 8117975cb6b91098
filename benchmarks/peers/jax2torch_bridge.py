"""jax2torch, in one process: the same model as a JAX function, called from torch."""

import jax
import torch
import work
from jax2torch import jax2torch

k1, b1, k2, b2 = map(jax.numpy.asarray, work.weights())
model = jax2torch(jax.jit(lambda x: jax.numpy.maximum(x @ k1.T + b1, 0) @ k2.T + b2))
x = torch.from_numpy(work.batch())


def gradient():
    leaf = x.detach().requires_grad_()
    (bar,) = torch.autograd.grad((model(leaf) ** 2).sum(), leaf)
    return bar


rows = {**work.forward(lambda: model(x)), **work.gradient(gradient)}
work.report(rows, "jax2torch", "torch", "jax")
