"""What a TensorFlow program does with a function of (x, w) and two results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Function = Callable[..., Any]


def loss_of(f: Function) -> Function:
    def loss(x: Any, w: Any) -> Any:
        y, z = f(x, w)
        return tf.reduce_sum(y**2) + z

    return loss


def tape(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        loss = loss_of(f)(tf.sin(x), w)
    return tape.gradient(loss, [x, w])


def nested(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as outer:
        outer.watch([x, w])
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = loss_of(f)(x, w)
        squares = tf.reduce_sum(inner.gradient(loss, x) ** 2)
    return outer.gradient(squares, [x, w])


def persistent(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        y, z = f(x, w)
    return tape.gradient(y, [x, w]), tape.gradient(z, x), tape.gradient([y, z], x)


def jacobian(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y, _ = f(x, w)
    return tape.jacobian(y, x)


def looped(f: Function, x: Any, w: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        _, y = tf.while_loop(lambda i, _: i < 3, lambda i, c: (i + 1, tf.sin(f(c, w)[0])), (0, x))
        loss = tf.reduce_sum(y)
    return y, tape.gradient(loss, x)


def variables(f: Function, x: Any, w: Any) -> Any:
    a, b = tf.Variable(x), tf.Variable(w)
    with tf.GradientTape() as tape:
        loss = loss_of(f)(a, b)
    return tape.gradient(loss, [a, b])


def slices_out(f: Function, x: Any, w: Any) -> Any:
    """The cotangent of the call is a tf.IndexedSlices."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.gather(f(x, w)[0], [0, 0, 1]) ** 2)
    return tape.gradient(loss, x)


def slices_in(f: Function, x: Any, w: Any) -> Any:
    """The gradient of what the call is given is a tf.IndexedSlices."""
    table = tf.Variable(tf.stack([x, 2 * x, 3 * x]))
    with tf.GradientTape() as tape:
        loss = loss_of(f)(tf.gather(table, [0, 0, 2]), w)
    return tf.convert_to_tensor(tape.gradient(loss, table))


def unknown_batch(act: Function) -> Function:
    """Compiled once, called with two sizes of batch."""

    def run_both(f: Function, x: Any, w: Any) -> Any:
        signature = [tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([4, 4], tf.float64)]
        program = tf.function(lambda x, w: act(f, x, w), input_signature=signature)
        return program(x[None], w), program(tf.stack([x, 2 * x, 3 * x]), w)

    return run_both


def compiled(act: Function, **options: Any) -> Function:
    return lambda f, x, w: tf.function(lambda x, w: act(f, x, w), **options)(x, w)


def around_compiled(act: Function) -> Function:
    """The tapes are around the compiled function, not in it."""

    def run_around(f: Function, x: Any, w: Any) -> Any:
        program = tf.function(lambda x, w: f(x, w))
        return act(lambda x, w: program(x, w), x, w)

    return run_around


def accumulator(f: Function, x: Any, w: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(x, 2 * x) as moving:
        y = f(x, w)
    return [moving.jvp(v) for v in y]


def fit(f: Function, x: Any, w: Any) -> Any:
    class Middle(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return f(x, w)[0]

    ones = keras.initializers.Constant(0.1)
    head = keras.layers.Dense(4, kernel_initializer=ones, dtype="float64")
    tail = keras.layers.Dense(1, kernel_initializer=ones, dtype="float64")
    model = keras.Sequential([keras.Input((4,), dtype="float64"), head, Middle(dtype="float64"), tail])
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    data = np.stack([x * (i + 1) / 5 for i in range(5)])
    model.fit(data, np.ones((5, 1)), batch_size=2, epochs=2, shuffle=False, verbose=0)
    return [tf.convert_to_tensor(v) for v in model.trainable_variables]


CELLS: dict[str, Callable[[Function, Any, Any], Any]] = {
    "call": lambda f, x, w: f(x, w),
    "tape": tape,
    "nested tapes": nested,
    "persistent tape": persistent,
    "tape.jacobian": jacobian,
    "while_loop": looped,
    "Variables": variables,
    "IndexedSlices, as the cotangent": slices_out,
    "IndexedSlices, as the gradient": slices_in,
    "ForwardAccumulator": accumulator,
    "tf.function": compiled(lambda f, x, w: f(x, w)),
    "tf.function with an unknown batch": unknown_batch(lambda f, x, w: f(x, w)),
    "tf.function with an unknown batch, tape in it": unknown_batch(tape),
    "tf.function with an unknown batch, nested tapes in it": unknown_batch(nested),
    "tf.function, tape around it": around_compiled(tape),
    "tf.function, nested tapes around it": around_compiled(nested),
    "tf.function, persistent tape in it": compiled(persistent),
    "tf.function, while_loop in it": compiled(looped),
    "tf.function, IndexedSlices in it": compiled(slices_out),
    "tf.function, ForwardAccumulator around it": around_compiled(accumulator),
    "Keras fit": fit,
    "tf.function, ForwardAccumulator in it": compiled(accumulator),
    "tf.function, jit_compile": compiled(lambda f, x, w: f(x, w), jit_compile=True),
}


def run(cell: str, f: Function, x: Any, w: Any) -> Any:
    return CELLS[cell](f, tf.constant(x), tf.constant(w))
