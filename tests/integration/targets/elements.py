"""Tensors looked at element by element, by indexing, in whatever framework they are of."""

import itertools
import warnings

import numpy as np

_filters = []


def elements(x):
    """Every element in C order, as text that is exact: Python's of a Python number."""
    return [_number(x[i] if i else x) for i in itertools.product(*map(range, x.shape))]


def _number(x):
    dtype = str(getattr(x.dtype, "name", x.dtype))
    x = x.item() if hasattr(x, "item") else x.numpy()
    for kind, python in (("bool", bool), ("complex", complex), ("int", int)):
        if kind in dtype:
            return repr(python(x))
    return repr(float(x))


def tree_elements(tree):
    """The same for every tensor of a tree, in order of appearance; of other values their repr."""
    if hasattr(tree, "shape") and hasattr(tree, "dtype") and not isinstance(tree, np.generic):
        return [elements(tree)]
    if isinstance(tree, dict):
        return [found for child in tree.values() for found in tree_elements(child)]
    if isinstance(tree, (list, tuple)):
        return [found for child in tree for found in tree_elements(child)]
    return [repr(tree)]


def tree_and_elements(tree):
    return tree, tree_elements(tree)


def pair(x, y):
    return x, y


def equals_true(mask):
    """A byte of 2 would not be equal to True."""
    return mask, mask == True  # noqa: E712


def seen(x, scalar):
    """What the scalar is on this side."""
    return [type(scalar).__module__, type(scalar).__qualname__, repr(scalar)]


def with_scalar(x, scalar):
    if isinstance(scalar, (bool, int, float, complex, np.number)) and abs(scalar) < 1000:
        return x * scalar
    return x * 1


def strides(x):
    """In elements; and the tensor itself."""
    if callable(getattr(x, "stride", None)):
        return list(x.stride()), x
    return [s // x.itemsize for s in x.strides], x


def addresses(tensors):
    return [x.data_ptr() if hasattr(x, "data_ptr") else x.__array_interface__["data"][0] for x in tensors]


def warnings_are_errors(on):
    if on:
        _filters.append(warnings.filters[:])
        warnings.simplefilter("error")
    else:
        warnings.filters[:] = _filters.pop()


def numpy_result(x, name):
    """User code may return numpy arrays from whatever framework."""
    values = {"float64": 1 + 1e-12, "int64": 2**40, "uint64": 2**63, "complex128": 1 + 1e-12j}
    return np.array([values.get(name, 1)], name)


def weighted(x):
    return x[0] * 2 + x[1] * 3


def add_in_place_to_first(x, y):
    x += 1
    return x, y
