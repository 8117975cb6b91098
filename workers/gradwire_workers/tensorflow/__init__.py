"""The TensorFlow worker, Keras included. See `gradwire_workers.program.Engine`.

A target is traced by `tf.function`, a few times for each signature: what its Python does otherwise
(counters, `np.random`, printing) then happens at these times, not at each call. A target that cannot be traced, because it looks
at values, runs eagerly at every call: ``options(compile=False)`` asks for that from the beginning,
``compile=True`` forbids it.

``programs`` is the loaded target, ``graphs`` its tracing, ``words`` its derivatives, ``replays`` and ``residuals`` what a kept forward
keeps, ``modules`` and ``optimizers`` a module's state, ``functional`` the module as a function of its parameters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gradwire_wire.errors import UsageError
from gradwire_wire.tensors.tensorflow import NAME, adopt, aval, export, is_tensor
from gradwire_workers.targets import cannot_be_called
from gradwire_workers.tensorflow.programs import TensorFlowProgram

__all__ = [
    "NAME",
    "adopt",
    "adopt_operand",
    "adopter",
    "aval",
    "export",
    "export_all",
    "facts",
    "is_tensor",
    "prepare",
    "program",
    "resize",
]

adopt_operand, adopter, export_all = adopt, None, None
# They turn x * 2.0 / 3.0 into x * 0.66…, x**3 into x * x * x, and activations into parts of other kernels.
_CHANGE_BITS = ("constant_folding", "arithmetic_optimization", "remapping")


def prepare(threads: int | None, x64: bool | None, device: str | None) -> None:
    """Must come before TensorFlow's first operation. x64 changes nothing: 64-bit types are always there.

    device: "cpu", "gpu", "gpu:1" (or "cuda:1"). Raises UsageError for one that is not there.

    Graph rewrites that change bits are switched off, so that a traced call gives those of an eager one; a
    target may switch them on again (`tf.config.optimizer.set_experimental_options`).
    """
    tf.config.optimizer.set_experimental_options(dict.fromkeys(_CHANGE_BITS, False))
    if threads is not None:
        resize(threads)
    if device is not None:
        _use_device(device)
    for gpu in tf.config.get_visible_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)  # other workers live on this device too


def _use_device(device: str) -> None:
    kind, _, number = device.lower().partition(":")
    gpus = tf.config.list_physical_devices("GPU")
    if kind == "cpu":
        tf.config.set_visible_devices([], "GPU")
    elif kind in ("gpu", "cuda") and (number or "0").isdigit() and int(number or 0) < len(gpus):
        tf.config.set_visible_devices([gpus[int(number or 0)]], "GPU")
    else:
        raise UsageError(f"this worker has no device {device!r}. It has {', '.join(_devices())}")


def resize(threads: int) -> int:
    """Its pools are made at the first operation; until then they may be given any size."""
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        pass
    return tf.config.threading.get_intra_op_parallelism_threads()


def _devices() -> list[str]:
    return [d.name.partition(":")[2].lower() for d in tf.config.list_physical_devices()]


def facts() -> dict[str, Any]:
    """``threads``: 0 means that TensorFlow chooses."""
    return {
        "framework": NAME,
        "version": tf.__version__,
        "devices": _devices(),
        "threads": tf.config.threading.get_intra_op_parallelism_threads(),
        "numpy": np.__version__,
    }


def program(obj: Any, *, is_module: bool) -> TensorFlowProgram:
    if not callable(obj):
        raise cannot_be_called(obj, is_module)
    if not tf.executing_eagerly():
        raise UsageError(
            "the target's module has switched TensorFlow's eager execution off (tf.compat.v1.disable_v2_behavior, "
            "disable_eager_execution), and a TensorFlow worker needs it. Leave that line out, and wrap a function that builds a graph "
            "in tf.compat.v1.wrap_function(fn, signature). Or load it as it is in a worker 'numpy' with this environment's "
            "python=: a function there is given numpy arrays, runs its own session, and has the derivatives it brings along"
        )
    return TensorFlowProgram(obj, is_module)
