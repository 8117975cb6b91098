"""Keras models, for workers with any backend of Keras."""

import keras
import numpy as np


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


def make_regularized(seed=0):
    """(batch, 4) to (batch, 3), with BatchNorm and losses for its weights and for what comes out."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dense(3, activity_regularizer="l2"),
        ]
    )


def make_recurrent(masking):
    """(batch, 6, 2) to (batch, 6, 3): steps that are masked, here or by the caller, do nothing."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.SimpleRNN(3, return_sequences=True)
    if masking:
        return keras.Sequential([keras.Input((6, 2)), keras.layers.Masking(), layer])
    layer.build((None, 6, 2))
    return layer


def make_stateful():
    """(2, 5, 3) to (2, 2): its states go on from call to call."""
    lstm = keras.layers.LSTM(2, stateful=True, return_sequences=True)
    return keras.Sequential([keras.Input((5, 3), batch_size=2), lstm, keras.layers.GRU(2, stateful=True)])


class WithLosses(keras.Model):
    """Whose result has the losses of what is inside: (y, their sum)."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def call(self, x, training=None):
        y = self.net(x, training=training)
        return y, sum(self.net.losses)


def make_with_losses():
    return WithLosses(make_regularized())


def penalise(layer, y):
    layer.add_loss(keras.ops.mean(y**2))
    return y


class Adding(keras.Model):
    """Adds a loss by way of somebody else."""

    def __init__(self):
        super().__init__()
        self.dense, self.penalise = keras.layers.Dense(3), penalise

    def call(self, x):
        return self.penalise(self, self.dense(x))


def make_adding():
    return Adding()


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


def make_normalized(spread):
    """(batch, 3) to (batch, 2), behind a Normalization that was adapted to other data for each spread."""
    normalization = keras.layers.Normalization()
    normalization.adapt(np.arange(12.0).reshape(4, 3) * spread)
    return keras.Sequential(
        [keras.Input((3,)), normalization, keras.layers.Dense(2, kernel_initializer="ones")]
    )


def make_constrained():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_constraint="non_neg")])


def make_spectral():
    """Assigns to its kernel in training mode."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(3)
    return keras.Sequential([keras.Input((4,)), keras.layers.SpectralNormalization(dense)])
