"""What a torch target would return, by fake tensors on a shadow of it; nothing real is computed or changed.

Fake tensors alone do not protect a module: it would keep what it stores (``self.n += 1``,
``self.cache = x``), and operations among its own real tensors would be done. So the target is called
as its *shadow*: the same classes, whose tensors are fake and whose containers are copies. A dispatch mode
refuses writes to real tensors that are reached in another way (closures, globals, TorchScript), and
attributes of the modules are put back should anything have changed them.

FakeTensorMode itself is never on: only what depends on operands or parameters is fake. A mask that user
code makes and caches (``lru_cache``) is a real one, good for the real calls that follow.

User code does run once, on tensors without values; what it does outside torch and its own module happens.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

import torch
from torch._subclasses import fake_tensor
from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradwire_wire.carriers import Aval
from gradwire_wire.errors import UsageError
from gradwire_wire.tensors.torch import aval, torch_dtype
from gradwire_workers.torch.shadows import Shadows
from gradwire_workers.torch.tape import entered, leaves_of

__all__ = ["spec"]

_FAKE_FAILURES = tuple(
    getattr(fake_tensor, name)
    for name in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedOperatorException",
        "UnsupportedFakeTensorException",
    )
    if hasattr(fake_tensor, name)
)
_ABOUT_FAKE = (
    "FakeTensor",
    "fake tensor",
    "tensor subclasses",
    "meta tensor",
    "Meta tensor",
    "doesn't have storage",
)


class WriteRefused(Exception):
    """User code tried to write to a real tensor while only shapes were asked for."""


def spec(
    target: Any, flat_of: Callable[[Any], Any], avals: Sequence[Aval], device: Any
) -> tuple[list[Aval], bytes, bool]:
    """Shapes and dtypes of the target's results, their structure, and whether a torch.autograd.Function made them.

    flat_of: makes the function of flat operands of a (shadow) target.
    Raises UsageError that names out_spec where a shape depends on values, or where the shadow does not hold.
    """
    fakes = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    guard, shadows = _Guard(fakes), Shadows(fakes)
    flat = flat_of(shadows.of(getattr(target, "_orig_mod", target)))
    try:
        with fakes:
            operands = [torch.empty(a.shape, dtype=torch_dtype(a.dtype), device=device) for a in avals]
        with torch.enable_grad(), _undisturbed(device), guard:
            results = flat(*[entered(x) for x in leaves_of(operands)])
        found, ruled = [aval(y) for y in results], _has_functions(results)
    except Exception as error:
        if guard.refused or isinstance(error, _FAKE_FAILURES) or any(t in str(error) for t in _ABOUT_FAKE):
            raise _advice(guard.refused or error) from error
        raise
    finally:
        shadows.restore()
    if guard.refused:  # and the user's code went on
        raise _advice(guard.refused)
    return found, flat.structure, ruled


def _has_functions(results: Sequence[Any]) -> bool:
    """Whether some node of their graph is a torch.autograd.Function of somebody's."""
    nodes, seen = [y.grad_fn for y in results], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        nodes.extend(before for before, _ in node.next_functions)
    return False


@contextmanager
def _undisturbed(device: Any) -> Iterator[None]:
    """Random numbers go on as before, and torch does not log what user code raises, which is raised anyway.

    Distributions do not look whether their arguments are valid, which has no answer here and changes no shape.
    """
    logger = logging.getLogger(fake_tensor.__name__)
    before, logger.disabled = logger.disabled, True
    validates, Distribution._validate_args = Distribution._validate_args, False
    try:
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            yield
    finally:
        logger.disabled, Distribution._validate_args = before, validates


def _advice(error: Exception) -> UsageError:
    what = {
        "DataDependentOutputException": "what the target does depends on values, not only on shapes",
        "DynamicOutputShapeException": "the shape of a result depends on values",
    }.get(type(error).__name__, "the target cannot be traced with tensors that have no values")
    return UsageError(
        f"the shapes of the results cannot be told without running the target: {what} ({type(error).__name__}: "
        f"{str(error) or 'no more is known'}). Say what it returns: remote.options(out_spec=...)"
    )


class _Guard(TorchDispatchMode):
    """Sees every operation: refuses writes to real tensors that were there before, lets new ones be.

    A new real tensor that fake values are written to (``out = zeros(n); out[0] = x``) has no known
    values any more: from then on it is taken for a fake one.
    """

    def __init__(self, fakes: Any) -> None:
        super().__init__()
        self._fakes = fakes
        self._storages: dict[int, Any] = {}  # made since, and kept so that their addresses stay taken
        self._unknown: set[int] = set()
        self.refused: WriteRefused | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = tree_flatten((args, kwargs or {}))
        real = [_storage(x) for x in leaves if isinstance(x, torch.Tensor) and not _is_fake(x)]
        is_fake = any(_is_fake(x) for x in leaves) or any(key in self._unknown for key, _ in real)
        if func._schema.is_mutable:
            for x in _written(func._schema, args, kwargs or {}):
                self._check_write(func, x, is_fake)
        if is_fake and self._unknown:
            leaves = [self._faked(x) for x in leaves]
            args, kwargs = tree_unflatten(leaves, tree)
        results = func(*args, **(kwargs or {}))
        given = {key for key, _ in real}
        for y in tree_flatten(results)[0]:
            if isinstance(y, torch.Tensor) and not _is_fake(y):
                key, storage = _storage(y)
                if key not in given:
                    self._storages[key] = storage
        return results

    def _check_write(self, func: Any, x: Any, is_fake: bool) -> None:
        if not isinstance(x, torch.Tensor) or _is_fake(x):
            return
        key, _ = _storage(x)
        if key not in self._storages:
            error = WriteRefused(f"{func} would write to a real tensor of shape {tuple(x.shape)}")
            self.refused = self.refused or error
            raise error
        if is_fake:
            self._unknown.add(key)

    def _faked(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or _is_fake(x) or _storage(x)[0] not in self._unknown:
            return x
        return self._fakes.from_tensor(x.detach())


def _is_fake(x: Any) -> bool:
    return isinstance(x, fake_tensor.FakeTensor)


def _storage(x: Any) -> tuple[int, Any]:
    """Identity of a tensor's memory; views share it. 0 for layouts that have none."""
    if x.layout is not torch.strided:
        return 0, None
    storage = x.untyped_storage()
    return storage._cdata, storage


def _written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)
