"""A loaded TensorFlow target. See `gradwire_workers.program.Program`."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from gradwire_wire.carriers import Aval
from gradwire_wire.errors import UsageError
from gradwire_workers.keras_layers import carries_state, regularized
from gradwire_workers.program import Program, Residual, Result, WorkerSite
from gradwire_workers.tensorflow.functional import WithBuffers, WithParameters
from gradwire_workers.tensorflow.functions import SiteFunction
from gradwire_workers.tensorflow.modules import Module, problems_of_state, value_of
from gradwire_workers.tensorflow.optimizers import TensorFlowOptimizer

__all__ = ["TensorFlowProgram"]

MAX_SITES = 128


class TensorFlowProgram(Program):
    """One loaded target. Its gradients are accumulated here: TensorFlow's variables have no place for them."""

    may_have_rules = True
    training: bool | None = None
    generation = 0
    _around: Callable[..., Any] | None = None

    def __init__(self, target: Callable[..., Any], is_module: bool) -> None:
        self._module = Module(target)
        self.is_module = is_module or self._module.has_state
        self.training = None if self._module.mode_name is None else False
        self.generation = 0
        self._gradients: dict[str, Any] = {}
        self._frozen: list[str] = []
        self._functions: OrderedDict[Any, SiteFunction] = OrderedDict()
        self._before_training: str | None = None

    @property
    def moves_in_evaluation(self) -> bool:  # type: ignore[override]
        return self._module.is_keras and any(map(carries_state, self._module.layers()))

    # ---- Calls -------------------------------------------------------------------------------------------------------

    def run(self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]) -> Result:
        return self._at(site).run(word, operands)

    def keep(
        self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]
    ) -> tuple[Result, Residual]:
        return self._at(site).keep(word, operands)

    def keep_rows(
        self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]
    ) -> tuple[Result, Residual]:
        return self._at(site).keep(word, operands, rows=True)

    stack = staticmethod(tf.stack)

    def spec(self, site: WorkerSite, avals: Sequence[Aval]) -> tuple[list[Aval], bytes]:
        return self._at(site).spec(avals)

    def has_rules(self, site: WorkerSite, avals: Sequence[Aval]) -> bool:
        return self._at(site).has_rules(avals)

    def _at(self, site: WorkerSite) -> SiteFunction:
        mode, seed = self.training if site.training is None else site.training, site.seed
        if seed is not None:
            site = replace(site, seed=None)
        found = self._functions.get((site, mode))
        if found is None:
            if mode or self.moves_in_evaluation:
                self.note_training()
            found = self._functions[site, mode] = SiteFunction(self, self._module, site, mode, self._around)
            if len(self._functions) > MAX_SITES:
                self._functions.popitem(last=False)
        else:
            self._functions.move_to_end((site, mode))
        found.seed = seed
        return found

    # ---- State -------------------------------------------------------------------------------------------------------

    def note_training(self) -> None:
        """A call that may move what is no parameter is about to be made: from the first one on, that is looked at."""
        if self._before_training is None and self._module.has_state:
            self._before_training = self._digest()

    def has_moved(self) -> bool:
        return self._before_training is not None and self._before_training != self._digest()

    def _digest(self) -> str:
        """Of all variables that are no parameters."""
        found = hashlib.blake2b(digest_size=16)
        for value in self.buffers().values():
            found.update(value.numpy().tobytes())
        return found.hexdigest()

    def train(self, mode: bool) -> None:
        self._module.check_mode(mode)
        if self.training is not None:
            self.training = mode

    def all_trainable(self) -> dict[str, Any]:
        """By name; none where the target has no state."""
        return self._module.trainable() if self._module.has_state else {}

    def trainable_variables(self) -> dict[str, Any]:
        """Those that learn: without what `requires_grad` has frozen."""
        return {n: v for n, v in self.all_trainable().items() if n not in self._frozen}

    def trainable_names(self) -> list[str]:
        return list(self.trainable_variables())

    def trainable_values(self) -> list[Any]:
        return [value_of(v) for v in self.trainable_variables().values()]

    def accumulate(self, names: Sequence[str], gradients: Sequence[Any]) -> None:
        """Add to the module's own gradients; None adds nothing."""
        for name, gradient in zip(names, gradients):
            if gradient is not None:
                before = self._gradients.get(name)
                self._gradients[name] = gradient if before is None else before + gradient

    def forget_gradients(self, names: Iterable[str]) -> None:
        for name in names:
            self._gradients.pop(name, None)

    def parameters(self) -> dict[str, Any]:
        return _values(self._module.trainable())

    def buffers(self) -> dict[str, Any]:
        return _values(self._module.rest())

    def state_dict(self) -> dict[str, Any]:
        self._module.check_weights()
        return _values(self._module.named())

    def load_state_dict(self, state: Mapping[str, np.ndarray], strict: bool = True) -> None:
        variables = self._module.named()
        problems = problems_of_state(variables, state, strict)
        if problems:
            raise UsageError("load_state_dict: " + "; ".join(problems))
        for name, variable in variables.items():
            if name in state:
                variable.assign(state[name])
        self.generation += 1

    def grads(self) -> dict[str, Any]:
        return {name: self._gradients.get(name) for name in self._module.trainable()}

    def requires_grad(self, flag: bool, names: Sequence[str]) -> None:
        self._module.check_weights()
        self._frozen = [
            n
            for n in self._module.trainable()
            if (n in self._frozen or n in names) and not (flag and n in names)
        ]
        for name in self._frozen:
            self._gradients.pop(name, None)

    def frozen(self) -> list[str]:
        return list(self._frozen)

    def optimizer(
        self, target: Any, kwargs: dict[str, Any], groups: Sequence[dict[str, Any]] | None = None
    ) -> TensorFlowOptimizer:
        self._module.check_state()
        return TensorFlowOptimizer(self, target, kwargs, groups)

    def regularizers(self) -> list[str]:
        return [name for layer in self._module.layers() for name in regularized(layer)]

    def functional(
        self, buffers: bool, training: bool | None = None, trainable: bool | None = None
    ) -> TensorFlowFunctional:
        if (
            trainable is None
        ):  # a Keras layer of the caller's has its weights made, too, when it is first called
            self._module.check_weights()
        self._module.check_state()
        return TensorFlowFunctional(self, self._module, buffers, training, trainable)


