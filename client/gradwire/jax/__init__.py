"""Remote functions for programs of JAX: `call` makes each an ordinary function under every transformation.

See `gradwire.jax.primitive` for how a call becomes a node of a JAX program, and `gradwire.jax.callback` for
how that node reaches the worker.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradwire.families import family_of_call, is_leaf
from gradwire.functional import Functional, check_owner, check_remote
from gradwire.handle import Handle
from gradwire.jax.callback import barrier
from gradwire.jax.derived import Derived
from gradwire.jax.primitive import bind
from gradwire.jax.symbols import spec_of
from gradwire.regularizers import warn_of_regularizers
from gradwire.remote import Remote
from gradwire.site import Site, SpecResult
from gradwire_wire.carriers import Aval
from gradwire_wire.errors import DtypeError, GradwireError, RemoteError, UnsupportedTensorError, UsageError
from gradwire_wire.structures import LONE_LEAF, fill, flatten, leaf_paths, weak_leaves, with_weak
from gradwire_wire.tensors import jax as tensors
from gradwire_wire.tensors import numpy as numpy_tensors

__all__ = ["ACCUMULATES", "NAME", "barrier", "call", "functional", "seed"]

NAME = "jax"
LARGEST_SEED = 1 << 31
_NOTHING = np.zeros((), np.float32)
ACCUMULATES = False  # a JAX function has no hidden effects: `functional` is how a module is trained


def call(handle: Handle, site: Site, operands: Sequence[Any]) -> Any:
    """The remote function at JAX arrays, tracers and numpy arrays; its result tree with JAX arrays.

    Outside of jit it blocks until the results are there and raises gradwire's own errors; in jit the errors are
    XLA's, with the remote message and traceback in their text. numpy arrays are copied: they are constants.
    Raises DtypeError for 64-bit arguments and results while JAX would narrow them.
    """
    if site.stateful and site.residuals != "keep":
        raise UsageError(
            f"{handle.name}: options(residuals='recompute') would run a call that moves state a second time for its "
            "pullback. Leave it at 'keep', or call the module in eval mode"
        )
    if site.seed is not None and site.seed < LARGEST_SEED:  # then one program serves all seeds
        at = int(site.anchored)
        operands = [*operands[:at], np.array(site.seed, np.int32), *operands[at:]]
        site = _seeded(site)
    arrays, avals = (
        zip(*[_operand(x, i, site) for i, x in enumerate(operands)], strict=True) if operands else ((), ())
    )
    weak = [i for i, x in enumerate(arrays) if tensors.is_weak(x)]
    if weak:
        site = _with_numbers(site, tuple(weak))
    spec = _spec(handle, site, avals)
    if (isinstance(spec, GradwireError) or not spec.avals) and not _is_traced(arrays):
        return _call_now(handle, site, arrays)
    if isinstance(spec, GradwireError):
        raise spec
    for i, aval in enumerate(spec.avals):
        _check_result(handle, spec.structure, i, aval)
    return _filled(spec.structure, bind(handle.caches.of(_plain)(handle, site), None, arrays))


@lru_cache(maxsize=4096)
def _seeded(site: Site) -> Site:
    """The same with its seed as an operand."""
    return replace(site, seed=None, seeded=True)


@lru_cache(maxsize=4096)
def _with_numbers(site: Site, weak: tuple[int, ...]) -> Site:
    """The same where these operands stand for Python numbers; those before the target's own are in no tree."""
    hidden = len(site.hidden)
    return replace(site, structure=with_weak(site.structure, [i - hidden for i in weak if i >= hidden]))


def _spec(handle: Handle, site: Site, avals: tuple[Aval, ...]) -> SpecResult | GradwireError:
    try:
        return spec_of(handle, site, avals)
    except (UsageError, RemoteError) as error:
        return error


def _plain(handle: Handle, site: Site) -> Derived:
    """The function itself: one object for each place, so that what is cached by it is found by identity."""
    return Derived(handle, site)


def _operand(x: Any, i: int, site: Site) -> tuple[Any, Aval]:
    """Operand i as JAX takes it. Refused by name: what JAX would narrow, and what cannot be sent."""
    try:
        if isinstance(x, jax.Array):
            aval = tensors.aval(x)
            tensors.element_type(aval.dtype)
            return x, aval
        aval = numpy_tensors.aval(np.asarray(x))  # none of JAX's own kind of numpy array
        return np.array(x, tensors.element_type(aval.dtype)), aval  # a copy: JAX may keep it as a constant
    except (DtypeError, UnsupportedTensorError) as error:
        names = [*site.hidden, *leaf_paths(site.structure)]
        raise type(error)(f"{names[i]}: {error}") from None


def _check_result(handle: Handle, structure: bytes, i: int, aval: Aval) -> None:
    try:
        tensors.element_type(aval.dtype)
    except (DtypeError, UnsupportedTensorError) as error:
        name = leaf_paths(structure, argument_names=False)[i]
        raise type(error)(f"{name} of {handle.name}: {error}") from None


def _is_traced(arrays: Sequence[Any]) -> bool:
    """Whether a call now would be recorded rather than made."""
    return any(isinstance(x, jax.core.Tracer) for x in (*arrays, jax.device_put(_NOTHING)))


_is_clean = getattr(sys.modules.get("jax._src.core"), "trace_state_clean", lambda: False)


def is_tracing() -> bool:
    """Whether what happens now happens while a program is traced, and not when it runs. (Eager transforms trace nothing.)"""
    return not _is_clean() and _is_traced(())  # the former is a thousandth of the latter, and mostly enough


