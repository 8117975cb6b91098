"""A torch function for the README: the energy of points joined by springs."""

import torch


def energy(x: torch.Tensor, stiffness: float = 1.0) -> torch.Tensor:
    """Energy of a chain of points (points, dimensions), 0-d."""
    stretch = (x[1:] - x[:-1]).norm(dim=-1) - 1.0
    return 0.5 * stiffness * (stretch**2).sum()
