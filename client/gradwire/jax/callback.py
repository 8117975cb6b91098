"""From XLA down to `Handle.invoke`, and what happens at once where no program is being traced.

Theory of operation. A node of a compiled program is a Python callback on numpy arrays, which a pure one reaches
by a shorter way (`gradwire.jax.express`) where it can. XLA runs it on the thread that dispatches the program or,
where operands are still being computed, on one of its own; two may run at once, and denormals may be flushed. So it
copies and never computes, never calls JAX, and keeps nothing: the operands are views of XLA's memory that end with
the callback.

Errors. XLA keeps an error's text alone. Where the caller waits (`_evaluate`), the original is raised; in a
compiled program of the user's, the text carries the remote message and traceback.

Order. Nodes that move state thread XLA's token of JAX's ordered effect through the callback. Outside of compiled
programs the caller waits before (`barrier`) and after, which needs no token and leaves none behind. If an ordered
callback fails on a thread of XLA's, JAX (0.10 and 0.12) hands its failed token to all later ordered programs
of the dispatching thread; `barrier` ends that.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from gradwire.derived import moved
from gradwire.jax import express
from gradwire.jax.derived import KEEP_STAMP, STAMPED, Derived, describe, has_empty_batch, parities
from gradwire.jax.failures import recall, remember
from gradwire.jax.primitive import ordered_effect, primitive, results_of
from gradwire.jax.symbols import check_sizes
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BOOL
from gradwire_wire.errors import ProtocolError, UsageError
from gradwire_wire.messages import KEEP_NOTHING, KEEP_ROWS
from gradwire_wire.tensors import jax as tensors

__all__ = ["Crossing", "barrier"]

TOKENS = 1 << 32
STAMP = TOKENS - 1
"""What stands in the place of a row where a stamp is in that of a token."""
LARGE = 1 << 20
"""Bytes of operands from which a call at once is cheaper without XLA."""


class Crossing:
    """One node's callback: everything that does not change from call to call is worked out here, once.

    Called with the token, if any, and the operands as numpy arrays, valid during the call; returns the results,
    and the token if one is kept, as numpy arrays. Blocks as `Handle.invoke` does; any thread. What it raises is
    a CallbackError.
    """

    def __init__(self, derived: Derived, operands: Sequence[Any]) -> None:
        """operands: abstract, without the token. Raises DtypeError, or what `Handle.spec` raises."""
        avals = tuple(tensors.aval(x) for x in operands)
        of_operands, of_results = parities(derived.word, len(avals))
        self._derived = derived
        self.is_waited_for = derived.waits
        self._site = derived.message_site
        self._has_token = derived.token_ops is not None
        self._word = derived.evaluated
        self._structure = b"" if self._word else derived.handle.spec(derived.site, avals).structure
        self._operands = [
            (a.dtype, np.dtype(a.dtype.carrier), _conjugation(a, p))
            for a, p in zip(avals, of_operands, strict=True)
        ]
        self._results = results_of(derived, operands)
        self._elements = [tensors.element_type(a.dtype) for a in self._results]
        odd = of_results or [0] * len(self._results)
        self._conjugations = [_conjugation(a, p) for a, p in zip(self._results, odd, strict=True)]
        self._is_empty = has_empty_batch(derived.word, avals)
        self._is_wide = any(e in _WIDE for e in self._elements)

    def __call__(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        results = self.results(arrays)
        return _Wide(results) if self._is_wide and not jax.config.jax_enable_x64 else results

    def results(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """The call, for callers that take the results as they are."""
        try:
            return self.at_once(arrays)
        except BaseException as error:
            failed = remember(error, self._derived)
        raise failed

    def at_once(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """The call without XLA above it: raises what `Handle.invoke` raises."""
        token: int | np.ndarray = 0
        if self._has_token:
            token, arrays = self._token(arrays[0]), arrays[1:]
        return self._nothing() if self._is_empty else self._cross(token, arrays)

    def _token(self, array: np.ndarray) -> int | np.ndarray:
        """What a token operand says to `Handle.invoke`. ResidualLostError for stamps of before a change."""
        stamps = array.reshape(-1, 2)
        stamps = stamps[stamps[:, 1] == STAMP, 0]
        if stamps.size and (stamps != self._derived.handle.changes % TOKENS).any():
            raise moved(self._derived.handle.name)
        return 0 if stamps.size or self._derived.token_ops == STAMPED else _token_of(array)

    def _cross(self, token: int | np.ndarray, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        derived = self._derived
        carriers = [
            Carrier(_carrying(turn(x) if turn else x, carrier), dtype)
            for x, (dtype, carrier, turn) in zip(arrays, self._operands, strict=True)
        ]
        stamp = derived.handle.changes
        outcome = derived.handle.invoke(
            self._site,
            self._word,
            carriers,
            keep=KEEP_NOTHING if derived.keep == KEEP_STAMP else derived.keep,
            token=token,
            token_ops=max(0, derived.token_ops or 0),
        )
        try:
            results = self._checked(outcome.carriers, outcome.structure)
        except BaseException:
            derived.handle.release(outcome.token)
            raise
        if derived.keep == KEEP_STAMP:
            return (*results, np.array([stamp % TOKENS, STAMP], np.uint32))
        return (*results, self._kept(outcome.token, results)) if derived.keep else tuple(results)

    def _checked(self, carriers: Sequence[Carrier | None], structure: bytes) -> list[np.ndarray]:
        if structure != self._structure and not self._word:
            raise UsageError(
                f"{describe(self._derived)}: the result tree differs from the one this call was traced with. Python "
                "values in a result are part of the traced program: return what changes from call to call as a tensor"
            )
        if len(carriers) != len(self._results):
            raise ProtocolError(
                f"{describe(self._derived)}: {len(carriers)} results arrived where {len(self._results)} were announced"
            )
        return [self._result(i, carrier) for i, carrier in enumerate(carriers)]

    def _result(self, i: int, carrier: Carrier | None) -> np.ndarray:
        aval, element = self._results[i], self._elements[i]
        if carrier is None and self._derived.word:
            return np.zeros(aval.shape, element)
        if carrier is None or carrier.array.shape != aval.shape or carrier.dtype != aval.dtype:
            came = "nothing" if carrier is None else f"{carrier.dtype.name}{list(carrier.array.shape)}"
            raise UsageError(
                f"{describe(self._derived)}: result {i} was announced as {aval.dtype.name}{list(aval.shape)} when this "
                f"call was traced, and {came} arrived. Where shapes or dtypes depend on values, make the call outside "
                "of jit, or give options(out_spec=...) and keep to it"
            )
        array = carrier.array
        if aval.dtype == BOOL:  # any byte but 0 is true, and XLA computes with the byte
            return np.asarray(np.not_equal(array.view(np.uint8), 0))
        turn = self._conjugations[i]
        return _carrying(turn(array) if turn else array, element)

    def _kept(self, token: int, results: Sequence[np.ndarray]) -> np.ndarray:
        rows = len(results[0]) if self._derived.keep == KEEP_ROWS else None
        kept = np.zeros((2,) if rows is None else (rows, 2), np.uint32)
        if token < TOKENS:
            kept[..., 0] = token
            kept[..., 1] = 0 if rows is None else np.arange(rows)
        return kept

    def _nothing(self) -> tuple[np.ndarray, ...]:
        results = [np.zeros(a.shape, e) for a, e in zip(self._results, self._elements, strict=True)]
        return (*results, self._kept(0, results)) if self._derived.keep else tuple(results)


_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


class _Wide(tuple[np.ndarray, ...]):
    """Results of a program traced under ``with jax.enable_x64(True)``, on a thread of XLA's.

    That thread knows nothing of it, and JAX would narrow what it takes from here to 32 bits.
    """

    def __iter__(self) -> Iterator[np.ndarray]:
        with _enable_x64(True):
            yield from super().__iter__()


_enable_x64 = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental").enable_x64
)


def _token_of(array: np.ndarray) -> int | np.ndarray:
    """What a token operand says to `Handle.invoke`; 0 where it names nothing."""
    if array.ndim == 1:
        return int(array[0])
    return array.copy() if array.size and array[:, 0].all() else 0


def _carrying(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The same bits under a dtype of the same size."""
    return array if array.dtype == dtype else array.view(dtype)


