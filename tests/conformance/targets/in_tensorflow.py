"""The functions of the conformance table, in TensorFlow."""

import tensorflow as tf


def affine(x, w):
    return tf.tanh(x @ w)


def two(x, w):
    return tf.tanh(x @ w) * tf.reduce_sum(x), tf.reduce_sum(x**3)


def keywords(x, *, scale=2.0, mode="a", mask=None):
    y = tf.sin(x) * scale if mode == "a" else x
    return {"y": y, "aux": (y * 2, mask, mode, 3)}


def pick(w, index):
    return tf.reduce_sum(tf.gather(w, index) ** 2), index * 2


def tree(state, *, step):
    a, (b, factor) = state["a"], state["b"]
    return {"sum": a + b * factor, "items": [a * b, {"step": step}]}


def smooth(x, w):
    return tf.tanh(tf.tensordot(x, w, 1)) * tf.reduce_sum(x), tf.reduce_sum(x**3)
