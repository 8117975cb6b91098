"""The default targets in TensorFlow; see numpy.py."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np
import tensorflow as tf


def identity(x: Any) -> Any:
    """See numpy.py."""
    return tf.identity(x)


def make_mlp() -> Any:
    """See numpy.py."""
    tf.keras.utils.set_random_seed(2)
    return tf.keras.Sequential(
        [tf.keras.Input((64,)), tf.keras.layers.Dense(128, "relu"), tf.keras.layers.Dense(32)]
    )


def compiled(target: Callable[..., Any]) -> Callable[..., Any]:
    """By tf.function."""
    return tf.function(target)


def tensors(arrays: Sequence[np.ndarray]) -> list[Any]:
    """See numpy.py."""
    return [tf.constant(x) for x in arrays]


def to_array(tensor: Any) -> np.ndarray:
    """See numpy.py."""
    return tensor.numpy()
