"""Keras models, for workers with any backend of Keras."""

import keras


def make_sequence(seed=0):
    """(batch, 5) of integers to (batch, 5, 3), with a table, BatchNorm and dropout; has no weights before its first call."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [layers.Embedding(11, 4), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)],
        name="net",
    )


def make_dense(width=3, dtype="float32", seed=0):
    """(batch, 5, 4) to (batch, 5, width)."""
    keras.utils.set_random_seed(seed)
    net = keras.Sequential([keras.Input((5, 4), dtype=dtype)], name="net")
    net.add(keras.layers.Dense(8, activation="tanh", dtype=dtype))
    net.add(keras.layers.Dense(width, dtype=dtype))
    return net


def make_noisy(seed=0):
    """(batch, 4) to (batch, 3), with BatchNorm and dropout."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(3),
        ],
        name="net",
    )
