"""torch2jax, in one process: the torch model written anew in JAX operations, which XLA then compiles."""

import jax
import torch
import work
from torch2jax import t2j

net, x = work.torch_mlp(), jax.numpy.asarray(work.batch())
state = {name: t2j(p.detach()) for name, p in net.state_dict().items()}
with torch.no_grad():
    model = t2j(net)
forward = jax.jit(lambda x: model(x, state_dict=state))
gradient = jax.jit(jax.value_and_grad(lambda x: (model(x, state_dict=state) ** 2).sum()))
rows = {
    **work.forward(lambda: jax.block_until_ready(forward(x))),
    **work.gradient(lambda: jax.block_until_ready(gradient(x))[1]),
}
work.report(rows, "torch2jax", "torch", "jax")
