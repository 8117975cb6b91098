"""Who is recording: what TensorFlow's tapes and forward accumulators make of some tensors.

TensorFlow has no public way to ask. Where its private one is missing, every tensor counts as recorded by a
tape: forwards are then kept for nothing and dropped at once, which costs time and is never wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import tensorflow as tf

__all__ = ["has_tangents", "is_forward_mode", "is_in_rows", "is_inner", "is_recorded", "may_record"]

try:
    from tensorflow.python.eager.record import could_possibly_record as may_record
    from tensorflow.python.eager.record import should_record_backprop
except ImportError:

    def may_record() -> bool:
        return True

    def should_record_backprop(tensors: Any) -> bool:
        return True


try:
    from tensorflow.python.eager.forwardprop_util import pack_tangents
except ImportError:
    pack_tangents = None

try:
    from tensorflow.python.ops.gradients_util import PossibleTapeGradientTypes as possible_gradient_types
except ImportError:

    def possible_gradient_types(tensors: Any) -> int:
        return 1


HIGHER_ORDER = 2  # of possible_gradient_types: several tapes watch the tensors, or a persistent one does


def is_recorded(tensors: Sequence[Any]) -> bool:
    """Whether a tf.GradientTape records operations on these tensors."""
    return bool(should_record_backprop(list(tensors)))


def has_tangents(tensors: Sequence[Any]) -> bool:
    """Whether a tf.autodiff.ForwardAccumulator has tangents of these tensors."""
    return pack_tangents is not None and bool(pack_tangents(list(tensors)).tangents)


def is_forward_mode() -> bool:
    """Whether any tf.autodiff.ForwardAccumulator is active.

    While one works out a tangent it records on a tape of its own, which `is_recorded` does not see.
    """
    return pack_tangents is not None and bool(pack_tangents([]).indices)


def is_inner(tensors: Sequence[Any]) -> bool | None:
    """Whether a pullback of these tensors is an inner derivative: one that somebody will differentiate again.

    None where TensorFlow does not say: it builds the gradient of a compiled function beforehand, when it is called
    under tapes, and from within the outermost of several tapes looks like a single persistent one.
    """
    if is_forward_mode():
        return True
    if not _in_gradient_of_function():
        return is_recorded(tensors)
    return None if possible_gradient_types(list(tensors)) == HIGHER_ORDER else False


def is_in_rows() -> bool:
    """Whether what is traced now is one row of `tf.vectorized_map`, `jacobian` or `batch_jacobian`; told by the name of TensorFlow's function.

    TensorFlow makes a loop over all rows of it, and executes the traced row besides where it has effects.
    """
    frame: FrameType | None = None if tf.executing_eagerly() else sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_pfor_impl":
        frame = frame.f_back
    return frame is not None


def _in_gradient_of_function() -> bool:
    """Whether what is traced now is the gradient of a tf.function, taken by a tape around the call of it."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:  # (a loop's or branch's gradient is a graph within)
        if getattr(graph, "name", "").startswith("__backward_"):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
