"""A torch module as a function of its parameters. See `gradwire_workers.program.Program.functional`.

The tensors that are given take the places of the module's own while it runs, as `torch.func.functional_call` does it;
that looks the places up anew at each call, which costs more than the call of a small network. Here they are known.

What runs user code later must find the same tensors there: torch.utils.checkpoint computes a forward again in the
pullback, and with the module's own parameters that would be a wrong gradient without an error. So pullbacks, too, run
with the tensors of their forward in place.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, Callable, Dict, Iterable, Sequence, Tuple

import torch

from gradwire_wire.errors import UsageError
from gradwire_wire.structures import fill_call, leaf_count
from gradwire_workers.keras_layers import called_in_layer
from gradwire_workers.program import Result, WorkerSite
from gradwire_workers.torch import state
from gradwire_workers.torch.kept import Kept, own_leaves
from gradwire_workers.torch.program import TorchFlat, TorchProgram
from gradwire_workers.torch.tape import leaves_of
from gradwire_workers.torch.writes import Watch

__all__ = ["TorchFunctional"]

# Runs an iterator without a Python instruction between, where an interrupt could come.
_do: Callable[[Iterable[Any]], None] = deque(maxlen=0).extend

_LOOKS = 3  # what is kept from call to call shows in the second; a look walks the graph, or compares contents
_MAX_SEEN = 1024
_GIVEN = "_gradwire_given"  # the attribute of a parameter that was given: its name

_Place = Tuple[Dict[str, Any], str]


class _Places:
    """Where a module finds its tensors: the dicts of its parts. Tied parameters are in several places.

    A caller may undo a tie: what it gives under a further name of a tied parameter takes that name's own place.

    mode: the one that it runs in meanwhile; None is its own.
    """

    def __init__(self, module: Any, mode: bool | None = None) -> None:
        self._module, self._mode = module, mode
        self._parameters = _found(module, "_parameters", module.named_parameters())
        self._buffers = _found(module, "_buffers", module.named_buffers())
        self._aliases = _places_of_aliases(module)
        self._looks: dict[Any, int] = {}

    def call(
        self,
        parameters: dict[str, Any],
        buffers: dict[str, Any],
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The function while these tensors are in place. ``buffers`` then holds what is there at the end."""
        given = [
            (place, x)
            for name, x in self._in_order(parameters)
            for place in self._checked("parameter", name, x)
        ]
        given += [(place, x) for name, x in buffers.items() for place in self._checked("buffer", name, x)]
        parts = [part for (part, _), _ in given]
        own = [{key: part[key]} for (part, key), _ in given]
        new = [{key: x} for (_, key), x in given]
        watch = Watch(parameters, self._is_looked_at())
        modes = self._enter_mode()
        try:
            _do(map(dict.update, parts, new))
            with watch:
                result = function(*args, **kwargs)
            self._check_unwritten(parameters, watch)
            for name in buffers:  # a module may assign its buffers instead of writing into them
                part, key = self._buffers[name][0]
                buffers[name] = part[key]
            return result
        finally:
            _do(map(dict.update, parts, own))
            _do(map(setattr, modes, repeat("training"), modes.values()))

    def knows(self, name: str) -> bool:
        """Whether there was a parameter of this name when the module was looked at."""
        return name in self._parameters

    def _is_looked_at(self) -> bool:
        """Whether the contents of parameters are compared: in the first calls of each mode."""
        key = (self._module.training, torch.is_grad_enabled())
        self._looks[key] = self._looks.get(key, 0) + 1
        return self._looks[key] <= _LOOKS

    def _check_unwritten(self, parameters: dict[str, Any], watch: Watch) -> None:
        """What the module writes into a parameter would end with the call, and the caller's own stay as it was."""
        places = ((name, *self._places_of(name)[0]) for name in parameters)
        replaced = (name for name, part, key in places if part.get(key) is not parameters[name])
        name = watch.written() or next(replaced, None)
        if name is not None:
            raise UsageError(
                f"this module writes to its parameter {name!r} when it is called (as nn.Embedding(max_norm=...) does), and "
                "the caller, who owns it, would not see that. Do it to the caller's parameters after each step, or let the "
                "worker own them (Remote.optimizer)"
            )

    def _enter_mode(self) -> dict[Any, bool]:
        """The modes of all parts before that, if they have changed: parts may have modes of their own."""
        if self._mode is None or self._mode == self._module.training:
            return {}
        before = {part: part.training for part in self._module.modules()}
        self._module.train(self._mode)
        return before

    def _in_order(self, parameters: dict[str, Any]) -> Iterable[tuple[str, Any]]:
        """Further names of tied ones last, for the first name has their places as well.

        UsageError for two names of one place: a part that the module has twice has its parameters once.
        """
        if self._aliases.keys().isdisjoint(parameters):
            return parameters.items()
        taken: dict[tuple[int, str], str] = {}
        for name in parameters:
            for part, key in self._places_of(name)[:1]:
                other = taken.setdefault((id(part), key), name)
                if other != name:
                    raise UsageError(
                        f"{other!r} and {name!r} are one parameter, for the module has one part under two names, and two tensors "
                        "were given for it. Put the same tensor in the place of both"
                    )
        return sorted(parameters.items(), key=lambda item: item[0] in self._aliases)

    def _places_of(self, parameter: str) -> list[_Place]:
        return self._parameters.get(parameter) or self._aliases.get(parameter) or []

    def _checked(self, what: str, name: str, x: Any) -> list[_Place]:
        """The places of this name. UsageError where it does not fit: torch would broadcast a wrong shape."""
        places = self._places_of(name) if what == "parameter" else self._buffers.get(name)
        if not places:
            known = ", ".join(list(self._parameters if what == "parameter" else self._buffers)[:8])
            raise UsageError(f"this module has no {what} {name!r}; there are {known or 'none'}")
        part, key = places[0]
        if x.shape != part[key].shape:
            raise UsageError(
                f"{what} {name!r} must have shape {tuple(part[key].shape)}, as in the module, not {tuple(x.shape)}"
            )
        return places


