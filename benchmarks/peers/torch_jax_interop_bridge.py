"""torch-jax-interop, in one process: the torch model as a JAX function, eager and (with its example output) compiled."""

import sys

import jax
import torch
import work
from torch_jax_interop import torch_module_to_jax

net, x = work.torch_mlp(), jax.numpy.asarray(work.batch())
compiled = sys.argv[1] == "jit"
example = torch.zeros(work.BATCH, work.WIDTHS[-1]) if compiled else None
apply, params = torch_module_to_jax(net, example_output=example)
forward, gradient = apply, jax.value_and_grad(lambda x: (apply(params, x) ** 2).sum())
if compiled:
    forward, gradient = jax.jit(forward), jax.jit(gradient)
rows = work.forward(lambda: jax.block_until_ready(forward(params, x)))
try:
    rows |= work.gradient(lambda: jax.block_until_ready(gradient(x))[1])
except Exception as error:
    rows["MLP value and gradient"] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
work.report(rows, "torch-jax-interop", "torch", "jax")
