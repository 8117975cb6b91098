"""What the desk asks of a loaded target: the contract every worker framework's package fulfils.

A framework's package (``torch``, ``jax``, ``tensorflow``, ``numpy``) has all the module-level names of `Engine`. Its targets are
subclasses of `Program`, and what it keeps of a call is a subclass of `Residual`. They must have what is abstract here. The rest they may
override: what stands here is right for a framework that has nothing of the kind. The desk knows nothing else of a framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Optional, Protocol, Sequence, Tuple

import numpy as np

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import DType
from gradwire_wire.tensors import TensorFamily

__all__ = ["Engine", "Optimizer", "Program", "Residual", "Result", "Runner", "Search", "WorkerSite"]


@dataclass(frozen=True)
class WorkerSite:
    """Everything fixed about a call, hashable: programs cache what they compile by it.

    structure: the argument tree.
    training: the module's mode, already checked.
    accumulate: pullbacks add to the module's own gradients.
    anchored: operand 0 is the anchor, a float32 scalar that the target never sees.
    compile: None is "auto".
    alone: only the anchor of a kept call is differentiated. What is compiled is the same, so sites are compared without it.
    """

    structure: bytes
    training: bool | None = None
    accumulate: bool = False
    anchored: bool = False
    seed: int | None = None
    compile: bool | None = None
    alone: bool = field(default=False, compare=False)


class Result(NamedTuple):
    """Flat results; ``structure`` is the result tree of F itself (empty for derived functions)."""

    tensors: Sequence[Any]
    structure: bytes = b""


Runner = Callable[[Sequence[Any]], Tuple[Sequence[Any], bytes]]
"""F itself at operands, as `Program.run` with an empty word: results and their tree."""


class Residual(ABC):
    """A kept forward: whatever its derivatives need. Dropped by the desk when its token is released."""

    __slots__ = ()
    nbytes: int

    @abstractmethod
    def derive(
        self, op: tuple[Any, ...], linear: Sequence[Any], *, keep: bool, accumulate: bool
    ) -> tuple[list[Any], Residual | None]:
        """The pullback ``('T', wrt, m[, of])`` or the tangent ``('J', wrt)`` of the kept forward at ``linear``, the cotangents or tangents.

        May be called any number of times. None in a pullback's results: that operand is not used. keep: return the residual of this
        derivative as well. accumulate: add the gradients of parameters to the module's own.
        """

    def settle(self) -> int:
        """Its bytes. Called once, mostly after the answer was sent: do here what can wait until then."""
        return self.nbytes

    def derive_rows(
        self, op: tuple[Any, ...], axes: tuple[bool, ...], linear: Sequence[Any], rows: np.ndarray
    ) -> list[Any] | None:
        """The derivative of each row of a kept batch; None if this residual cannot give it, and the forward must be computed again.

        (`derive` gives that of the whole batch, in which an operand without the batch axis is the same one for all rows.)
        """
        return None

    def derive_batch(
        self, op: tuple[Any, ...], mapped: tuple[bool, ...], linear: Sequence[Any]
    ) -> list[Any] | None:
        """`derive` for each row of the cotangents or tangents; ``mapped`` says which of them have rows. None if it must be called row by row."""
        return None

    def differentiated(self, primals: tuple[tuple[Any, ...], ...]) -> Residual:
        """The residual of the forward as these operations ``('P', wrt)`` make it. Only called if `Program.rules_end`."""
        raise NotImplementedError(f"{type(self).__qualname__} is of a program whose rules do not end")


Search = Callable[[Callable[[], Any], Optional[float]], None]
"""Makes a step of an optimizer that evaluates the loss itself: ``search(accumulate, clip_norm)``. ``accumulate()`` evaluates the loss and
adds to the gradients; the optimizer calls it as often as it needs. No gradients are left afterwards."""


class Optimizer(Protocol):
    """An optimizer of the worker's framework over a module's parameters."""

    @property
    def search(self) -> Search | None:
        """How it makes a step if it evaluates the loss itself; None where a gradient is all it takes."""

    def step(self, clip_norm: float | None = None) -> float | None:
        """Apply the accumulated gradients, then advance the schedules; UsageError where none were.

        clip_norm: all gradients together are scaled down to this norm first; their norm before that is returned.
        """

    def zero_grad(self) -> None:
        """Forget the accumulated gradients of its own parameters: another optimizer may have the others'."""

    def set(self, options: dict[str, Any]) -> None:
        """New values of options such as lr, in all groups; UsageError for one that is unknown."""

    def schedule(self, target: Any, kwargs: dict[str, Any]) -> None:
        """Follow a schedule of the framework's from now on: each step advances it."""

    def state_dict(self) -> Any:
        """The whole state as a tree of tensors and scalars, that of schedules as well."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from such a tree, with the engine's tensors in it; all or nothing. UsageError where it does not fit."""


