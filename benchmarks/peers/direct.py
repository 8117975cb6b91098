"""No boundary: the same model called in this process."""

import torch
import work

net, x = work.torch_mlp(), torch.from_numpy(work.batch())


def forward():
    with torch.no_grad():
        return net(x)


def gradient():
    leaf = x.detach().requires_grad_()
    (bar,) = torch.autograd.grad((net(leaf) ** 2).sum(), leaf)
    return bar


work.report({**work.forward(forward), **work.gradient(gradient)}, "torch")
