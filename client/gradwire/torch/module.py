"""A remote module of any framework as a `torch.nn.Module`, which owns the parameters, or leaves them to the worker.

The parameters that it owns are an argument of each call, and so get their gradients like any input, in every order and under every
transformation. They lie in the bridge's shared memory: as long as they do, a call passes them without a copy, and since
they are read there at each call, no way of changing them is missed. What has left that memory (``.to(dtype)``, a swapped
``.data``) is copied at each call instead; what is small travels in the message anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

import gradwire.torch
from gradwire.families import family_of_call
from gradwire.functional import Functional
from gradwire.proxies import stays_here
from gradwire.torch.compiled import traced
from gradwire.torch.names import Fixed, Part, Place, placed
from gradwire.torch.stage import Stage
from gradwire_wire.errors import GradwireError, RemoteError, UsageError
from gradwire_wire.tensors.torch import NAME

if TYPE_CHECKING:
    from gradwire.handle import Handle
    from gradwire.remote import Remote
    from gradwire.site import Site

__all__ = ["Module"]


class Module(Fixed):
    """``net = gw.torch.Module(remote)``: an ordinary module, whose forward runs in the worker.

    Its parameters have the remote's names and begin with the remote's values; those frozen there do not require
    gradients. Train them with any ``torch.optim``: the worker's own parameters stay as they are. ``train()`` and ``eval()``
    set the mode of its own calls, whatever mode `Remote.train`, a deep copy or another module over the same remote is in.
    It begins in the remote's mode. Its parts hold parameters and are never called: one cannot be replaced by another module, and they are
    of none of torch's classes, so what looks for `nn.BatchNorm2d` or `nn.Linear` among ``modules()`` (``swa_utils.update_bn``, an
    initialisation by ``apply``) finds none. Do that in the factory.
    A deep copy has parameters of its own and the same remote.

    Tensors go in the dtypes that they have, and parameters as they are here. ``torch.autocast`` has no effect inside of a
    remote call: it acts on torch's own operations, and those are made in another process. Convert the module (``.to(dtype)``)
    or the inputs, or use autocast in the worker's own code.

    buffers="worker": BatchNorm's statistics and the like stay in the worker, where each forward in training mode moves them
    once; ``state_dict()`` fetches them and ``load_state_dict()`` sends them, and deep copies share them, among them those that
    ``swa_utils.AveragedModel`` makes (whose ``use_buffers=True`` finds none). So it is with extra states
    (``get_extra_state``), which are always the worker's.
    buffers="explicit": they are this module's buffers, passed in and taken back at each call; nothing moves in the worker.

    owner="worker": all of the state stays in the worker, and this module is the remote as a part of a model: ``train()``, ``eval()`` and
    ``requires_grad_()`` are the remote's own, ``state_dict()`` fetches its state and ``load_state_dict()`` sends it. It has no
    ``parameters()``: its gradients accumulate in the worker, and an optimizer of ``remote.optimizer(...)`` steps and zeroes them
    beside the caller's. It cannot be copied.

    It cannot be pickled; ``torch.save(net.state_dict(), path)`` works.
    Raises UsageError for a remote function, and for a module whose parameters cannot be given to it.
    """

    def __init__(self, remote: Remote, buffers: str = "worker", owner: str = "caller") -> None:
        super().__init__()
        form: Any = _form(remote, buffers, owner)
        self._remote, self._evaluating = form, form.evaluating()
        self._owns_parameters = owner == "caller"
        has = Contents(remote)
        parameters, aliases = (has.parameters, has.aliases) if self._owns_parameters else ({}, {})
        explicit = has.buffers if buffers == "explicit" else {}
        places = placed(self, [*parameters, *aliases, *explicit])
        there = {name: x for name, x in {**has.parameters, **has.buffers}.items() if name not in places}
        self._parameter_places = {name: places[name] for name in parameters}
        self._buffer_places = {name: places[name] for name in explicit}
        self._fetched = [name for name in has.persistent if name not in places and name not in has.extra]
        self._types_there = {name: x.dtype for name, x in there.items()}
        self._order = [places[name].path if name in places else name for name in has.persistent]
        self._extra, self._unfetchable = has.extra, has.unfetchable
        for name, x in parameters.items():
            learns = name not in has.frozen and (x.is_floating_point() or x.is_complex())
            _register(places[name], torch.nn.Parameter(self._remote.resident(x, NAME), learns))
        for alias, name in aliases.items():
            _register(places[alias], _at(places[name]))
        for name, x in explicit.items():
            places[name].part.register_buffer(places[name].key, x, persistent=name in has.persistent)
        self._parts = tuple(part for part in self.modules() if isinstance(part, Part))
        self.train(remote.training is not False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The remote's result at these arguments and this module's parameters."""
        self._check_modes()
        parameters = {name: getattr(part, key) for name, (part, key, _) in self._parameter_places.items()}
        buffers = {name: getattr(part, key) for name, (part, key, _) in self._buffer_places.items()}
        given: tuple[Any, ...] = (parameters,) if self._owns_parameters else ()
        if self._remote.has_explicit_buffers:  # copies, for they are written to before the backward pass
            given = (parameters, {name: x.clone() for name, x in buffers.items()})
        form = self._form
        if torch.compiler.is_dynamo_compiling():
            result = traced(form, (*given, *args), kwargs)
        else:
            result = form.call(given, args, kwargs)
        if not self._remote.has_explicit_buffers:
            return result
        result, moved = result
        with torch.no_grad():
            for name, x in moved.items():
                if x.dtype == buffers[name].dtype:
                    buffers[name].copy_(x)
                else:  # statistics of JAX may begin in float32 and go on in float64
                    part, key, _ = self._buffer_places[name]
                    part._buffers[key] = x.detach().clone()
        return result

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
        if not self._owns_parameters:
            self._remote.remote.requires_grad_(requires_grad)
        super().requires_grad_(requires_grad)
        return self

    @property
    def _form(self) -> Any:
        return self._remote if self.training else self._evaluating

    def extra_repr(self) -> str:
        return self._remote.remote.handle.name

    # ---- What is made of its parts ------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What ``to``, ``half``, ``double`` and the like do. UsageError where what the worker owns would be left behind."""
        types = {dtype: fn(torch.empty(0, dtype=dtype)).dtype for dtype in {*self._types_there.values()}}
        left = [name for name, dtype in self._types_there.items() if types[dtype] != dtype]
        if left:
            raise UsageError(
                f"{', '.join(left[:5])} of {self._remote.remote.handle.name} would stay {str(self._types_there[left[0]])[6:]}, for the "
                f"{'buffers' if self._owns_parameters else 'state'} of this module {'are' if self._owns_parameters else 'is'} in the "
                "worker, where others share it. Have its factory make it in the other dtype, or convert "
                "gw.torch.Module(remote, buffers='explicit')"
            )
        return super()._apply(fn, recurse)

    # ---- Copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        if not self._owns_parameters:
            raise stays_here(
                "module",
                self._remote.remote,
                " Its parameters are in the worker, and a copy would train the same ones. gw.torch.Module(remote) can be copied.",
            )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo.update({id(form): form for form in (self._remote, self._evaluating)})
        copied.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        for p in copied.parameters():
            if p.device.type == "cpu":
                p.data = copied._remote.resident(p.data, NAME)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise stays_here(
            "module",
            self._remote.remote,
            " Save its values: torch.save(net.state_dict(), path). copy.deepcopy works.",
        )

    # ---- State -------------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of every module. Buffers that the worker owns, and extra states of its module, are fetched: copies."""
        if self._unfetchable is not None:
            raise UsageError(
                f"{self._remote.remote.handle.name}: the state of the worker's module has something that cannot be sent (an extra "
                f"state): {self._unfetchable}. Save parameters() and buffers() by name"
            ) from self._unfetchable
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        if self._fetched or self._extra:
            own = self._remote.remote.options(family="torch")
            there = own.state_dict() if self._extra or not self._owns_parameters else own.buffers()
            found.update({prefix + name: there[name] for name in (*self._fetched, *self._extra)})
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
                self._remote.remote.load_state_dict(there, strict=False)
        except GradwireError as error:
            error_msgs.append(str(error))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _form(remote: Remote, buffers: str, owner: str) -> Form | Stage:
    """What is called in training mode. UsageError for what these words are not."""
    if owner not in ("caller", "worker") or buffers not in ("worker", "explicit"):
        raise UsageError(
            f"Module(owner={owner!r}, buffers={buffers!r}): owner is 'caller' or 'worker', buffers 'worker' or 'explicit'"
        )
    if owner == "caller":
        return Form(remote, buffers=buffers == "explicit", training=True)
    if buffers == "explicit":
        raise UsageError(
            "buffers='explicit' needs owner='caller': the worker owns all of the state or the caller does"
        )
    return Stage(remote)


