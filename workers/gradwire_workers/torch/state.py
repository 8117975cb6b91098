"""A torch module's state: names to tensors, frozen parts, and loading all or nothing."""

from __future__ import annotations

import hashlib
import sys
from typing import Any, Iterable, Sequence

import numpy as np
import torch

from gradwire_wire.errors import DtypeError, UsageError
from gradwire_wire.tensors import numpy as numpy_family
from gradwire_wire.tensors.torch import adopt
from gradwire_workers.torch.tape import is_inexact

__all__ = [
    "aliases",
    "buffers",
    "detached",
    "digest",
    "freeze",
    "frozen",
    "grads",
    "is_of_keras",
    "load",
    "parameters",
    "regularizers",
    "versions",
]


_WALKS = ("parameters", "named_parameters", "_named_members", "named_modules")
_walks_as_torch: dict[type, bool] = {}
"""Whether modules of that class name their parts and parameters in torch's own way."""


def parameters(module: Any) -> list[Any]:
    """As ``module.parameters()``, which spends most of its time on names."""
    found: dict[int, Any] = {}  # by identity: a tensor's own hash takes longer
    parts = [module]
    seen = {module}
    for part in parts:
        kind = type(part)
        if kind not in _walks_as_torch:
            own = torch.nn.Module
            is_own = all(getattr(kind, name, 0) is getattr(own, name) for name in _WALKS)
            _walks_as_torch[kind] = is_own and not issubclass(kind, torch.jit.ScriptModule)
        inside = part.__dict__
        if not _walks_as_torch[kind] or "named_modules" in inside or "parameters" in inside:
            return list(module.parameters())
        for p in inside["_parameters"].values():
            found[id(p)] = p
        for child in inside["_modules"].values():
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)
    found.pop(id(None), None)
    return list(found.values())


def detached(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Views of the tensors, without their autograd. What is no tensor (extra state) stays as it is.

    UsageError where a lazy module has not made them yet, and for sparse ones (the adjacency of a graph, say).
    """
    return {name: _checked(name, x).detach() if isinstance(x, torch.Tensor) else x for name, x in named}


def _checked(name: str, x: Any) -> Any:
    if torch.nn.parameter.is_lazy(x):
        raise UsageError(
            f"{name} has no shape yet: call the module once with an example, so that its lazy parts are made"
        )
    if x.layout is not torch.strided:
        raise UsageError(
            f"{name} is of layout {str(x.layout)[6:]}, and what is fetched or saved of a state is dense. Keep it out of the state: "
            "register_buffer(..., persistent=False)"
        )
    return x


def buffers(module: Any) -> dict[str, Any]:
    """As `detached`, but for the sparse ones that are no part of the state: constants, which stay here."""
    found = dict(module.named_buffers())
    if any(x.layout is not torch.strided for x in found.values()):
        persistent = module.state_dict()
        found = {name: x for name, x in found.items() if x.layout is torch.strided or name in persistent}
    return detached(found.items())


def grads(module: Any) -> dict[str, Any]:
    """Accumulated gradients, dense; None where there are none."""
    return {name: _dense(p.grad) for name, p in module.named_parameters()}


def frozen(module: Any) -> list[str]:
    """Parameters that do not learn, and whose gradients nobody wants."""
    return [name for name, p in module.named_parameters() if not p.requires_grad]


def versions(module: Any) -> list[int]:
    """How often torch has seen each parameter written to; nothing of a module that has yet to make some."""
    found = list(module.parameters())
    return [] if any(map(torch.nn.parameter.is_lazy, found)) else [p._version for p in found]


def digest(module: Any) -> str:
    """Of the contents of all buffers: BatchNorm writes them, and ``.data``, without a word to torch's counters."""
    found = hashlib.blake2b(digest_size=16)
    for x in module.buffers():
        if _is_plain(x) and x.layout is torch.strided:
            bits = x.detach().cpu().contiguous().reshape(-1)
            found.update(bits.view(torch.uint8).numpy())
    return found.hexdigest()


def aliases(module: Any) -> dict[str, str]:
    """The names that ``named_parameters`` and ``named_buffers`` leave out, because they are of a tensor which these have named already."""
    found: dict[str, str] = {}
    for named in (module.named_parameters, module.named_buffers):
        first = {id(x): name for name, x in named()}
        every = named(remove_duplicate=False)
        found.update((name, first[id(x)]) for name, x in every if first[id(x)] != name)
    return found


def freeze(module: Any, flag: bool, names: Sequence[str]) -> None:
    """``requires_grad_(flag)`` of these parameters; a frozen one loses its gradient, or the next step would move it."""
    there = dict(module.named_parameters())
    stuck = [name for name in names if flag and not (is_inexact(there[name]))]
    if stuck:
        raise UsageError(
            f"requires_grad_(): {', '.join(stuck[:5])} is not of a floating-point or complex type"
        )
    for name in names:
        there[name].requires_grad_(flag)
        if not flag:
            there[name].grad = None


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


def is_of_keras(module: Any) -> bool:
    """Whether it is a `gradwire_workers.torch.keras.KerasModule`, which only they load who have Keras."""
    loaded = sys.modules.get("gradwire_workers.torch.keras")
    return loaded is not None and isinstance(module, loaded.KerasModule)


def regularizers(module: Any) -> list[str]:
    """See `gradwire_workers.program.Program.regularizers`."""
    return list(module.regularizers()) if is_of_keras(module) else []