def _conjugation(aval: Aval, parity: int) -> Callable[[np.ndarray], np.ndarray] | None:
    return _conjugate if parity and aval.dtype.name.startswith("complex") else None


def _conjugate(array: np.ndarray) -> np.ndarray:
    """A conjugated copy, by its sign bits: arithmetic might flush denormals here."""
    copy = np.array(array, order="C")
    bits = copy.reshape(-1).view(np.uint32 if copy.itemsize == 8 else np.uint64)
    np.bitwise_xor(bits[1::2], bits.dtype.type(1 << (bits.itemsize * 8 - 1)), out=bits[1::2])
    return copy


# ---- In compiled programs ------------------------------------------------------------------------------------------


def _lower(context: Any, *values: Any, derived: Derived) -> Sequence[Any]:
    """The node as a callback; a node that moves state takes XLA's token and hands it on."""
    _check_devices(context, derived)
    check_sizes(context.avals_in, describe(derived))
    crossing = Crossing(derived, context.avals_in[derived.token_ops is not None :])
    if not derived.moves_state and express.is_open_to(context):
        return express.lower(context, values, crossing)
    call = partial(mlir.emit_python_callback, context, crossing)
    ends = list(values), context.avals_in, context.avals_out
    if not derived.ordered:
        results, _, _ = call(None, *ends, has_side_effect=derived.moves_state)
        return results
    effect = ordered_effect()
    before = context.tokens_in.get(effect)
    in_tuple = isinstance(before, tuple)  # up to jax 0.4
    results, after, _ = call(before[0] if in_tuple else before, *ends, has_side_effect=True)
    context.set_tokens_out(mlir.TokenSet({effect: (after,) if in_tuple else after}))
    return results


