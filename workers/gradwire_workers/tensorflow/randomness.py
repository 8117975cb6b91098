"""TensorFlow's and Keras's random numbers for the time of one call."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import tensorflow as tf
from tensorflow.python.eager import context

__all__ = ["seeded"]

_MASK = 0x7FFFFFFF


@contextmanager
def seeded(seed: int | None, module: Any) -> Iterator[None]:
    """Eager random numbers as after ``tf.random.set_seed(seed)``; the worker's own go on afterwards.

    The states of a Keras module's seed generators are set as well, each to a number of its own. The
    target's own tf.functions run eagerly meanwhile: a trace would have its seed for good. (Where the target
    has set a global seed itself, its streams start afresh, since TensorFlow forgets its kernels.)
    """
    if seed is None:
        yield
        return
    current = context.context()
    before = {name: getattr(current, name) for name in ("_seed", "_rng") if hasattr(current, name)}
    states = [(v, v.numpy()) for v in module.random_states()]
    eagerly = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    tf.random.set_seed(seed & _MASK)
    for number, (variable, state) in enumerate(states):
        variable.assign([(seed * 1_000_003 + number) & _MASK, *([0] * (len(state) - 1))])
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(eagerly)
        for variable, state in states:
            variable.assign(state)
        for name, value in before.items():
            setattr(current, name, value)
