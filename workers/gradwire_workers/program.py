"""What the desk asks of a loaded target: the contract every worker framework's file fulfils.

A framework's file (``torch.py``, ``jax.py``, ``tensorflow.py``, ``numpy.py``) has the module-level
names of `Engine` and returns objects that fulfil `Program` and `Residual`. The desk knows nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Protocol, Sequence, Tuple

import numpy as np

from gradwire_wire.carriers import Aval

__all__ = ["Engine", "Optimizer", "Program", "Residual", "Result", "Runner", "WorkerSite"]


@dataclass(frozen=True)
class WorkerSite:
    """Everything fixed about a call, hashable: programs cache what they compile by it.

    structure: the argument tree. ``training``: the module's mode, already checked.
    accumulate: pullbacks add to the module's own gradients. ``anchored``: operand 0 is the anchor,
    a float32 scalar that the target never sees. ``compile``: None is "auto".
    """

    structure: bytes
    training: bool | None = None
    accumulate: bool = False
    anchored: bool = False
    seed: int | None = None
    compile: bool | None = None


class Result(NamedTuple):
    """Flat results; ``structure`` is the result tree of F itself (empty for derived functions)."""

    tensors: Sequence[Any]
    structure: bytes = b""


Runner = Callable[[Sequence[Any]], Tuple[Sequence[Any], bytes]]
"""F itself at operands, as `Program.run` with an empty word: results and their tree. A program that can prepare one for a
site offers ``runner(site)``, which may answer None; it is made once and called for every planned call of that site."""


class Residual(Protocol):
    """A kept forward: whatever its derivatives need. Dropped by the desk when its token is released."""

    nbytes: int

    def derive(
        self, op: tuple[Any, ...], linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], Residual | None]:
        """The pullback ``('T', wrt, n)`` or the tangent ``('J', wrt)`` of the kept forward at ``linear``.

        Any number of times. None in a pullback's results: that operand is not used. ``keep``: return
        the residual of this derivative as well. ``accumulate``: add parameter gradients to the module's own.
        A residual that says ``takes_absent = True`` may be given None for a cotangent, where nothing leads to that result:
        what reaches no other one is then not used. Others are given zeros.
        """

    def derive_rows(
        self, op: tuple[Any, ...], axes: tuple[bool, ...], linear: Sequence[Any], rows: np.ndarray
    ) -> list[Any] | None:
        """The same for a batch of kept rows; None where it does not apply and must be computed afresh."""


class Optimizer(Protocol):
    """An optimizer of the worker's framework over a module's parameters."""

    def step(self, clip_norm: float | None = None) -> float | None:
        """Apply the accumulated gradients, then advance the schedules; UsageError where none were.

        clip_norm: all gradients together are scaled down to this norm first; their norm before that is returned.
        """

    def zero_grad(self) -> None:
        """Forget the accumulated gradients."""

    def set(self, options: dict[str, Any]) -> None:
        """New values of options such as lr, in all groups; UsageError for one that is unknown."""

    def schedule(self, target: Any, kwargs: dict[str, Any]) -> None:
        """Follow a schedule of the framework's from now on: each step advances it."""

    def state_dict(self) -> Any:
        """The whole state as a tree of tensors and scalars, that of schedules as well."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from such a tree, with the engine's tensors in it; all or nothing. UsageError where it does not fit."""


