"""gradwire: compiled JAX caller, torch worker."""

import pathlib

import jax
import work

import gradwire as gw

with gw.connect() as bridge:
    worker = bridge.worker("torch", path=[pathlib.Path(__file__).parent], threads=1)
    net, x = worker.function("targets:mlp"), jax.numpy.asarray(work.batch())
    forward = jax.jit(net)
    gradient = jax.jit(jax.value_and_grad(lambda x: (net(x) ** 2).sum()))
    rows = {
        **work.forward(lambda: jax.block_until_ready(forward(x))),
        **work.gradient(lambda: jax.block_until_ready(gradient(x))[1]),
    }
work.report(rows, "jax", "torch")
