"""The Keras half: the head of the classifier. Runs in a worker that has TensorFlow and neither torch nor JAX."""

import keras


def make_head(seed: int = 0, features: int = 64) -> keras.Model:
    """Features (batch, ``features``) to logits (batch, 10), float32."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(10),
        ]
    )
