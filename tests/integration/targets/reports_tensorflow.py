"""The functions of R31 to R42, in TensorFlow."""

import keras
import tensorflow as tf


def gather(w, index, mask):
    return tf.reduce_sum(tf.gather(w, index) * tf.cast(mask, w.dtype))


def top_two(x):
    values, indices = tf.math.top_k(x, 2)
    return values, indices


def squared_norm(z):
    return tf.math.real(z * tf.math.conj(z))


def square(z):
    return z * z


def turn(x):
    return tf.complex(tf.cos(x), tf.sin(x))


def first_only(a, b):
    return 2 * a


def apart(a, b):
    return 2 * a, 3 * b


def beside_a_cusp(x):
    return x**2, tf.math.pow(0 * x, 0.5)


def detached(a, b):
    return 2 * a, tf.stop_gradient(a * b)


def by_numpy(x):
    return x.numpy() ** 2


def some_leaves(state):
    return tf.reduce_sum(state["a"] ** 2) * state["b"][1]


def cube(x):
    return x**3


def perceptron(x, w, v):
    return tf.tanh(tf.tensordot(tf.tanh(tf.tensordot(x, w, 1)), v, 1))


def positive(x):
    return tf.boolean_mask(x, x > 0)


def tree(x, *, scale=2.0, mode="a", mask=None):
    y = x * scale if mask is None else x * scale * mask
    return {"y": y, "aux": (x * x, None, mode, 3)}


def make_noisy():
    keras.utils.set_random_seed(0)
    norm = keras.layers.BatchNormalization(epsilon=1e-5)  # as torch's
    return keras.Sequential([keras.Input((6,)), norm, keras.layers.Dropout(0.5)])


@tf.custom_gradient
def clipped(x):
    return tf.identity(x), lambda c: tf.clip_by_value(c, -1.0, 1.0)