class Program(ABC):
    """A loaded target. Tensors are the framework's own; operands may be kept, results must be ready.

    is_module: whether it is asked for what only modules have.
    may_have_parameters: whether a module of this framework can have some, of which gradients accumulate.
    may_have_rules: whether a function of this framework can have derivative rules of its own.
    rules_end: whether the framework uses such a rule once and differentiates what the rule computes, as JAX does. No other program is
    asked for ``('P', wrt)``.
    moves_in_evaluation: whether its calls move state in evaluation mode as well, as those of a stateful RNN do.
    name: the target, for messages.
    told_of_cut: whether the user was warned that no argument has a gradient.
    """

    is_module: bool
    moves_in_evaluation = False
    name = "this target"
    told_of_cut = False
    may_have_parameters = True
    may_have_rules = False
    rules_end = False

    @property
    def training(self) -> bool | None:
        """The module's mode; None where it has none."""
        return None

    @property
    def generation(self) -> int:
        """How often its parameters were replaced, or moved by an optimizer."""
        return 0

    # -- calls -----------------------------------------------------------------------------------

    @abstractmethod
    def run(self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]) -> Result:
        """Evaluate the derived function ``word`` and keep nothing."""

    @staticmethod
    @abstractmethod
    def stack(rows: Sequence[Any], axis: int) -> Any:
        """Tensors of one shape as rows of one tensor, along a new axis."""

    def runner(self, site: WorkerSite) -> Runner | None:
        """What is called instead of `run` for every planned call of this site. Made once; None if nothing can be prepared."""
        return None

    @abstractmethod
    def keep(
        self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]
    ) -> tuple[Result, Residual]:
        """Evaluate ``word`` and keep what its derivatives need."""

    def add_gradient(
        self, site: WorkerSite, operands: Sequence[Any], place: Callable[[Result], int]
    ) -> Result | None:
        """Evaluate the module at constants, and add the gradient of one of its results, a real number, to the parameters' own.

        place: which one; what it raises ends this, and nothing was added then. None: there is no shorter way to do so than `keep` and a
        pullback with respect to the anchor.
        """
        return None

    @abstractmethod
    def keep_rows(
        self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]
    ) -> tuple[Result, Residual]:
        """Evaluate the batch ``(('V', axes),)`` so that each row can be differentiated on its own, and the batch as a whole."""

    @abstractmethod
    def spec(self, site: WorkerSite, avals: Sequence[Aval]) -> tuple[list[Aval], bytes]:
        """Result shapes, dtypes and structure; never a real run, never a change of the module."""

    def has_rules(self, site: WorkerSite, avals: Sequence[Aval]) -> bool:
        """Whether it has derivative rules of its own, so that a pullback may not be linear; asked after ``spec``."""
        return False

    def has_moved(self) -> bool:
        """Whether calls or other code have moved the module's state in this generation, such as BatchNorm's statistics in training
        mode. If so, a forward that is computed again now may differ from the earlier one. Asked before that is done.
        """
        return False

    # -- state: asked of modules -----------------------------------------------------------------

    @abstractmethod
    def train(self, mode: bool) -> None:
        """Set the module's mode for the calls that follow."""

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """Trainable tensors by name; frozen ones as well."""

    @abstractmethod
    def requires_grad(self, flag: bool, names: Sequence[str]) -> None:
        """Whether these parameters learn. A frozen one gets no gradient, loses the one it has, and is not moved."""

    @abstractmethod
    def frozen(self) -> list[str]:
        """The parameters that do not learn."""

    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters and of shared buffers in `state_dict`, and which of `parameters` or `buffers` each of them is."""
        return {}

    @abstractmethod
    def buffers(self) -> dict[str, Any]:
        """The rest of the state by name."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All of the state by name."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, np.ndarray], strict: bool = True) -> None:
        """Replace the state, all or nothing; UsageError names what is missing, unexpected or misshapen."""

    @abstractmethod
    def grads(self) -> dict[str, Any]:
        """Accumulated gradients by parameter name, None where there are none yet."""

    @abstractmethod
    def optimizer(
        self, target: Any, kwargs: dict[str, Any], groups: Sequence[dict[str, Any]] | None = None
    ) -> Optimizer:
        """An optimizer made by calling ``target`` on the trainable parameters.

        groups: each a dict of ``names``, a list of parameters, and options of their own; the others are left alone.
        """

    def regularizers(self) -> list[str]:
        """Names of the parts whose regularizers Keras adds to the loss of a model, and which a call's result does not have."""
        return []

    @abstractmethod
    def functional(
        self, buffers: bool, training: bool | None = None, trainable: bool | None = None
    ) -> Program:
        """The module as a function of its parameters, which come as an argument and so get gradients like any other.

        Its target is called as ``(parameters, *args, **kwargs) -> result``, with ``parameters`` a dict by the names of
        `parameters`. Parameters that are not in it stay the module's own. The verbs about state act on the module, and the
        generation is the module's.

        buffers: if False, buffers stay in the module and move there. If True they come and go with each call:
        ``(parameters, buffers, *args, **kwargs) -> (result, buffers)``.
        training: the mode of its calls. None: the module's. Otherwise the module has its own mode again after each call.
        trainable: None unless the caller is a Keras layer; then this is the layer's flag. The result is ``(result, losses, masks)``, as
        `gradwire_workers.keras_layers.called_in_layer` gives them, and with False a Keras module is called as a frozen one.
        """


class Engine(TensorFamily, Protocol):
    """The module-level names of a framework's package.

    These are the names of its `TensorFamily`, and three short cuts, where the framework has any:
    adopt_operand: `adopt` for a call's operands; otherwise `adopt` itself.
    adopter: gives for a dtype a function that adopts fresh copies of arrays of that dtype, or None; otherwise None.
    export_all: `export` for many results at once, all of them numpy arrays; otherwise None.
    """

    adopt_operand: Callable[[Carrier], Any]
    adopter: Callable[[DType], Callable[[np.ndarray], Any] | None] | None
    export_all: Callable[[Sequence[Any]], Sequence[Carrier]] | None

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