def _found(module: Any, kind: str, named: Iterable[tuple[str, Any]]) -> dict[str, list[_Place]]:
    places: dict[int, list[_Place]] = {}
    for part in module.modules():
        tensors = getattr(part, kind)
        for key, x in tensors.items():
            if x is not None:
                places.setdefault(id(x), []).append((tensors, key))
    return {name: places[id(x)] for name, x in named}


def _places_of_aliases(module: Any) -> dict[str, list[_Place]]:
    """The own place of each further name of a tied parameter."""
    every = {
        f"{path}.{key}" if path else key: [(part._parameters, key)]
        for path, part in module.named_modules(remove_duplicate=False)
        for key in part._parameters
    }
    return {name: every[name] for name in state.aliases(module) if name in every}


class _WithParameters:
    """``(parameters, *args, **kwargs) -> result``. trainable: see `gradwire_workers.program.Program.functional`."""

    def __init__(self, module: Any, mode: bool | None = None, trainable: bool | None = None) -> None:
        self._module, self._places = module, _Places(module, mode)
        self._call = module if trainable is None else partial(_in_layer, module, trainable)

    def __call__(self, parameters: dict[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._places.call(parameters, {}, self._call, *args, **kwargs)

    def within(self, args: Sequence[Any], function: Callable[[], Any]) -> Any:
        """The function while the tensors of the call with these arguments are in place."""
        return self._places.call(args[0], {}, function)

    def check_known(self) -> None:
        """UsageError if a call has made a parameter, which the caller does not have and so would not train."""
        late = [name for name, _ in self._module.named_parameters() if not self._places.knows(name)]
        if late:
            raise UsageError(
                f"the parameter {late[0]!r} was made by a call, so the caller, who owns the others, does not have it. Call the "
                "module once first (in its factory, say), and then make gw.torch.Module or the like of it"
            )

    def own_parameters(self, args: Sequence[Any]) -> dict[str, Any]:
        """The module's own in whose place others are given."""
        return {name: x for name, x in self._module.named_parameters() if name in args[0]}


class _WithBuffers(_WithParameters):
    """``(parameters, buffers, *args, **kwargs) -> (result, buffers)``. No gradient flows through the buffers.

    Buffers return as they came: a caller without 64-bit types has them as words (`_from_words`).
    """

    def __init__(self, module: Any, mode: bool | None = None, trainable: bool | None = None) -> None:
        super().__init__(module, mode, trainable)
        self._own_buffers = dict(module.named_buffers())

    def __call__(
        self, parameters: dict[str, Any], buffers: dict[str, Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        moved = self._copies(buffers)
        result = self._places.call(parameters, moved, self._call, *args, **kwargs)
        return result, {name: _as_came(x.detach(), buffers[name]) for name, x in moved.items()}

    def within(self, args: Sequence[Any], function: Callable[[], Any]) -> Any:
        return self._places.call(args[0], self._copies(args[1]), function)

    def _copies(self, buffers: dict[str, Any]) -> dict[str, Any]:
        return {
            name: _from_words(x.detach(), self._own_buffers.get(name)).clone() for name, x in buffers.items()
        }


def _in_layer(module: Any, trainable: bool, /, *args: Any, **kwargs: Any) -> Any:
    """``(result, losses, masks)``: torch's own modules have none of these, and know no layer that is frozen."""
    if not state.is_of_keras(module):
        return called_in_layer((), trainable, module, args, kwargs)
    return module.in_layer(trainable, *args, **kwargs)


def _from_words(x: Any, own: Any) -> Any:
    """What stands for a 64-bit buffer as int32 words along a last axis, as that buffer; anything else as it is."""
    if own is None or x.dtype != torch.int32 or own.dtype == torch.int32:
        return x
    words = own.element_size() // 4
    if x.shape != (*own.shape, words):
        return x
    return x.contiguous().view(own.dtype).reshape(own.shape)


def _as_came(x: Any, given: Any) -> Any:
    """The inverse of `_from_words` where that did something."""
    if x.dtype == given.dtype:
        return x
    return x.contiguous().unsqueeze(-1).view(torch.int32).reshape(given.shape)


class _FunctionalFlat(TorchFlat):
    """Looks whether gradients reach what was given, in the first calls of each tree and mode: ``seen`` counts them."""

    def __init__(self, target: Any, site: WorkerSite, device: Any, seen: dict[Any, int]) -> None:
        super().__init__(target, site, device)
        self._own_parameters, self._seen = target.own_parameters, seen
        self._check_known = target.check_known
        self.given_as_leaves = _parameter_count(site.structure)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        results = super().__call__(*operands)
        key = (self._site.structure, self._site.training)
        if torch.is_grad_enabled() and self._seen.get(key, 0) < _LOOKS:
            args, _ = fill_call(self._site.structure, operands)
            leaves = own_leaves(results)
            self._check_known()
            _check_reached(self._own_parameters(args), leaves)
            _check_of_this_call(args[0], leaves)
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen[key] = self._seen.get(key, 0) + 1
        return results


@lru_cache(maxsize=4096)
def _parameter_count(structure: bytes) -> int:
    """How many operands, the first ones, are parameters."""
    args, _ = fill_call(structure, range(leaf_count(structure)))
    return len(args[0])


def _check_reached(own: dict[str, Any], leaves: Sequence[Any]) -> None:
    """UsageError if the results depend on the module's own parameters where others were given."""
    used = {id(x) for x in leaves}
    names = [name for name, x in own.items() if id(x) in used]
    if names:
        raise UsageError(
            f"this module uses its parameter {names[0]!r} from elsewhere than its attribute (a list, a closure, another "
            "object), so parameters that are given would not be used there. Use self.<name> in its forward, or let the worker "
            "own the parameters"
        )


def _check_of_this_call(given: dict[str, Any], leaves: Sequence[Any]) -> None:
    """UsageError if the results depend on what was given to an earlier call: its gradient would be left out."""
    now = {id(x) for x in given.values()}
    earlier = [name for x in leaves if id(x) not in now and (name := getattr(x, _GIVEN, None))]
    if earlier:
        raise UsageError(
            f"the result depends on {earlier[0]!r} as it was given to an earlier call: this module keeps a tensor with its graph "
            "from call to call (a cached weight, a hidden state), and gradients through it would be lost. Detach what is kept, "
            "or compute it in each forward"
        )
    for name, x in given.items():
        if x.is_leaf and x.requires_grad:
            setattr(x, _GIVEN, name)


class TorchFunctional(TorchProgram):
    """The program whose target takes the parameters of ``base`` as its first argument.

    Raises UsageError for modules whose tensors cannot be replaced while they run.
    """

    def __init__(
        self,
        base: TorchProgram,
        buffers: bool,
        training: bool | None = None,
        trainable: bool | None = None,
    ) -> None:
        module = base._state()
        _check(module)
        self._base, self._mode = base, training
        super().__init__(module, base._device or torch.device("cpu"))
        self._target: Any = (_WithBuffers if buffers else _WithParameters)(module, training, trainable)
        self._has_buffers_given = buffers
        self._seen: dict[Any, int] = {}

    def trainable(self) -> list[Any]:
        """None: gradients go to the caller."""
        return []

    @property
    def training(self) -> bool | None:
        return self._base.training if self._mode is None else self._mode

    @property
    def generation(self) -> int:
        return self._base.generation

    @generation.setter
    def generation(self, number: int) -> None:
        self._base.generation = number

    def note_training(self) -> None:
        if not self._has_buffers_given:
            self._base.note_training()

    def has_moved(self) -> bool:
        return not self._has_buffers_given and self._base.has_moved()

    def _make_flat(self, target: Any, site: WorkerSite, device: Any) -> TorchFlat:
        return _FunctionalFlat(target, site, device, self._seen)

    def run(self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]) -> Result:
        if not word or any(op[0] == "V" for op in word):  # under vmap torch refuses what runs forwards again
            return super().run(site, word, operands)
        return self._within(site, leaves_of(self.place(operands)), super().run, site, word, operands)

    def keep(self, site: WorkerSite, word: tuple[Any, ...], operands: Sequence[Any]) -> tuple[Result, Kept]:
        if any(op[0] == "V" for op in word):
            return super().keep(site, word, operands)
        if not word:
            result, kept = super().keep(site, word, operands)
        else:
            leaves = leaves_of(self.place(operands))
            result, kept = self._within(site, leaves, super().keep, site, word, operands)
        kept.within = lambda leaves, function, *args: self._within(site, leaves, function, *args)
        return result, kept

    def _within(
        self, site: WorkerSite, leaves: Sequence[Any], function: Callable[..., Any], *args: Any
    ) -> Any:
        """The function while the tensors among these operands are in place."""
        given, _ = fill_call(site.structure, leaves[: leaf_count(site.structure)])
        return self._target.within(given, lambda: function(*args))


def _check(module: Any) -> None:
    """Raises UsageError for what cannot have other tensors put in its place."""
    if state.is_of_keras(module):
        module.check_given()
    for name, part in module.named_modules():
        what = f"{name or 'the module'}, a {type(part).__qualname__},"
        if isinstance(part, torch.jit.ScriptModule):
            raise UsageError(
                f"{what} is compiled by TorchScript, which looks its parameters up by itself: the caller cannot own them. "
                "Load the module as Python, or let the worker own the parameters (Remote.optimizer)"
            )
        if isinstance(part, torch.nn.DataParallel):
            raise UsageError(
                f"{what} copies its parameters to devices at each call. Use the module inside of it"
            )
    for name, x in module.named_parameters():
        if x._backward_hooks or getattr(x, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"{name} has a hook (Tensor.register_hook or the like), which would not be called for the caller's parameter. "
                "Register it there, on the parameter of the caller, and not in the factory"
            )
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(x):
            raise UsageError(
                f"{name} has no shape yet: call the module once with an example, so that its lazy parts are made"
            )
    _check_memory(module)


def _check_memory(module: Any) -> None:
    """Raises UsageError where a parameter that learns has the memory of another tensor of the module.

    A step moves both, as long as both are there: the caller has copies, which would part without a word.
    """
    seen: dict[int, tuple[str, Any]] = {}
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        address = x.data_ptr() if x.layout is torch.strided else 0
        other, first = seen.setdefault(address, (name, x)) if address else (name, x)
        if other != name and (x.requires_grad or first.requires_grad):
            raise UsageError(
                f"{other} and {name} are two tensors in the same memory (by x.data = y.data, say), and the caller, who has copies, would "
                "train them apart. Make them one parameter (part.weight = other.weight), or let the worker own the parameters"
            )
