"""Torch modules that become Keras layers."""

import torch
from torch import nn


def make_block(dtype, dropout=0.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))
    return net.to(getattr(torch, dtype))