mlir.register_lowering(primitive, _lower)


def _check_devices(context: Any, derived: Derived) -> None:
    """A program for several devices evaluates its callbacks on each, which for pure ones is only slow."""
    axes = context.module_context.axis_context
    devices = getattr(axes, "num_devices", 1) if isinstance(axes, mlir.ShardingContext) else 1
    if derived.moves_state and devices > 1:
        raise UsageError(
            f"{describe(derived)} moves the state of its module, and this program runs on {devices} devices, on each of "
            "which that would happen. Put its operands on one device (jax.device_put), or use jax.shard_map and have a "
            "call for each shard"
        )


# ---- At once -------------------------------------------------------------------------------------------------------


def _compiled(derived: Derived) -> Any:
    waiting = replace(derived, waits=True)

    def gradwire(*values: Any) -> Any:
        return primitive.bind(*values, derived=waiting)

    return jax.jit(gradwire)


@primitive.def_impl
def _evaluate(*values: Any, derived: Derived) -> list[Any]:
    """Evaluate a node now, through a cached program of it alone; waits, and raises the original error."""
    if _transfers_are_guarded():  # and a call is one that the program has asked for
        with jax.transfer_guard("allow"):
            return _evaluate(*values, derived=derived)
    if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        return _evaluate_checked(values, derived)
    if derived.moves_state:
        barrier()
    if sum([getattr(x, "nbytes", 0) for x in values]) >= LARGE and _has_one_device():
        return _evaluate_without_xla(values, derived)
    if jax.config.jax_disable_jit:
        with jax.disable_jit(False):
            return _evaluate_compiled(values, derived)
    return _evaluate_compiled(values, derived)


