"""The torch half: a small convolutional encoder. Runs in a worker that has torch and neither JAX nor TensorFlow."""

import torch
from torch import nn


def make_encoder(seed: int = 0, features: int = 64) -> nn.Module:
    """Images (batch, 1, 8, 8) to features (batch, ``features``), float32."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, features),
        nn.Tanh(),
    )
