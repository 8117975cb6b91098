"""A torch module's state: names to tensors, loading all or nothing, and optimizers over its parameters."""

from __future__ import annotations

from typing import Any, Iterable

import numpy as np
import torch

from gradwire_wire.errors import DtypeError, UsageError
from gradwire_wire.tensors import numpy as numpy_family
from gradwire_wire.tensors.torch import adopt

__all__ = ["TorchOptimizer", "detached", "grads", "load"]


def detached(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Views of the tensors, without their autograd. What is no tensor (extra state) stays as it is."""
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in named}


def grads(module: Any) -> dict[str, Any]:
    """Accumulated gradients, dense; None where there are none."""
    return {name: _dense(p.grad) for name, p in module.named_parameters()}


def _dense(grad: Any) -> Any:
    if grad is None:
        return None
    return grad.detach() if grad.layout is torch.strided else grad.detach().to_dense()


def load(module: Any, new: dict[str, np.ndarray], strict: bool) -> None:
    """`Module.load_state_dict` that changes nothing where it fails; UsageError with torch's own list of reasons."""
    there = module.state_dict()
    tensors = {name: _adopted(x) for name, x in new.items()}
    for name, x in tensors.items():
        _check_dtype(name, x, there.get(name))
    before = {name: x.detach().clone() for name, x in there.items() if _is_plain(x)}
    try:
        module.load_state_dict(tensors, strict=strict)
    except (RuntimeError, TypeError) as error:
        with torch.no_grad():
            for name, x in before.items():
                there[name].copy_(x)
        raise UsageError(f"nothing was loaded. {error}") from error


def _adopted(x: Any) -> Any:
    is_array = isinstance(x, (np.ndarray, np.generic))
    return adopt(numpy_family.export(np.asarray(x))) if is_array else x


def _is_plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not torch.nn.parameter.is_lazy(x)


def _check_dtype(name: str, given: Any, there: Any) -> None:
    """Values may be widened, never narrowed."""
    if not isinstance(given, torch.Tensor) or not _is_plain(there) or given.dtype == there.dtype:
        return
    same_kind = given.dtype.is_floating_point == there.dtype.is_floating_point and not given.dtype.is_complex
    if not same_kind or torch.promote_types(given.dtype, there.dtype) != there.dtype:
        raise DtypeError(
            f"nothing was loaded. {name} is {str(there.dtype)[6:]} in the module and {str(given.dtype)[6:]} in the state given. "
            f"Convert it first: x.astype({str(there.dtype)[6:]!r})"
        )


class TorchOptimizer:
    """A torch optimizer over a module's parameters. See `gradwire_workers.program.Optimizer`."""

    def __init__(self, program: Any, module: Any, target: Any, kwargs: dict[str, Any]) -> None:
        self._program = program
        self._name = getattr(target, "__qualname__", repr(target))
        try:
            self._optimizer = target(module.parameters(), **kwargs)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self._name}(parameters, {_shown(kwargs)}): {error}") from error
        if not (hasattr(self._optimizer, "step") and hasattr(self._optimizer, "param_groups")):
            raise UsageError(f"{self._name} does not make a torch optimizer; try torch.optim:Adam")

    def _parameters(self) -> list[Any]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def step(self) -> None:
        moved = [p for p in self._parameters() if p.grad is not None]
        if not moved:
            raise UsageError(
                f"{self._name}.step(): no gradient was accumulated since the last zero_grad(), so nothing would be learned. "
                "Call a pullback of this module first; a module that is the first stage is reached through its anchor "
                "(gw.jax.functional(net, owner='worker'))"
            )
        try:
            self._optimizer.step()
        except TypeError as error:
            if "closure" not in str(error):
                raise
            raise UsageError(
                f"{self._name} wants to evaluate the loss itself (a closure), which is not here: {error}"
            ) from error
        finally:
            self._program.generation += 1
            for p in moved:  # fused optimizers do not, and older graphs would go on with the new values
                torch.autograd.graph.increment_version(p)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)


def _shown(kwargs: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in kwargs.items())
