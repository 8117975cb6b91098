"""A loaded torch function or module: calls, kept calls, and its state. See `gradwire_workers.program.Program`."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import torch

from gradwire_wire.carriers import Aval
from gradwire_wire.errors import UsageError
from gradwire_wire.tensors import numpy as numpy_family
from gradwire_wire.tensors.torch import adopt, is_tensor
from gradwire_workers.flat import Flat
from gradwire_workers.program import Program, Result, Runner, WorkerSite
from gradwire_workers.torch import hooks, shapes, state
from gradwire_workers.torch.kept import ZERO, Kept, KeptRows, is_of_earlier_calls, nodes_made, saved_nbytes
from gradwire_workers.torch.optimizers import TorchOptimizer
from gradwire_workers.torch.tape import add_gradient, evaluate, leaves_of, row_operands

__all__ = ["TorchFlat", "TorchProgram"]

_CPU = torch.device("cpu")
_MAX_MEASURED = 1024
_LOOKS = 3  # what is kept from call to call shows in the second; a look walks the graph
_NEEDS_AUTOGRAD = "does not require grad and does not have a grad_fn"
_set_grad_enabled = torch._C._set_grad_enabled


class TorchFlat(Flat):
    """The user's callable over flat operands; numpy arrays in its result become tensors."""

    def __init__(self, target: Any, site: WorkerSite, device: Any) -> None:
        super().__init__(target, site, is_tensor)
        self._device, self.given_as_leaves = device, int(site.anchored)  # which the target never sees
        self.has_rules = False  # as the latest `avals` has found

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        results = Flat.__call__(self, *operands)
        if len(results) == 1 and isinstance(results[0], torch.Tensor):
            return results
        return tuple(map(_as_tensor, results))

    def avals(self, avals: Sequence[Aval]) -> list[Aval]:
        shadow_flat = partial(TorchFlat, site=self._site, device=self._device)
        found, self.structure, self.has_rules = shapes.spec(self._target, shadow_flat, avals, self._device)
        return found


def _as_tensor(y: Any) -> Any:
    return y if isinstance(y, torch.Tensor) else adopt(numpy_family.export(y))


_left_modes: list[Any] = []


def _out_of_inference_mode(tensors: Sequence[Any]) -> list[Any]:
    """The user's code has entered it and not left it: nothing would have a gradient from then on, and nobody an error."""
    mode = torch.inference_mode(False)
    mode.__enter__()
    _left_modes[:] = [mode]  # it is in force as long as this object is there
    return [None if x is None else x.clone() for x in tensors]