class Program(Protocol):
    """A loaded target. Tensors are the framework's own; operands may be kept, results must be ready."""

    is_module: bool
    training: bool | None
    generation: int

    def run(self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]) -> Result:
        """Evaluate the derived function ``word`` and keep nothing."""

    def keep(
        self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]
    ) -> tuple[Result, Residual]:
        """Evaluate ``word`` and keep what its derivatives need."""

    def keep_rows(
        self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]
    ) -> tuple[Result, Residual]:
        """Evaluate the batch ``(('V', axes),)`` so that each row can be differentiated on its own."""

    def spec(self, site: WorkerSite, avals: Sequence[Aval]) -> tuple[list[Aval], bytes]:
        """Result shapes, dtypes and structure; never a real run, never a change of the module."""

    def has_rules(self, site: WorkerSite, avals: Sequence[Aval]) -> bool:
        """Whether it has derivative rules of its own, so that a pullback may not be linear; asked after ``spec``.

        A program that cannot have any leaves this out. One whose framework uses a rule once and derives what it computes,
        as JAX does, says ``rules_end = True``, and no other is asked for ``('P', wrt)``. Its residuals have
        ``differentiated(primals)``, which is the residual of the forward as these operations make it.
        """

    def has_moved(self) -> bool:
        """Whether calls, or other code, have changed the module's state in this generation: BatchNorm's statistics in training
        mode, say. What it computes now in evaluation mode may then not be what an earlier forward did.

        Asked where a forward would be computed again. A program without state leaves this out.
        """

    def train(self, mode: bool) -> None:
        """Set the module's mode for the calls that follow."""

    def parameters(self) -> dict[str, Any]:
        """Trainable tensors by name; frozen ones as well."""

    def requires_grad(self, flag: bool, names: Sequence[str]) -> None:
        """Whether these parameters learn. A frozen one gets no gradient, loses the one it has, and is not moved."""

    def frozen(self) -> list[str]:
        """The parameters that do not learn."""

    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters in `state_dict`, and which of `parameters` each of them is."""

    def buffers(self) -> dict[str, Any]:
        """The rest of the state by name."""

    def state_dict(self) -> dict[str, Any]:
        """All of the state by name."""

    def load_state_dict(self, state: dict[str, np.ndarray], strict: bool = True) -> None:
        """Replace the state, all or nothing; UsageError names what is missing, unexpected or misshapen."""

    def grads(self) -> dict[str, Any]:
        """Accumulated gradients by parameter name, None where there are none yet."""

    def optimizer(
        self, target: Any, kwargs: dict[str, Any], groups: Sequence[dict[str, Any]] | None = None
    ) -> Optimizer:
        """An optimizer made by calling ``target`` on the trainable parameters.

        groups: each a dict of ``names``, a list of parameters, and options of their own; the others are left alone.
        """

    def regularizers(self) -> list[str]:
        """Names of the parts whose regularizers Keras adds to the loss of a model, and which a call's result does not have."""

    def functional(
        self, buffers: bool, training: bool | None = None, trainable: bool | None = None
    ) -> Program:
        """The module as a function of its parameters, which come as an argument and so get gradients like any other.

        Its target is called as ``(parameters, *args, **kwargs) -> result``, with ``parameters`` a dict by the names of
        `parameters`: those that are not in it stay the module's own. Buffers stay in the module and move there.
        With ``buffers`` they come and go instead: ``(parameters, buffers, *args, **kwargs) -> (result, buffers)``.
        Mode and generation are the module's; the verbs about state act on the module. With ``training`` its calls have
        that mode instead, and the module has its own again after each of them.
        With ``trainable`` the caller is a Keras layer, and this is its flag: the result is ``(result, losses)`` with the list
        of losses that Keras has collected in the call, and with False a Keras module is called as a frozen one.
        """


class Engine(Protocol):
    """The module-level names of a framework's file."""

    NAME: str

    def prepare(self, threads: int | None, x64: bool | None, device: str | None) -> None:
        """Configure the framework; called once, right after it was imported."""

    def resize(self, threads: int) -> int:
        """Give the framework's pool another size, as far as it can; called before any target is loaded.

        Returns the size it has: the number of threads changes the last bits of sums, so that nobody else may do this.
        """

    def facts(self) -> dict[str, Any]:
        """``framework``, ``version``, ``devices``, ``threads``: what ``worker.info`` shows."""

    def program(self, obj: Any, *, is_module: bool) -> Program:
        """Take a loaded target under management."""

    def is_tensor(self, x: Any) -> bool:
        """As in `gradwire_wire.tensors.TensorFamily`; also ``export``, ``adopt`` and ``aval``."""

    def export(self, x: Any) -> Any:
        """See `gradwire_wire.tensors.TensorFamily`. An ``export_all(arrays)``, if there, is used for many numpy arrays."""

    def adopt(self, carrier: Any) -> Any:
        """See `gradwire_wire.tensors.TensorFamily`. An ``adopt_operand`` beside it, if there, is used for a call's operands;
        an ``adopter(dtype)``, if there, gives what is used for those that are fresh copies, or None."""