def _call_now(handle: Handle, site: Site, arrays: Sequence[Any]) -> Any:
    """Without a program: for results whose shapes only the call itself can tell, and for calls without results."""
    if site.stateful:
        barrier()
    outcome = handle.invoke(site, (), [tensors.export(x) for x in arrays])
    return _filled(outcome.structure, outcome.adopted(tensors.adopt))


def _filled(structure: bytes, results: list[Any]) -> Any:
    """The result tree; what stands for Python numbers in it is of weak type here as well."""
    if structure != LONE_LEAF:
        for i in weak_leaves(structure):
            results[i] = tensors.weakened(results[i])
    return fill(structure, results)


def seed(x: Any) -> Any:
    """A seed as `Remote.options` takes it: an int, or inside a traced program the scalar that will be one.

    x: an integer scalar or a PRNG key (typed, or two words), of which 31 bits are taken. UsageError for others.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or (x.shape == (2,) and x.dtype == np.uint32):
        x = jax.random.bits(x, (), np.uint32) >> 1
    if x.shape != () or not jnp.issubdtype(x.dtype, np.integer):
        raise UsageError(f"a seed must be an integer scalar or one PRNG key, not {x!r:.80}")
    return x if isinstance(x, jax.core.Tracer) else int(x)


def functional(remote: Remote, owner: str = "caller", buffers: str = "worker") -> tuple[Any, ...]:
    """A remote module as a function of what trains it: ``apply, params = functional(net)``.

    owner="caller": ``apply(params, *args, **kwargs)``. ``params`` is a dict of JAX arrays, for `jax.grad`, optax and the like, by the
    names of `Remote.parameters`, without those that are frozen. The arrays lie in the bridge's shared memory, so that calls do not
    copy them; arrays that take their place are copied at each call.

    owner="worker": ``apply(anchor, *args, **kwargs)``; functional returns ``apply, anchor``. The worker owns the parameters.
    Differentiate by the anchor, with ``jax.value_and_grad(loss, (0, 1))(head, anchor)`` or the like: each pullback that reaches the
    anchor adds to the module's own gradients, which an optimizer of `Remote.optimizer` applies. The anchor itself is a float32 zero,
    and its gradient is zero.

    buffers="worker": buffers stay in the worker, and move once for each call in training mode.
    buffers="explicit": ``apply, params, buffers = functional(net, buffers="explicit")``, and
    ``result, buffers = apply(params, buffers, *args, **kwargs)``; the call changes nothing in the worker. JAX without x64 cannot hold
    64-bit buffers (BatchNorm counts its batches in one), so it has their bits, as int32 words along a last axis of length 2.

    Seeds are the remote's: ``functional(net.options(seed=s))[0]`` is ``apply`` with a seed, and may be made in a traced program, where
    ``s`` is traced.

    UsageError for a function. DtypeError for 64-bit parameters while JAX would narrow them.
    """
    check_remote(remote)
    check_owner("functional", owner, buffers)
    # A traced program calls this for the sake of a traced seed: what is read here is none of its values.
    with jax.ensure_compile_time_eval():
        if owner == "worker":
            return _owned_by_worker(remote)
        return _owned_by_caller(remote, buffers == "explicit")


def _owned_by_caller(remote: Remote, buffers: bool) -> tuple[Any, ...]:
    functional = Functional(remote, buffers=buffers)

    def apply(params: Any, /, *args: Any, **kwargs: Any) -> Any:
        site, leaves = functional.flatten(params, args, kwargs)
        family_of_call(leaves, site.structure, NAME)
        return call(functional.handle, site, leaves)

    own, frozen = remote.options(family=NAME), functional.frozen()
    params = {
        name: functional.resident(x, NAME) for name, x in own.parameters().items() if name not in frozen
    }
    return (apply, params, _explicit_buffers(remote)) if buffers else (apply, params)


def _explicit_buffers(remote: Remote) -> dict[str, jax.Array]:
    """The buffers, of 64-bit ones the words where JAX would narrow them."""
    found = remote.options(family="numpy").buffers()
    if not jax.config.jax_enable_x64:
        found = {
            name: np.array(x, order="C")[..., None].view(np.int32) if x.dtype.itemsize >= 8 else x
            for name, x in found.items()
        }
    return {name: jnp.asarray(x) for name, x in found.items()}


def _owned_by_worker(remote: Remote) -> tuple[Callable[..., Any], Any]:
    if remote.handle.is_module:
        warn_of_regularizers(remote)

    def apply(anchor: Any, /, *args: Any, **kwargs: Any) -> Any:
        structure, leaves = flatten([list(args), kwargs], is_leaf)
        family_of_call(leaves, structure, NAME)
        site = remote._site(structure, accumulate=True, anchored=True, stateful=True)
        return call(remote.handle, site, [_checked_anchor(anchor), *remote.seed_operand, *leaves])

    return apply, jnp.float32(0)


def _checked_anchor(anchor: Any) -> Any:
    if isinstance(anchor, (float, np.generic)):
        anchor = jnp.float32(anchor)
    if not isinstance(anchor, (jax.Array, np.ndarray)) or anchor.shape != () or anchor.dtype != np.float32:
        raise UsageError(
            "the first argument of apply must be the anchor that functional() gave with it, a float32 scalar; "
            f"this is {anchor!r:.80}"
        )
    return anchor
