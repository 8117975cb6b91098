"""What only torch code does."""

import itertools

import torch
from torch import nn


def add_in_place(x):
    x.add_(1)
    x.data.mul_(2)
    return x


def cube(x):
    return (x**3).sum()


def make_block(sizes, seed=0, batch_norm=False):
    torch.manual_seed(seed)
    layers = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), *([nn.BatchNorm1d(m)] if batch_norm else []), nn.Tanh()]
    return nn.Sequential(*layers)
