"""A remote module of any framework as a `torch.nn.Module`, which owns the parameters, or leaves them to the worker.

The parameters that it owns are an argument of each call, and so get their gradients like any input, in every order and under every
transformation. They lie in the bridge's shared memory: as long as they do, a call passes them without a copy, and since
they are read there at each call, no way of changing them is missed. What has left that memory (``.to(dtype)``, a swapped
``.data``) is copied at each call instead; what is small travels in the message anyway.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from gradwire.functional import check_owner
from gradwire.proxies import stays_here
from gradwire.remote import Remote
from gradwire.torch.compiled import traced
from gradwire.torch.contents import Contents
from gradwire.torch.form import Form
from gradwire.torch.names import Fixed, Part, Place, placed
from gradwire.torch.stage import Stage
from gradwire_wire.errors import GradwireError, UsageError
from gradwire_wire.tensors.torch import NAME

__all__ = ["Module"]


class Module(Fixed):
    """``net = gw.torch.Module(remote)``: an ordinary module, whose forward runs in the worker.

    Its parameters have the remote's names, and begin with the remote's values. Those that are frozen there do not require
    gradients. Train them with any ``torch.optim``; the worker's own parameters stay as they are. A deep copy has parameters of
    its own, and the same remote.

    Modes: ``train()`` and ``eval()`` set the mode of this module's calls, whatever mode the remote, a deep copy or another module
    over the same remote is in. It begins in the remote's mode.

    Parts: they only hold parameters, and are never called. So a part cannot be replaced by another module. Parts are of none of
    torch's classes either: what looks for `nn.BatchNorm2d` or `nn.Linear` among ``modules()`` (``swa_utils.update_bn``, ``apply`` with an
    initialisation, attributions that hook each activation, as DeepLift does) finds none, and goes on without. Do that in the worker.

    Dtypes: tensors and parameters are sent in the dtypes that they have. ``torch.autocast`` has no effect inside of a remote call,
    since it acts on torch's operations, and those are made in another process. Convert the module (``.to(dtype)``) or the inputs,
    or use autocast in the worker's own code.

    buffers="worker": BatchNorm's statistics and the like stay in the worker, where each forward in training mode moves them once.
    ``state_dict()`` fetches them and ``load_state_dict()`` sends them. Deep copies share them, also those that
    ``swa_utils.AveragedModel`` makes (so its ``use_buffers=True`` finds none). Extra states (``get_extra_state``) are always the
    worker's, and treated alike.
    buffers="explicit": they are this module's buffers, sent and returned at each call; nothing moves in the worker.

    owner="worker": all of the state stays in the worker, and this module makes the remote a part of a model. ``train()``, ``eval()``
    and ``requires_grad_()`` act on the remote itself, ``state_dict()`` fetches its state and ``load_state_dict()`` sends it. The
    module has no ``parameters()``: their gradients accumulate in the worker, where an optimizer of ``remote.optimizer(...)`` steps
    and zeroes them, beside the caller's own optimizer. Such a module cannot be copied.

    No module of either kind can be pickled; ``torch.save(net.state_dict(), path)`` works.
    Raises UsageError for a remote function, and for a module whose parameters cannot be given to it.
    """

    def __init__(self, remote: Remote, buffers: str = "worker", owner: str = "caller") -> None:
        super().__init__()
        form: Any = _form(remote, buffers, owner)
        self._training_form, self._evaluation_form = form, form.evaluating()
        has = Contents(remote)
        parameters = has.parameters if form.owns_parameters else {}
        explicit = has.buffers if buffers == "explicit" else {}
        aliases = {a: name for a, name in has.aliases.items() if name in parameters or name in explicit}
        places = placed(self, [*parameters, *aliases, *explicit])
        there = {name: x for name, x in {**has.parameters, **has.buffers}.items() if name not in places}
        self._parameter_places = {name: places[name] for name in parameters}
        self._ties = {a: (places[a], name) for a, name in aliases.items() if name in parameters}
        names = {name: [name, *(a for a, own in aliases.items() if own == name)] for name in explicit}
        self._buffer_places = {name: [places[n] for n in every] for name, every in names.items()}
        self._fetched = [name for name in has.persistent if name not in places and name not in has.extra]
        self._types_there = {name: x.dtype for name, x in there.items()}
        self._order = [places[name].path if name in places else name for name in has.persistent]
        self._extra, self._unfetchable, self._aliases = has.extra, has.unfetchable, has.aliases
        for name, x in parameters.items():
            learns = name not in has.frozen and (x.is_floating_point() or x.is_complex())
            _register(places[name], torch.nn.Parameter(form.resident(x, NAME), learns))
        for further, name in self._ties.values():
            _register(further, _at(places[name]))
        for name, every in names.items():
            for n in every:
                places[n].part.register_buffer(places[n].key, explicit[name], persistent=n in has.persistent)
        self._parts = tuple(part for part in self.modules() if isinstance(part, Part))
        for part in self._parts:
            part.own = frozenset(part._parameters)
        self.train(remote.training is not False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The remote's result at these arguments and this module's parameters."""
        self._check_modes()
        parameters = self._own_parameters()
        if not torch.compiler.is_dynamo_compiling() and _is_distributed():
            parameters = {name: _copied_if_gathered(x) for name, x in parameters.items()}
        buffers = {name: _at(first) for name, (first, *_) in self._buffer_places.items()}
        form = self._form
        given: tuple[Any, ...] = (parameters,) if form.owns_parameters else ()
        if form.has_explicit_buffers:  # copies, for they are written to before the backward pass
            given = (parameters, {name: x.clone() for name, x in buffers.items()})
        if torch.compiler.is_dynamo_compiling():
            result = traced(form, (*given, *args), kwargs)
        else:
            result = form.call(given, args, kwargs)
        if not form.has_explicit_buffers:
            return result
        result, moved = result
        with torch.no_grad():
            for name, x in moved.items():
                if x.dtype == buffers[name].dtype:
                    buffers[name].copy_(x)
                else:  # statistics of JAX may begin in float32 and go on in float64
                    self._put_buffer(name, x.detach().clone())
        return result

    def _own_parameters(self) -> dict[str, torch.Tensor]:
        """By the remote's names. By a further name of a tied one, too, where something else has been put under that here."""
        found = {name: getattr(part, key) for name, (part, key, _) in self._parameter_places.items()}
        for alias, (place, name) in self._ties.items():
            x = _at(place)
            if x is not found[name]:
                found[alias] = x
        return found

    def _put_buffer(self, name: str, x: Any) -> None:
        """Also in the places of a part that the worker's module has under several names."""
        for part, key, _ in self._buffer_places[name]:
            part._buffers[key] = x

    def _check_modes(self) -> None:
        """UsageError after ``net.part.eval()``, which would change nothing in the worker."""
        mode = self.training
        if any([part.training is not mode for part in self._parts]):
            raise UsageError(
                f"a part of this module is in {'evaluation' if mode else 'training'} mode and the whole is not: parts have no "
                "modes of their own here. Use train() and eval() of the whole, or set the part's mode in the worker's own code"
            )

    def train(self, mode: bool = True) -> Module:
        """As of every module; where the worker owns the state, its module is in this mode from now on."""
        super().train(mode)
        self._form.enter()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Module:
        """As of every module; where the worker owns the parameters, theirs too (`Remote.requires_grad_`)."""
        if not self._form.owns_parameters:
            self._remote.requires_grad_(requires_grad)
        super().requires_grad_(requires_grad)
        return self

    @property
    def _form(self) -> Any:
        return self._training_form if self.training else self._evaluation_form

    @property
    def _remote(self) -> Remote:
        remote: Remote = self._training_form.remote
        return remote

    def extra_repr(self) -> str:
        return self._remote.handle.name

    # ---- What is made of its parts ------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What ``to``, ``half``, ``double`` and the like do. UsageError where what the worker owns would be left behind."""
        types = {dtype: fn(torch.empty(0, dtype=dtype)).dtype for dtype in {*self._types_there.values()}}
        left = [name for name, dtype in self._types_there.items() if types[dtype] != dtype]
        if left:
            raise UsageError(
                f"{', '.join(left[:5])} of {self._remote.handle.name} would stay {str(self._types_there[left[0]])[6:]}, for the "
                f"{'buffers' if self._form.owns_parameters else 'state'} of this module {'are' if self._form.owns_parameters else 'is'} in the "
                "worker, where others share it. Have its factory make it in the other dtype, or convert "
                "gw.torch.Module(remote, buffers='explicit')"
            )
        super()._apply(fn, recurse)
        for name, (first, *_) in self._buffer_places.items():
            self._put_buffer(name, _at(first))
        return self

    # ---- Copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        if not self._form.owns_parameters:
            raise stays_here(
                "module",
                self._remote,
                " Its parameters are in the worker, and a copy would train the same ones. gw.torch.Module(remote) can be copied.",
            )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo.update({id(form): form for form in (self._training_form, self._evaluation_form)})
        copied.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        for p in copied.parameters():
            if (
                p.device.type == "cpu" and p.is_contiguous()
            ):  # or a copied optimizer's moments would lie otherwise
                p.data = copied._training_form.resident(p.data, NAME)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise stays_here(
            "module",
            self._remote,
            " Save its values: torch.save(net.state_dict(), path). copy.deepcopy works.",
        )

    # ---- State -------------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of every module. Buffers that the worker owns, and extra states of its module, are fetched: copies."""
        if self._unfetchable is not None:
            raise UsageError(
                f"{self._remote.handle.name}: the state of the worker's module has something that cannot be sent (an extra "
                f"state): {self._unfetchable}. Save parameters() and buffers() by name"
            ) from self._unfetchable
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        if self._fetched or self._extra:
            own = self._remote.options(family=NAME)
            there = own.state_dict() if self._extra or not self._form.owns_parameters else own.buffers()
            names = {n: n if n in there else self._aliases[n] for n in (*self._fetched, *self._extra)}
            found.update({prefix + name: there[n] for name, n in names.items()})
        for name in [prefix + path for path in self._order if prefix + path in found]:
            found[name] = found.pop(name)  # in the order of the worker's module
        return found

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # What is the worker's is taken out: the parts, which come after this, would not expect it.
        fetched = [*self._fetched, *self._extra]
        there = {n: state_dict.pop(prefix + n) for n in fetched if prefix + n in state_dict}
        missing_keys += [prefix + n for n in fetched if n not in there]
        try:
            if there:
                self._remote.load_state_dict(there, strict=False)
        except GradwireError as error:
            error_msgs.append(str(error))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _form(remote: Remote, buffers: str, owner: str) -> Form | Stage:
    """What is called in training mode."""
    check_owner("Module", owner, buffers)
    if owner == "worker":
        return Stage(remote)
    return Form(remote, buffers=buffers == "explicit", training=True)


def _at(place: Place) -> Any:
    return getattr(place.part, place.key)


def _register(place: Place, x: Any) -> None:
    place.part.register_parameter(place.key, x)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _copied_if_gathered(x: torch.Tensor) -> torch.Tensor:
    """FSDP gathers parameters for a forward, and frees them behind it: torch forbids that of memory that numpy has seen, as it does what is sent.

    Those in the bridge's shared memory are never freed so.
    """
    try:
        return x.clone() if x.untyped_storage().resizable() else x
    except NotImplementedError:  # of torch.func's, around another one
        return x