def _transfers_are_guarded() -> bool:
    levels = jax.config.jax_transfer_guard_host_to_device, jax.config.jax_transfer_guard_device_to_host
    return levels != (None, None) and levels != ("allow", "allow")


def _evaluate_checked(values: Sequence[Any], derived: Derived) -> list[Any]:
    """Under jax_debug_nans: JAX would look for the bad operation in the cached program, which is this one, for ever."""
    nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
    with jax.debug_nans(False), jax.debug_infs(False):
        results = _evaluate(*values, derived=derived)
    for array in results:
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            continue
        for wanted, found, name in ((nans, np.isnan, "nan"), (infs, np.isinf, "inf")):
            if wanted and found(np.asarray(array)).any():
                raise FloatingPointError(f"invalid value ({name}) encountered in {describe(derived)}")
    return results


@cache
def _has_one_device() -> bool:
    """Whether results can only go where JAX's own would."""
    return len(jax.devices()) == 1 and jax.default_backend() == "cpu"


def _evaluate_without_xla(values: Sequence[Any], derived: Derived) -> list[Any]:
    """XLA's callback copies operands; here they are passed as they lie, which may be in shared memory."""
    values = [x if hasattr(x, "shape") else jnp.asarray(x) for x in values]  # or a Python scalar
    avals = tuple(tensors.aval(x) for x in values)
    crossing = derived.handle.caches.of(_crossing)(derived, avals, bool(jax.config.jax_enable_x64))
    results = crossing.at_once([np.asarray(x) for x in values])
    return _with_token_released([jax.device_put(y) for y in results], derived)


def _crossing(derived: Derived, avals: Sequence[Aval], x64: bool) -> Crossing:
    operands = [jax.ShapeDtypeStruct(a.shape, tensors.element_type(a.dtype)) for a in avals]
    return Crossing(derived, operands[derived.token_ops is not None :])


def _evaluate_compiled(values: Sequence[Any], derived: Derived) -> list[Any]:
    try:
        _wait(values)  # then the callback runs on this thread, where Ctrl-C reaches it
        results = derived.handle.caches.of(_compiled)(derived)(*values)
        _wait(results)
    except Exception as error:
        failure = recall(error)
        if failure is None or failure.error is None:
            raise
        raise failure.error from None
    return _with_token_released(results, derived)


def _with_token_released(results: list[Any], derived: Derived) -> list[Any]:
    if derived.keep and derived.keep != KEEP_STAMP:
        _release_with(results[-1], derived)
    return results


def _wait(arrays: Sequence[Any]) -> None:
    for x in arrays:
        if isinstance(x, jax.Array):
            x.block_until_ready()


def _release_with(kept: Any, derived: Derived) -> None:
    """Give the token back when the array that holds it is dropped."""
    tokens = np.asarray(kept)
    token = int(tokens.flat[0]) if tokens.size else 0
    if token:
        weakref.finalize(kept, derived.handle.release, token).atexit = False


def barrier() -> None:
    """Wait until every call that moves state, dispatched by this thread in compiled programs, has happened.

    Raises the original error of one that failed, unless it was raised before; after that, later calls work.
    """
    try:
        jax.effects_barrier()
    except Exception as error:
        if "CallbackError" not in str(error):
            raise
        failure = recall(error)
        _drop_failed_tokens()
        if failure is None:
            raise
        if failure.moved_state and failure.error is not None:  # else its results carry the error
            raise failure.error from None


def _drop_failed_tokens() -> None:
    """Let JAX forget the tokens of a failed program.

    JAX has no public way: its own barrier raises before it forgets, and the thread could never again run an
    ordered program. This is the one private name in use, and where it is missing nothing else is lost.
    """
    tokens = getattr(sys.modules.get("jax._src.dispatch"), "runtime_tokens", None)
    clear = getattr(tokens, "clear", None)
    if clear is not None:
        clear()
