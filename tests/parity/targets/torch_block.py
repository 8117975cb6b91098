"""The torch part of the chain."""

import torch
from torch import nn


def make_block(dtype):
    torch.manual_seed(1)
    block = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))
    return block.to(getattr(torch, dtype))
