"""Which objects are Keras layers, of any Keras, none of which is imported for this."""

from __future__ import annotations

from typing import Any

__all__ = ["is_keras_layer"]

_KERAS = ("keras.", "tf_keras.", "tensorflow.python.keras.")


def is_keras_layer(target: Any) -> bool:
    return any(c.__name__ == "Layer" and c.__module__.startswith(_KERAS) for c in type(target).__mro__)
