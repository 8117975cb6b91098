"""A module whose results are random numbers' doing, in a torch worker."""

import torch


def make_dropout():
    return torch.nn.Dropout(0.5)