class TorchProgram(Program):
    """One loaded target.

    A call that keeps nothing runs without gradients if the target is a module in eval mode, as inference
    does; everything else runs with gradients enabled, as a plain call in torch does: user code may use
    autograd itself. An eval-mode module found to do so is run again with gradients, and always from then on.
    """

    may_have_rules = True

    def __init__(self, target: Callable[..., Any], device: Any = _CPU) -> None:
        self._module = target if isinstance(target, torch.nn.Module) else None
        self._device = None if device == _CPU else device
        if self._module is not None and self._device is not None:
            self._module.to(self._device)
        self._target = target
        self._uses_autograd = False
        self._measured: dict[Any, int] = {}
        self._has_rules = False
        self._loaded_at = nodes_made()
        self._looked: dict[Any, int] = {}
        self._generation = 0
        self._versions = [] if self._module is None else state.versions(self._module)
        self._before_training: str | None = None
        self.is_module = self._module is not None

    @property
    def generation(self) -> int:
        return self._generation

    @generation.setter
    def generation(self, number: int) -> None:
        self._generation = number

    @property
    def moves_in_evaluation(self) -> bool:  # type: ignore[override]
        module: Any = self._module
        return state.is_of_keras(module) and bool(module.moving_in_evaluation)

    @property
    def training(self) -> bool | None:
        return None if self._module is None else self._module.training

    def place(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The tensors on this worker's device, and none of inference mode."""
        if torch.is_inference_mode_enabled():
            tensors = _out_of_inference_mode(tensors)
        if self._device is None:
            return tensors
        return [None if x is None else x.to(self._device) for x in tensors]

    def trainable(self) -> list[Any]:
        """Parameters that pullbacks accumulate into."""
        return [] if self._module is None else [p for p in state.parameters(self._module) if p.requires_grad]

    # ---- Calls ---------------------------------------------------------------------------------------------------

    def run(self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]) -> Result:
        flat = self._flat(site)
        operands = self.place(operands)
        with _random(site.seed, self._device):
            if all(op[0] == "V" for op in word):
                results = self._forward(flat, word, operands)
            else:
                parameters = self.trainable() if site.accumulate else ()
                with torch.enable_grad():
                    results = evaluate(flat, word, leaves_of(operands), parameters=parameters)
        return _result(site, word, results, flat.structure)

    stack = staticmethod(torch.stack)

    def runner(self, site: WorkerSite) -> Runner | None:
        """A context manager of torch's takes as long as all the rest of it."""
        if type(self) is not TorchProgram or site.seed is not None or self._device is not None:
            return None
        flat = self._flat(site)

        def run(operands: Sequence[Any]) -> tuple[Sequence[Any], bytes]:
            if not torch.is_grad_enabled():  # the user's code has switched it off for good
                result = self.run(site, (), operands)
                return result.tensors, result.structure
            if self._module is None or self._module.training or self._uses_autograd:
                return flat(*operands), flat.structure
            _set_grad_enabled(False)
            try:
                return flat(*operands), flat.structure
            except RuntimeError as error:
                if _NEEDS_AUTOGRAD not in str(error):
                    raise
            finally:
                _set_grad_enabled(True)
            result = self.run(site, (), operands)
            return result.tensors, result.structure

        return run

    def _forward(self, flat: TorchFlat, word: tuple[Any, ...], operands: Sequence[Any]) -> list[Any]:
        if self._module is None or self._module.training or self._uses_autograd:
            with torch.enable_grad():
                return evaluate(flat, word, operands)
        try:
            with torch.no_grad():
                return evaluate(flat, word, operands)
        except RuntimeError as error:
            if _NEEDS_AUTOGRAD not in str(error):
                raise
        with torch.enable_grad():
            results = evaluate(flat, word, operands)
        self._uses_autograd = True
        return results

    def keep(self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]) -> tuple[Result, Kept]:
        flat = self._flat(site)
        operands = self.place(operands)
        alone = site.anchored and site.alone and not word
        if site.anchored:  # whose gradient is zero, whatever is asked
            leaves = [operands[0], *(operands[1:] if alone else leaves_of(operands[1:]))]
        else:
            leaves = leaves_of(operands)
        before, here = hooks.entered(), nodes_made()
        if site.seed is None and torch.is_grad_enabled():  # as it is; to say so once more takes its time
            results = evaluate(flat, word, leaves, create_graph=True)
        else:
            with _random(site.seed, self._device), torch.enable_grad():
                results = evaluate(flat, word, leaves, create_graph=True)
        has_hooks = hooks.entered() != before
        if self._module is not None and not word:
            self._check_of_this_call(site, results, here)
        outer = word[-1][1] if word and word[-1][0] == "T" else ()
        whole = [torch.zeros_like(leaves[outer[i]]) if y is None else y for i, y in enumerate(results)]
        kept = Kept(self, leaves, whole, site.anchored, 0, has_hooks, alone)
        kept.measure = partial(self._nbytes, word, leaves, whole, has_hooks)
        kept.accumulates = site.accumulate
        return _result(site, word, results, flat.structure), kept

    def add_gradient(
        self, site: WorkerSite, operands: Sequence[Any], place: Callable[[Result], int]
    ) -> Result:
        """On torch's own tape parameters need no anchor, and what is not pulled back again is not kept."""
        flat, operands, here = self._flat(site), self.place(operands), nodes_made()
        if site.seed is None and torch.is_grad_enabled():
            results = flat(*operands)
        else:
            with _random(site.seed, self._device), torch.enable_grad():
                results = flat(*operands)
        self._check_of_this_call(site, results, here)
        result = _result(site, (), results, flat.structure)
        add_gradient(results[place(result)])
        return result

    def _check_of_this_call(self, site: WorkerSite, results: Sequence[Any], here: int) -> None:
        """UsageError if the results depend on the graph of an earlier call, in the first calls of each tree and mode.

        In one process that graph would be freed by the first backward pass, and the second would raise. Here it would
        live and grow, and of the gradients that reach it those of the earlier operands would be lost.
        """
        key = (site.structure, site.training)
        looks = self._looked.get(key, 0)
        if looks >= _LOOKS:
            return
        if is_of_earlier_calls(results, self._loaded_at, here):
            raise UsageError(
                "the result depends on what an earlier call has computed: this module keeps a tensor with its graph from call to "
                "call (a hidden state, a cached weight). Detach what is kept (self.h = h.detach()); to differentiate through "
                "several steps, make them in one call, or pass the state in and out as an argument and a result"
            )
        if len(self._looked) >= _MAX_MEASURED:
            self._looked.clear()
        self._looked[key] = looks + 1

    def keep_rows(
        self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]
    ) -> tuple[Result, KeptRows]:
        ((_, axes),) = word
        flat = self._flat(site)
        leaves = leaves_of(self.place(operands))
        with _random(site.seed, self._device), torch.enable_grad():
            rows, axes, size = row_operands(leaves, axes)
            results = evaluate(flat, (("V", axes),), rows)
        nbytes = self._nbytes(word, leaves, results, False)  # under vmap torch takes no hooks
        kept = KeptRows(self, leaves, rows, size, results, site.anchored, nbytes)
        return _result(site, word, results, flat.structure), kept

    def _flat(self, site: WorkerSite) -> TorchFlat:
        if site.compile:
            raise UsageError(
                "a torch worker runs functions eagerly, and options(compile=True) asks for compiling. "
                "Leave it out, or apply torch.compile to the target in the worker's own code"
            )
        if site.training or self.moves_in_evaluation:
            self.note_training()
        return self._make_flat(self._target, site, self._device or _CPU)

    def _make_flat(self, target: Any, site: WorkerSite, device: Any) -> TorchFlat:
        return TorchFlat(target, site, device)

    def _nbytes(
        self, word: tuple[Any, ...], leaves: Sequence[Any], results: Sequence[Any], has_hooks: bool
    ) -> int:
        """What keeping costs; measured once per word and shapes."""
        key = (word, self.training, has_hooks, *[(x.shape, x.dtype) for x in leaves])
        found = self._measured.get(key)
        if found is None:
            if len(self._measured) >= _MAX_MEASURED:
                self._measured.clear()
            shared = [] if self._module is None else [*self._module.parameters(), *self._module.buffers()]
            found = self._measured[key] = saved_nbytes(results, leaves, shared, has_hooks)
        return found

    def spec(self, site: WorkerSite, avals: Sequence[Aval]) -> tuple[list[Aval], bytes]:
        flat = self._flat(site)
        found, self._has_rules = flat.avals(avals), flat.has_rules
        return found, flat.structure

    def has_rules(self, site: WorkerSite, avals: Sequence[Aval]) -> bool:
        return self._has_rules

    # ---- State ---------------------------------------------------------------------------------------------------

    def note_training(self) -> None:
        """A call in training mode is about to be made: from the first one on, buffers may change."""
        if self._before_training is None and self._module is not None:
            self._before_training = state.digest(self._module)

    def has_moved(self) -> bool:
        """Parameters by torch's counters: a function of the user's, or another module that has them too, may have written."""
        if self._module is None:
            return False
        if self._versions != state.versions(self._module):
            return True
        return self._before_training is not None and self._before_training != state.digest(self._module)

    def _state(self) -> Any:
        if self._module is None:
            raise UsageError(
                f"a {type(self._target).__qualname__} has no parameters, modes or optimizers: only a torch.nn.Module has. "
                "Load one with Worker.module, from a factory that returns it"
            )
        return self._module

    def train(self, mode: bool) -> None:
        self._state().train(mode)

    def parameters(self) -> dict[str, Any]:
        return state.detached(self._state().named_parameters())

    def buffers(self) -> dict[str, Any]:
        return state.buffers(self._state())

    def state_dict(self) -> dict[str, Any]:
        return state.detached(self._state().state_dict().items())

    def load_state_dict(self, new: dict[str, np.ndarray], strict: bool = True) -> None:
        state.load(self._state(), new, strict)
        self.generation += 1

    def grads(self) -> dict[str, Any]:
        return state.grads(self._state())

    def requires_grad(self, flag: bool, names: Sequence[str]) -> None:
        state.freeze(self._state(), flag, names)

    def frozen(self) -> list[str]:
        return state.frozen(self._state())

    def aliases(self) -> dict[str, str]:
        return state.aliases(self._state())

    def optimizer(
        self, target: Any, kwargs: dict[str, Any], groups: Sequence[dict[str, Any]] | None = None
    ) -> TorchOptimizer:
        return TorchOptimizer(self, self._state(), target, kwargs, groups)

    def regularizers(self) -> list[str]:
        return state.regularizers(self._state())

    def functional(
        self, buffers: bool, training: bool | None = None, trainable: bool | None = None
    ) -> TorchProgram:
        from gradwire_workers.torch.functional import TorchFunctional  # which is a program itself

        return TorchFunctional(self, buffers, training, trainable)


def _result(site: WorkerSite, word: tuple[Any, ...], results: Sequence[Any], structure: bytes) -> Result:
    tensors = [None if y is None else y.detach() for y in results]
    if site.anchored and word and word[-1][0] == "T" and 0 in word[-1][1]:
        tensors[word[-1][1].index(0)] = ZERO
    return Result(tensors, b"" if word else structure)


@contextmanager
def _random(seed: int | None, device: Any) -> Iterator[None]:
    """torch's random numbers as after ``torch.manual_seed(seed)``; the worker's own go on afterwards as before."""
    if seed is None:
        yield
    elif device is not None:
        with torch.random.fork_rng(devices=[device]):
            torch.manual_seed(seed)
            yield
    else:  # torch.manual_seed would note the whole stack for devices that are not there: 300 µs
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)
