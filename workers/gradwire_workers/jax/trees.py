"""A pytree as arrays by name: how parameters and buffers are told apart and called."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gradwire_wire.tensors import jax as tensors
from gradwire_wire.tensors import numpy as numpy_tensors

__all__ = ["Tree", "as_numbers", "copied", "dotted", "is_array", "is_trainable"]


class Tree:
    """The arrays of a pytree by the path that leads to each, its parts joined by dots; what is no array stays in it.

    A typed random key is an array of the numbers that it is made of: a state that splits its key must go on with the new one.
    name: of a leaf whose path this is; by default its parts joined by dots. numbers: whether Python's float and complex
    numbers are arrays too, as they are to `jax.grad`. numpy's arrays become JAX's; DtypeError where one would be narrowed.
    """

    def __init__(
        self, tree: Any, name: Callable[[Sequence[Any]], str] | None = None, *, numbers: bool = False
    ) -> None:
        found, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._leaves = [_as_leaf(leaf, numbers) for _, leaf in found]
        self._names = _unique([(name or dotted)(path) for path, _ in found])

    @property
    def arrays(self) -> dict[str, Any]:
        named = {name: as_numbers(leaf) for name, leaf in zip(self._names, self._leaves)}
        return {name: x for name, x in named.items() if is_array(x)}

    def filled(self, arrays: Mapping[str, Any]) -> Any:
        """The tree with these arrays in place of its own."""
        leaves = [
            _as_it_was(arrays[name], leaf) if name in arrays else leaf
            for name, leaf in zip(self._names, self._leaves)
        ]
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def only(self, arrays: Mapping[str, Any]) -> Any:
        """The tree with these in the place of its own, and None, which is no leaf, in all others."""
        leaves = [arrays.get(name) for name in self._names]
        return jax.tree_util.tree_unflatten(self._structure, leaves)


def is_array(x: Any) -> bool:
    """Whether x is a JAX array with values that can be sent: a key array is not."""
    return isinstance(x, jax.Array) and not _is_key(x)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def as_numbers(x: Any) -> Any:
    """A typed random key as the array of the numbers that it is made of; all else as it is."""
    return jax.random.key_data(x) if _is_key(x) else x


def _as_it_was(x: Any, own: Any) -> Any:
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(own)) if _is_key(own) and is_array(x) else x


def copied(x: Any, dtype: Any = None) -> Any:
    """JAX's array of these values, in memory of its own.

    numpy copies them, where JAX would: ``jnp.array`` and ``jnp.asarray`` compile a program for each shape and
    dtype, which took seconds for a model's state.
    """
    if isinstance(x, jax.Array) and (_is_key(x) or x.weak_type or not _is_on_host(x)):
        return jnp.array(x, dtype, copy=True)
    return jax.device_put(np.array(x, dtype))


def _is_on_host(x: Any) -> bool:
    """Whether it lies where JAX puts arrays by itself, and that is memory of the host."""
    device = jax.devices()[0]
    return device.platform == "cpu" and x.devices() == {device}


def is_trainable(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def dotted(path: Sequence[Any]) -> str:
    return ".".join(str(_part(key)) for key in path) or "value"


def _part(key: Any) -> Any:
    """What a dict, sequence, attribute or numbered key stands for; any other by its text."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key).strip(".[]'\"")


def _as_leaf(x: Any, numbers: bool) -> Any:
    if numbers and type(x) in (float, complex):
        return jnp.asarray(x)
    is_numpy = isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind not in "OSUMm"
    if not is_numpy:
        return x
    return copied(tensors.numpy_view(numpy_tensors.export(np.asarray(x))))


def _unique(names: Sequence[str]) -> list[str]:
    """Numbered where two paths read the same, such as those of the keys 0 and "0" of one dict."""
    taken: dict[str, None] = {}
    for name in names:
        number, free = 1, name
        while free in taken:
            free, number = f"{name}_{number}", number + 1
        taken[free] = None
    return list(taken)