class TensorFlowFunctional(TensorFlowProgram):
    """A module as a function of its parameters; its state, and its mode unless it has one of its own, are the base's."""

    def __init__(
        self,
        base: TensorFlowProgram,
        module: Module,
        buffers: bool,
        training: bool | None,
        trainable: bool | None,
    ) -> None:
        self._base, self._module, self._mode = base, module, training
        self.is_module, self._has_buffers_given = True, buffers
        self._around = (WithBuffers if buffers else WithParameters)(module, trainable)
        self._gradients = base._gradients
        self._functions = OrderedDict()

    @property
    def training(self) -> bool | None:
        return self._base.training if self._mode is None or self._base.training is None else self._mode

    @training.setter
    def training(self, mode: bool | None) -> None:
        pass

    @property
    def generation(self) -> int:
        return self._base.generation

    @generation.setter
    def generation(self, number: int) -> None:
        self._base.generation = number

    def train(self, mode: bool) -> None:
        self._base.train(mode)

    def note_training(self) -> None:
        if not self._has_buffers_given:
            self._base.note_training()

    def has_moved(self) -> bool:
        return not self._has_buffers_given and self._base.has_moved()

    def trainable_variables(self) -> dict[str, Any]:
        """None that pullbacks could add gradients to: they go to the caller."""
        return {}

    def requires_grad(self, flag: bool, names: Sequence[str]) -> None:
        self._base.requires_grad(flag, names)

    def frozen(self) -> list[str]:
        return self._base.frozen()

    def optimizer(
        self, target: Any, kwargs: dict[str, Any], groups: Sequence[dict[str, Any]] | None = None
    ) -> TensorFlowOptimizer:
        return self._base.optimizer(target, kwargs, groups)


def _values(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The values of this moment: variables copy on write."""
    return {name: tf.convert_to_tensor(value_of(v)) for name, v in variables.items()}
