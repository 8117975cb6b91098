"""Models of Keras, for a TensorFlow worker."""

import keras


def make_recurrent(seed=0):
    """Sequences (batch, time, 3) to (batch, time, 2): an output of three dimensions."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((None, 3)),
            keras.layers.GRU(5, return_sequences=True),
            keras.layers.TimeDistributed(keras.layers.Dense(2)),
        ]
    )
