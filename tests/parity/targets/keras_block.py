"""The Keras part of the chain."""

import keras


def make_block(dtype):
    keras.utils.set_random_seed(2)
    block = keras.Sequential(
        [
            keras.Input((5,), dtype=dtype),
            keras.layers.Dense(7, activation="tanh", dtype=dtype),
            keras.layers.Dense(3, dtype=dtype),
        ]
    )
    return block
