"""The user's function over flat operands, in the two ways there are to run it.

`Traced`: its Python ran once for this signature and left a jaxpr, which stands for the function in every
word, in residuals and in ``spec``. So all of them agree, whatever that Python did (random masks, counters),
and closed-over weights are arguments of the compiled programs instead of copies inside each.
`Eager`: its Python runs at every call, on real arrays.
"""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Iterator, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from gradwire_wire.carriers import Aval
from gradwire_wire.errors import GradwireError
from gradwire_wire.tensors import jax as tensors
from gradwire_wire.tensors import numpy as numpy_tensors
from gradwire_workers.flat import Flat
from gradwire_workers.jax import jaxprs
from gradwire_workers.jax.words import is_inexact

__all__ = [
    "Eager",
    "Signature",
    "Traced",
    "as_array",
    "has_rules",
    "is_untraceable",
    "needs_values",
    "seeded",
    "used_operands",
]

Signature = Tuple[Tuple[Tuple[int, ...], Any], ...]  # shape and JAX's dtype of each operand

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def needs_values(error: Exception) -> bool:
    """Whether tracing failed because the function looks at values, or keeps some for later calls."""
    if isinstance(error, TypeError) and "concrete" in str(error):
        return True
    return isinstance(error, _NEEDS_VALUES) or (type(error) is Exception and str(error).startswith("Leaked"))


def is_untraceable(error: Exception) -> bool:
    """Whether the function may work on real arrays although tracing it raised ``error``."""
    if isinstance(error, GradwireError):
        return False
    return needs_values(error) or isinstance(error, (TypeError, AttributeError))


class Traced:
    """The function for one signature. Raises what the user's code raises while it is traced.

    consts: the arrays it closes over, to be handed back as the first argument of `call`.
    avals, structure: of its results. ``used``: which operands have a cotangent: inexact, and some inexact result
    depends on them.
    has_rules: whether some part of it has derivative rules of its own (custom_jvp, custom_vjp).
    has_effects: whether it prints or calls back into Python.
    draws: whether its Python drew from the generators that a seed seeds, so that another seed makes another function.
    lifted: so many of its operands, the first, are parameters of a module. moves: how many arrays a `forward` has after
    its results that `settled` takes away: a module's state.
    """

    lifted = moves = 0

    def __init__(self, flat: Flat, signature: Signature, seed: int | None, check_leaks: bool) -> None:
        operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in signature]
        function = Eager(flat, seed)
        with jax.checking_leaks() if check_leaks else nullcontext():
            closed = jax.make_jaxpr(function)(*operands)
        self._jaxpr, self.draws = closed.jaxpr, function.draws
        self.consts = [
            c if isinstance(c, jax.Array) else jax.device_put(np.asarray(c)) for c in closed.consts
        ]
        self.structure = flat.structure
        self.avals: list[Aval] = [tensors.aval(a) for a in closed.out_avals]
        self.used = used_operands(closed)
        self.has_effects = bool(closed.jaxpr.effects)
        self.has_rules = has_rules(closed.jaxpr)

    def call(self, consts: Sequence[Any], *operands: Any) -> tuple[Any, ...]:
        """The results, under any transform."""
        return jaxprs.run(self._jaxpr, consts, operands)

    def forward(self, consts: Sequence[Any], *operands: Any) -> tuple[Any, ...]:
        """The results, and what the call moves."""
        return self.call(consts, *operands)

    def settled(self, results: Sequence[Any]) -> Sequence[Any]:
        """The results of a `forward` that has been made, without what it moves."""
        return results


class Eager:
    """The function itself: a tuple of JAX arrays, whatever kind of arrays it takes and returns. As to `forward`, `Traced`."""

    lifted = moves = 0

    def __init__(self, flat: Flat, seed: int | None) -> None:
        self._flat, self._seed = flat, seed
        self.draws = False

    @property
    def structure(self) -> bytes:
        """The result tree of the latest run."""
        return self._flat.structure

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        arrays = [jax.device_put(x) if isinstance(x, np.ndarray) else x for x in operands]
        with seeded(self._seed) as have_drawn:
            results = tuple(map(as_array, self._flat(*arrays)))
            self.draws = have_drawn()
        return results

    def forward(self, *operands: Any) -> tuple[Any, ...]:
        return self(*operands)

    def settled(self, results: Sequence[Any]) -> Sequence[Any]:
        return results


def as_array(x: Any) -> Any:
    """A numpy array in a result as a JAX array; DtypeError where it would be narrowed."""
    if not isinstance(x, np.ndarray):
        return x
    family = tensors if tensors.is_tensor(x) else numpy_tensors
    return jnp.asarray(tensors.numpy_view(family.export(x)))


def has_rules(jaxpr: Any) -> bool:
    """Whether a program, or one that it calls, has a custom_jvp or custom_vjp function."""
    return any(
        equation.primitive.name.startswith(("custom_jvp", "custom_vjp"))
        or any(map(has_rules, _called(equation)))
        for equation in jaxpr.eqns
    )


def _called(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for x in value if isinstance(value, (list, tuple)) else (value,):
            inner = getattr(x, "jaxpr", x)
            if hasattr(inner, "eqns"):
                yield inner


def used_operands(closed: Any, results: int | None = None) -> list[bool]:
    """Which operands are inexact and have an inexact result (of the first ``results``) that depends on them."""
    moving = [is_inexact(a) for a in closed.in_avals]
    eliminate = getattr(partial_eval, "dce_jaxpr", None)
    if eliminate is None:
        return moving
    wanted = [is_inexact(a) and (results is None or i < results) for i, a in enumerate(closed.out_avals)]
    kept = eliminate(closed.jaxpr, wanted)[1]
    return [a and b for a, b in zip(moving, kept)]


@contextmanager
def seeded(seed: int | None) -> Iterator[Callable[[], bool]]:
    """Python's and numpy's global generators seeded for the time of a call; gives what tells whether they were drawn from.

    Without a seed they are left alone, and that is not known: True.
    """
    if seed is None:
        yield lambda: True
        return
    before = _states()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    begun = _states()
    try:
        yield lambda: _states() != begun
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _states() -> tuple[Any, Any]:
    """Of Python's generator and numpy's, comparable."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, np.asarray(keys).tolist(), *rest)
