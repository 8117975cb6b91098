"""What client, broker and workers agree on: errors, dtypes, headers, messages, memory, sockets.

Importing this package imports nothing: its modules are imported one by one, so that the broker
needs no numpy and no process imports a framework its user did not ask for. Pure Python 3.9+.
"""

__all__ = ["PROTOCOL"]

PROTOCOL = 1
"""The version of docs/protocol.md that all of it speaks: calls, tethers and the control plane."""
