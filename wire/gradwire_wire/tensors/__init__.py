"""One module per framework with the same four functions, typed by `TensorFamily`."""

from __future__ import annotations

from typing import Any, Protocol

from gradwire_wire.carriers import Aval, Carrier

__all__ = ["TensorFamily"]


class TensorFamily(Protocol):
    """What each ``gradwire_wire.tensors.<framework>`` module offers."""

    NAME: str

    def is_tensor(self, x: Any) -> bool:
        """Whether x is this framework's tensor (tracers and symbolic tensors included)."""

    def export(self, x: Any) -> Carrier:
        """The tensor as numpy memory: a view where the framework allows one, else a copy.

        Waits until the values are there. Lazy conjugation and negation are resolved, gradients detached.
        Raises UnsupportedTensorError (sparse, meta, quantised, object, string, ...), naming the kind.
        """

    def adopt(self, carrier: Carrier) -> Any:
        """The carrier as this framework's tensor: the same memory where the framework allows it.

        The tensor keeps the carrier's memory alive (and so its lease). Never narrows a dtype:
        raises DtypeError where the framework could only take it narrowed (JAX without x64).
        """

    def aval(self, x: Any) -> Aval:
        """Shape and dtype of a tensor or tracer, without its values. Raises like `export`."""
