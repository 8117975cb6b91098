"""The four callers of the conformance table, each in its framework's own way, with numpy in and out.

``forward`` gives the result leaves; ``gradients`` the cotangents of the inexact argument leaves at given
cotangents of the inexact result leaves; ``tangents`` the tangents of the inexact result leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Flat = Callable[..., list[Any]]


def is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def leaves_of(tree: Any) -> list[Any]:
    """Tensors of a tree, in order of appearance."""
    if is_array(tree):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for child in tree for leaf in leaves_of(child)] if isinstance(tree, (list, tuple)) else []


def with_leaves(tree: Any, leaves: Sequence[Any]) -> Any:
    """The same tree with other tensors."""
    it = iter(leaves)

    def rebuild(x: Any) -> Any:
        if is_array(x):
            return next(it)
        if isinstance(x, dict):
            return {k: rebuild(v) for k, v in x.items()}
        return type(x)(rebuild(v) for v in x) if isinstance(x, (list, tuple)) else x

    return rebuild(tree)


def flat(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat:
    """The function of its tensors alone."""
    return lambda *leaves: leaves_of(function(*with_leaves(args, leaves), **kwargs))


def inexact(arrays: Sequence[Any]) -> list[int]:
    """Which arrays can be differentiated."""
    return [
        i
        for i, x in enumerate(arrays)
        if np.issubdtype(np.dtype(getattr(x.dtype, "name", None) or str(x.dtype)[6:]), np.inexact)
    ]


class NumpyCaller:
    name, compiled = "numpy", False

    def forward(self, function: Any, args: Any, kwargs: Any) -> list[np.ndarray]:
        return [np.asarray(x) for x in leaves_of(function(*args, **kwargs))]

    def gradients(self, function: Any, args: Any, kwargs: Any, cts: Sequence[np.ndarray]) -> list[np.ndarray]:
        out, pullback = function.vjp(*args, **kwargs)
        given = iter(cts)
        leaves = leaves_of(out)
        moving = inexact(leaves)
        bar = with_leaves(
            out, [next(given) if i in moving else np.zeros(x.shape, x.dtype) for i, x in enumerate(leaves)]
        )
        return leaves_of(pullback(bar))

    def tangents(
        self, function: Any, args: Any, kwargs: Any, dots: Sequence[np.ndarray]
    ) -> list[np.ndarray] | None:
        if kwargs:
            return None  # Remote.jvp takes positional arguments
        given = iter(dots)
        tangents = with_leaves(
            args,
            [next(given) if i in inexact(leaves_of(args)) else None for i, _ in enumerate(leaves_of(args))],
        )
        return [x for x in leaves_of(function.jvp(args, tangents)[1]) if x is not None]


class JaxCaller:
    def __init__(self, compiled: bool) -> None:
        self.name, self.compiled = "jax", compiled

    def _run(self, act: Callable[..., Any], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        import jax

        wide = any(x.dtype.itemsize == 8 for x in arrays)
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            inputs = [jax.numpy.asarray(x) for x in arrays]
            return [np.asarray(x) for x in (jax.jit(act) if self.compiled else act)(*inputs)]

    def forward(self, function: Any, args: Any, kwargs: Any) -> list[np.ndarray]:
        return self._run(flat(function, args, kwargs), leaves_of(args))

    def gradients(self, function: Any, args: Any, kwargs: Any, cts: Sequence[np.ndarray]) -> list[np.ndarray]:
        import jax

        arrays, f = leaves_of(args), flat(function, args, kwargs)
        moving = inexact(arrays)

        def act(*inputs: Any) -> Any:
            xs, given = inputs[: len(arrays)], iter(inputs[len(arrays) :])
            outs, pull = jax.vjp(f, *xs)
            bars = [
                next(given)
                if jax.numpy.issubdtype(o.dtype, jax.numpy.inexact)
                else np.zeros(o.shape, jax.dtypes.float0)
                for o in outs
            ]
            bars_in = pull(bars)
            return [bars_in[i] for i in moving]

        return self._run(act, [*arrays, *cts])

    def tangents(self, function: Any, args: Any, kwargs: Any, dots: Sequence[np.ndarray]) -> list[np.ndarray]:
        import jax

        arrays, f = leaves_of(args), flat(function, args, kwargs)
        moving = inexact(arrays)

        def act(*inputs: Any) -> Any:
            xs, given = inputs[: len(arrays)], iter(inputs[len(arrays) :])
            full = [
                next(given) if i in moving else np.zeros(x.shape, jax.dtypes.float0) for i, x in enumerate(xs)
            ]
            outs, moved = jax.jvp(f, xs, tuple(full))
            return [
                m
                for o, m in zip(outs, moved, strict=True)
                if jax.numpy.issubdtype(o.dtype, jax.numpy.inexact)
            ]

        return self._run(act, [*arrays, *dots])


class TorchCaller:
    name, compiled = "torch", False

    def forward(self, function: Any, args: Any, kwargs: Any) -> list[np.ndarray]:
        import torch

        with torch.no_grad():
            return [x.numpy() for x in flat(function, args, kwargs)(*map(torch.tensor, leaves_of(args)))]

    def gradients(self, function: Any, args: Any, kwargs: Any, cts: Sequence[np.ndarray]) -> list[np.ndarray]:
        import torch

        arrays = leaves_of(args)
        moving = inexact(arrays)
        xs = [torch.tensor(x, requires_grad=i in moving) for i, x in enumerate(arrays)]
        outs = [o for o in flat(function, args, kwargs)(*xs) if o.is_floating_point()]
        return [
            g.numpy()
            for g in torch.autograd.grad(outs, [xs[i] for i in moving], list(map(torch.tensor, cts)))
        ]

    def tangents(self, function: Any, args: Any, kwargs: Any, dots: Sequence[np.ndarray]) -> list[np.ndarray]:
        import torch

        arrays, f = leaves_of(args), flat(function, args, kwargs)
        moving = inexact(arrays)
        xs = list(map(torch.tensor, arrays))

        def act(*given: Any) -> Any:
            it = iter(given)
            return tuple(
                o
                for o in f(*[next(it) if i in moving else x for i, x in enumerate(xs)])
                if o.is_floating_point()
            )

        return [
            x.numpy()
            for x in torch.func.jvp(act, tuple(xs[i] for i in moving), tuple(map(torch.tensor, dots)))[1]
        ]


class TensorflowCaller:
    def __init__(self, compiled: bool) -> None:
        self.name, self.compiled = "tensorflow", compiled

    def _run(self, act: Callable[..., Any], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        import tensorflow as tf

        act = tf.function(act) if self.compiled else act
        return [tf.convert_to_tensor(x).numpy() for x in act(*map(tf.constant, arrays))]

    def forward(self, function: Any, args: Any, kwargs: Any) -> list[np.ndarray]:
        return self._run(flat(function, args, kwargs), leaves_of(args))

    def gradients(self, function: Any, args: Any, kwargs: Any, cts: Sequence[np.ndarray]) -> list[np.ndarray]:
        import tensorflow as tf

        arrays, f = leaves_of(args), flat(function, args, kwargs)
        moving = inexact(arrays)

        def act(*inputs: Any) -> Any:
            xs, given = inputs[: len(arrays)], inputs[len(arrays) :]
            with tf.GradientTape() as tape:
                tape.watch([xs[i] for i in moving])
                outs = [o for o in f(*xs) if o.dtype.is_floating]
            return tape.gradient(outs, [xs[i] for i in moving], output_gradients=list(given))

        return self._run(act, [*arrays, *cts])

    def tangents(self, function: Any, args: Any, kwargs: Any, dots: Sequence[np.ndarray]) -> None:
        return None  # forward-mode accumulators: see tests/unit/test_tensorflow_caller.py


CALLERS = {
    "numpy": NumpyCaller(),
    "jax": JaxCaller(False),
    "jax-jit": JaxCaller(True),
    "torch": TorchCaller(),
    "tensorflow": TensorflowCaller(False),
    "tensorflow-function": TensorflowCaller(True),
}
