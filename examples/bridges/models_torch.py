"""Models of PyTorch, for a torch worker."""

import torch
from torch import nn


def make_linear(inputs=3, outputs=2, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def make_encoder(seed=0):
    """Signals (batch, 1, 16) to features (batch, 8), with BatchNorm and dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv1d(1, 4, 5, padding=2),
        nn.BatchNorm1d(4),
        nn.GELU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64, 8),
    )


class Scored(nn.Module):
    """A classifier and what it is trained by. ``forward``: the loss, and the logits."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        logits = self.net(x)
        return nn.functional.cross_entropy(logits, labels), logits


def make_classifier(seed=0):
    """Signals (batch, 1, 16) and their labels (batch,) to loss and logits (batch, 2)."""
    encoder = make_encoder(seed)
    return Scored(nn.Sequential(encoder, nn.GELU(), nn.Linear(8, 2)))
