"""Remote functions for programs of TensorFlow: `call` makes each an ordinary differentiable function.

See `gradwire.tensorflow.nodes` for how a call becomes an operation of tapes and graphs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from gradwire.derived import Derived
from gradwire.handle import Handle
from gradwire.site import Site
from gradwire.tensorflow.nodes import apply
from gradwire.tensorflow.tapes import may_record
from gradwire_wire.structures import fill
from gradwire_wire.tensors import numpy as numpy_tensors
from gradwire_wire.tensors.tensorflow import export

__all__ = ["ACCUMULATES", "NAME", "call"]

NAME = "tensorflow"
ACCUMULATES = True  # a tape that watches a local module's variables pulls back through it as well


@tf.autograph.experimental.do_not_convert
def call(handle: Handle, site: Site, operands: list[Any]) -> Any:
    """The remote function at TensorFlow tensors, variables and numpy arrays; its result tree with tensors.

    Eager: blocks until the results are there. In a tf.function: adds an operation to the graph, which is
    executed exactly as often and in the order written, and raises TensorFlow's errors with our message in them.
    """
    tensors = [_tensor(x) for x in operands]
    if site.accumulate and (may_record() or not tf.executing_eagerly()):
        site, tensors = site.with_anchor, [tf.convert_to_tensor(_anchor()), *tensors]
    fn = Derived(handle, site)
    results = apply(fn, tensors)
    tree = fill(fn.structure, results)
    results.clear()  # a tape's record and its token must end with the tape, not with a collection
    return tree


def _tensor(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return tf.constant(numpy_tensors.adopt(numpy_tensors.export(x)))
    if isinstance(x, tf.SparseTensor | tf.RaggedTensor):
        export(x)  # refuses it by name
    return tf.convert_to_tensor(x)


@cache
def _anchor() -> Any:
    """What stands for the parameters that the worker owns: a trainable scalar whose gradient is always zero.

    Every tape watches it as it would watch a local layer's variables. So a call has a differentiable operand
    even where it is the first stage, and pulling a loss back reaches the worker.

    A tf.function would take it for its own, also in `tf.init_scope`: it would be traced a second time, and, where the first trace
    fails, return None ever after. A thread is in no function.
    """
    if not tf.inside_function():
        return _new_anchor()
    with ThreadPoolExecutor(1) as elsewhere:
        return elsewhere.submit(_new_anchor).result()


def _new_anchor() -> Any:
    with tf.init_scope():
        return tf.Variable(0.0, trainable=True, dtype=tf.float32, name="gradwire_anchor")