def _at(place: Place) -> Any:
    return getattr(place.part, place.key)


def _register(place: Place, x: Any) -> None:
    place.part.register_parameter(place.key, x)


class Contents:
    """What a remote module has, under its own names.

    persistent: the names of its state dict. extra: those of them that are neither parameters nor buffers.
    unfetchable: why it cannot be had, where it has what cannot be sent.
    """

    def __init__(self, remote: Remote) -> None:
        own = remote.options(family="torch")
        self.parameters, self.buffers = own.parameters(), own.buffers()
        self.frozen, self.aliases = set(remote._change("frozen")), dict(remote._change("aliases"))
        self.unfetchable: GradwireError | None = None
        try:
            self.persistent = list(own.state_dict())
        except (UsageError, RemoteError) as error:
            self.persistent, self.unfetchable = list(self.buffers), error
        known = {*self.parameters, *self.aliases, *self.buffers}
        self.extra = [name for name in self.persistent if name not in known]


class Form(Functional):
    """The remote's functional form in one mode, for a module: its calls and their memory. Deep copies share it."""

    def __init__(self, remote: Remote, *, buffers: bool, training: bool) -> None:
        super().__init__(remote, buffers=buffers, training=training)
        self._sites: dict[int, Site] = {}

    def __repr__(self) -> str:
        return repr(self.remote)

    def evaluating(self) -> Form:
        """The same in evaluation mode; itself where the remote has no modes."""
        if self.training is None:
            return self
        return Form(self.remote, buffers=self.has_explicit_buffers, training=False)

    @property
    def training(self) -> bool | None:
        """The mode of its calls; None where the remote has none."""
        return self.handle.training

    def enter(self) -> None:
        """Nothing: each call says its mode."""

    def call(self, given: Sequence[Mapping[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with these parameters (and buffers)."""
        if not kwargs and all([isinstance(x, torch.Tensor) for x in args]):
            operands = [x for tensors in given for x in tensors.values()]
            site = self._sites.get(len(args))
            if site is None:
                site = self._sites[len(args)] = self._described(given, args, kwargs)[0]
            return gradwire.torch.call(self.handle, site, [*operands, *args])
        site, leaves = self._described(given, args, kwargs)
        family_of_call(leaves, site.structure, NAME)
        return gradwire.torch.call(self.handle, site, leaves)

    def _described(
        self, given: Sequence[Mapping[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Site, list[Any]]:
        return self.flatten(given[0], (*given[1:], *args), kwargs)

    def described(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Handle, Site]:
        """For a compiler that traces the call; see `gradwire.remote.Remote.described`."""
        return self.handle, self.flatten(args[0], tuple(args[1:]), kwargs)[0]
