"""Modules whose results are random numbers' doing, in a torch worker."""

import torch


def make_dropout():
    return torch.nn.Dropout(0.5)


def make_noisy_linear():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Dropout(0.5))
