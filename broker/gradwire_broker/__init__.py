"""The control plane: starts workers, knows their names, notices their deaths, and sweeps up after them."""
