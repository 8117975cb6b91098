"""To run a jaxpr: JAX's own way, which has moved from one of its modules to another."""

from __future__ import annotations

from typing import Any, Sequence

try:
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
except ImportError:  # before 0.4.31, whose successors need a newer Python than 3.9
    from jax.core import ClosedJaxpr, jaxpr_as_fun

__all__ = ["run"]


def run(jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, ...]:
    """Its results, under any transform."""
    return tuple(jaxpr_as_fun(ClosedJaxpr(jaxpr, list(consts)))(*operands))
