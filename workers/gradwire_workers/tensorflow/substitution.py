"""Variables that stand for given tensors while a target is called: how a module becomes a function of its parameters.

For the time of the call the class of each variable is one in which reading gives the tensor it stands for, and
assigning gives it another one to stand for. So it works for whoever holds the variable: Keras 2 and 3, tf.Module,
plain objects, eagerly, in a trace and in the loops and branches of one. Whatever would get at the variable's own
memory in some other way is refused, since the result would not depend on the given tensor and its gradient
would be missing:

    in Python        asking for ``handle``, as all operations on a variable do, is a UsageError
    in a graph       afterwards, that no operation takes the handle of the variable
    in eager code    afterwards, that no tape has seen the variable being read
    by a rule        tf.custom_gradient (tf.recompute_grad) asks for the handles of the variables read in its function

The target's own tf.functions are not traced for themselves meanwhile, but called as the Python that they are (in a
trace by way of AutoGraph): a trace of theirs may have the handle, or would be kept with the tensors of this call in it.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Iterator, Mapping

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

from gradwire_wire.errors import UsageError

__all__ = ["substituted"]

_note_access = pywrap_tfe.TFE_Py_VariableWatcherVariableAccessed
_Function = type(tf.function(lambda: None))
_STANDS_FOR = "_gradwire_stands_for"
_NAME = "_gradwire_name"


class _NotItsOwn(UsageError, AttributeError):
    """An AttributeError too: TensorFlow then tries its way for plain tensors, which leads to `value`."""


class _Standing:
    """What a variable's class has in front of it for the time of a call."""

    def value(self) -> Any:
        _note_access(
            self
        )  # for tf.custom_gradient, which loses gradients of tensors that are not its arguments
        return self.__dict__[_STANDS_FOR]

    def read_value(self) -> Any:
        return self.value()

    def read_value_no_copy(self) -> Any:
        return self.value()

    def _read_variable_op(self, *_: Any, **__: Any) -> Any:
        return self.value()

    def _dense_var_to_tensor(self, dtype: Any = None, name: Any = None, as_ref: bool = False) -> Any:
        return tf.convert_to_tensor(self.value(), dtype=dtype)

    def numpy(self) -> Any:
        return self.value().numpy()

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        return tf.gather(self.value(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        return tf.gather_nd(self.value(), indices, name=name)

    def assign(self, value: Any, *_: Any, **__: Any) -> Any:
        self.__dict__[_STANDS_FOR] = self._checked(tf.convert_to_tensor(value, dtype=self.value().dtype))
        return self

    def assign_add(self, delta: Any, *_: Any, **__: Any) -> Any:
        return self.assign(self.value() + tf.convert_to_tensor(delta, dtype=self.value().dtype))

    def assign_sub(self, delta: Any, *_: Any, **__: Any) -> Any:
        return self.assign(self.value() - tf.convert_to_tensor(delta, dtype=self.value().dtype))

    def _checked(self, value: Any) -> Any:
        if not value.shape.is_compatible_with(self.value().shape):
            raise ValueError(f"cannot assign a value of shape {value.shape} to {self!r}")
        return value

    _handle = property(
        lambda self: None
    )  # TensorFlow's C++ looks here, and reads the variable if this is a tensor

    @property
    def handle(self) -> Any:
        raise _NotItsOwn(_direct(self.__dict__[_NAME]))

    def __repr__(self) -> str:
        return f"<the variable {self.__dict__[_NAME]} of shape {self.value().shape}>"


@lru_cache(maxsize=None)
def _standing_class(kind: Any) -> Any:
    return type(kind.__name__, (_Standing, kind), {})


def _direct(name: str) -> str:
    return (
        f"the module uses its variable {name} in a way that would not see the value given for it (a SavedModel, a "
        "compiled concrete function, tf.recompute_grad, or an operation on the variable itself). Train it in its worker: "
        'net.optimizer("keras.optimizers:Adam") and gw.jax.functional(net, owner="worker") or a plain call'
    )


@contextmanager
def substituted(given: Mapping[str, tuple[Any, Any]]) -> Iterator[None]:
    """Let each variable stand for its tensor, by name: ``{name: (variable, tensor)}``; what was assigned is its ``value()``.

    UsageError, afterwards, where the body has read one of them directly.
    """
    variables = {name: variable for name, (variable, _) in given.items()}
    for name, variable in variables.items():
        _check_kind(name, variable)
    handles = {name: variable.handle for name, variable in variables.items()}
    call, _Function.__call__ = _Function.__call__, _inlined
    try:
        for name, (variable, tensor) in given.items():
            variable.__dict__.update({_STANDS_FOR: tensor, _NAME: name})
            kind: Any = type(variable)
            variable.__class__ = _standing_class(kind)
        with tf.GradientTape() as probe, _explained():
            yield
        _check_unread(variables, handles, probe)
    finally:
        _Function.__call__ = call
        for variable in variables.values():
            if isinstance(variable, _Standing):
                variable.__class__ = type(variable).__mro__[2]
                del variable.__dict__[_STANDS_FOR], variable.__dict__[_NAME]


@contextmanager
def _explained() -> Iterator[None]:
    """TensorFlow's C++ is not prepared for a handle that raises."""
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, _NotItsOwn):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise UsageError(str(cause)) from error


def _inlined(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """In place of the call of a tf.function."""
    python = function.python_function
    if tf.executing_eagerly() or not function._autograph:
        return python(*args, **kwargs)
    return autograph.convert(recursive=True, user_requested=True)(python)(*args, **kwargs)


def _check_kind(name: str, variable: Any) -> None:
    if isinstance(variable, _Standing):
        raise UsageError("a module was called as a function of its parameters by itself")
    if not isinstance(variable, BaseResourceVariable):
        raise UsageError(
            f"{name} is a {type(variable).__qualname__}, for which no value can be given. Train the module in its worker"
        )


def _check_unread(variables: Mapping[str, Any], handles: Mapping[str, Any], probe: Any) -> None:
    watched = {id(v) for v in probe.watched_variables()}
    used = set() if tf.executing_eagerly() else _used_handles(tf.compat.v1.get_default_graph())
    for name, variable in variables.items():
        if id(variable) in watched or id(handles[name]) in used:
            raise UsageError(_direct(name))


def _used_handles(graph: Any) -> set[int]:
    """Identities of the resources outside of this graph that an operation in it is given."""
    return {id(outer) for outer, inner in graph.captures if inner.dtype == tf.resource and inner.consumers()}
