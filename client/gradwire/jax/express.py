"""The short way down from XLA for pure calls: its foreign function interface, where jax-tvm-ffi is installed.

Theory of operation. All nodes call one target, which tells them apart by a number among the node's attributes.
XLA hands over addresses; shapes and dtypes are known from the program. So the target looks at the operands in
place, lets the `Crossing` make the call, and copies the results to where XLA wants them, while it holds them.
Everything `gradwire.jax.callback` says of callbacks holds here too. What makes it shorter is that JAX dispatches
a program without host callbacks from C++, and that nothing is converted on the way.

Who keeps a place. The program does, as long as JAX has it; but XLA may still be executing a program that JAX has
dropped, so the places dropped last are kept too, of more programs than XLA lets be under way, until they have not been used for
a while: they keep their targets in the workers. (A call at once is waited for, and its program is not under way.) Numbers are never
used twice, and begin at random: a program that another process has compiled finds nothing here.

What it does not take goes the ordinary way: calls that move state (their tokens), complex numbers and the other
dtypes that jax-tvm-ffi refuses, several devices, other platforms than the CPU, and programs that JAX's persistent
compilation cache would store, to meet none of them again.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import secrets
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import jax
import numpy as np
from jax.interpreters import mlir

from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import UsageError

if TYPE_CHECKING:
    from gradwire.jax.callback import Crossing

__all__ = ["is_open_to", "lower"]

VARIABLE = "GRADWIRE_JAX_FFI"
TARGET = "gradwire"
DROPPED = 4096  # XLA has at most 32 programs under way on a device
UNUSED_S = 600.0
"""After that a place that was dropped goes, when further programs are made or dropped. A program that was dropped while it runs may compute
as long between two of its calls."""
LOOKS = 16

# Those that jax-tvm-ffi 0.1.3 takes.
_DTYPES = frozenset(BY_NAME) - {"complex64", "complex128", "float8_e3m4"}


# ---- In lowering ---------------------------------------------------------------------------------------------------


def is_open_to(context: Any) -> bool:
    """Whether a pure node can be lowered this way here. ``context``: JAX's, of the node's lowering."""
    module = context.module_context
    axes = module.axis_context
    return (
        tuple(module.platforms) == ("cpu",)
        and isinstance(axes, mlir.ShardingContext)
        and axes.num_devices == 1
        and all(np.dtype(a.dtype).name in _DTYPES for a in (*context.avals_in, *context.avals_out))
        and not jax.config.jax_compilation_cache_dir
        and _is_wanted(os.environ.get(VARIABLE, "auto"))
        and _registered()
    )


def lower(context: Any, values: Sequence[Any], crossing: Crossing) -> Sequence[Any]:
    """The node as a call of the target."""
    _let_go()
    place = Place(crossing, _views(context.avals_in), _views(context.avals_out))
    number = next(_numbers)
    _places[number] = place
    context.module_context.add_keepalive(_Hold(place))
    return jax.ffi.ffi_lowering(TARGET)(context, *values, number=np.int64(number))


def _is_wanted(setting: str) -> bool:
    """auto: not where the import of jax-tvm-ffi would bring torch into a process that has not asked for it."""
    if setting == "auto":
        return "torch" in sys.modules or "tvm_ffi" in sys.modules or importlib.util.find_spec("torch") is None
    if setting not in ("on", "off"):
        raise UsageError(f"{VARIABLE}={setting!r}: it may be auto, on or off")
    return setting == "on"


_registering = threading.Lock()
_is_registered: bool | None = None


def _registered() -> bool:
    """Whether XLA knows the target; registers it when first asked, which XLA allows once."""
    global _is_registered
    with _registering:
        if _is_registered is None:
            _is_registered = _register()
        return _is_registered


def _register() -> bool:
    """False where the package for it is not installed, or, unless it was asked for, does not fit what else is: a warning says so."""
    try:
        import jax_tvm_ffi
        import tvm_ffi
    except ImportError:
        return False
    except Exception as error:  # it imports torch, and its own code is compiled
        if os.environ.get(VARIABLE) == "on":
            raise
        warnings.warn(
            f"jax-tvm-ffi, by which compiled programs call faster, is installed and fails to import ({type(error).__name__}: "
            f"{error}); they call without it. {VARIABLE}=off leaves it alone",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    # Owned tensors: one that outlives the call is then an error, not a look at memory that is XLA's again.
    specification = ["attrs.number", "args", "rets"]
    target = tvm_ffi.convert_func(_target)
    jax_tvm_ffi.register_ffi_target(TARGET, target, specification, platform="cpu", pass_owned_tensor=True)
    return True


# ---- In calls ------------------------------------------------------------------------------------------------------

View = Callable[[Any], np.ndarray]


class Place:
    """A node of a program: what is called there, and how its operands and results lie."""

    __slots__ = ("__weakref__", "crossing", "operands", "results", "used")

    def __init__(self, crossing: Crossing, operands: list[View], results: list[View]) -> None:
        self.crossing, self.operands, self.results = crossing, operands, results
        self.used = 0.0  # or when it was dropped


class _Hold:
    """What a program of JAX's keeps; after it, the place is among those of dropped programs."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __del__(self) -> None:
        if not self._place.crossing.is_waited_for:
            self._place.used = time.monotonic()
            _dropped.append(self._place)
        _let_go()


_numbers = itertools.count(secrets.randbits(62))
_places: WeakValueDictionary[int, Place] = WeakValueDictionary()
_dropped: deque[Place] = deque(maxlen=DROPPED)


def _let_go() -> None:
    """Of what was dropped and not used for a while: all that is met before so many that must stay. In finalizers, and any thread."""
    latest, in_vain = time.monotonic() - UNUSED_S, 0
    while in_vain < min(LOOKS, len(_dropped)):
        try:
            place = _dropped.popleft()
        except IndexError:
            return
        if place.used > latest:
            _dropped.append(place)
            in_vain += 1


def _target(number: int, *tensors: Any) -> None:
    """Called by XLA, on any thread, with the node's number, its operands, and room for its results."""
    place = _places.get(number)
    if place is None:
        raise LookupError(
            "this program with a remote call was compiled in another process, or dropped while it ran: jit it anew"
        )
    place.used = time.monotonic()
    operands = [view(x) for view, x in zip(place.operands, tensors, strict=False)]
    results = place.crossing.results(operands)
    for view, room, y in zip(place.results, tensors[len(operands) :], results, strict=True):
        np.copyto(view(room), y, casting="no")


def _views(avals: Sequence[Any]) -> list[View]:
    return [_view_of(tuple(a.shape), np.dtype(a.dtype)) for a in avals]


def _view_of(shape: tuple[int, ...], dtype: np.dtype) -> View:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not nbytes:
        return lambda tensor: np.empty(shape, dtype)
    at: Callable[[int], Any] = (ctypes.c_char * nbytes).from_address
    return lambda tensor: np.ndarray(shape, dtype, at(tensor.data_ptr()))
