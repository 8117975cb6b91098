"""A Keras layer or model, with Keras's torch backend, as a torch module like any other.

Keras keeps its variables beside the places where torch looks, and its layers are told their mode with each call, not by
``train()``. A `KerasModule` has trainable variables as its parameters and the other weights as its buffers, by Keras's
paths; its forward has Keras compute with whatever is in these places then, in the module's mode. So gradients,
optimizers, shadows and functional forms are torch's.
"""

from __future__ import annotations

from typing import Any, Callable

import keras
import torch

from gradwire_wire.errors import UsageError
from gradwire_workers.keras_layers import (
    called_in_layer,
    check_unconstrained,
    derived_anew,
    regularized,
    rnn_states,
    stable_paths,
    weights_of,
)
from gradwire_workers.names import unique_names

__all__ = ["KerasModule"]


class KerasModule(torch.nn.Module):
    """Shares its tensors with the layer. Dropout and the like draw from torch's generator, which `options(seed=...)` sets.

    moving_in_evaluation: the buffers that a call moves in evaluation mode too.

    Raises UsageError for a layer that has not been built, or where Keras's backend is another.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        _check(layer)
        self._layer = (layer,)  # in a tuple: not a part, whose parameters would count twice
        trainable = {id(v) for v in layer.trainable_variables}
        every = weights_of(layer)
        weights = {id(v) for v in every}
        paths = [path.replace(".", "_") for path in stable_paths(layer, every)]
        self._places = unique_names(zip(paths, every))
        for name, v in self._places.items():
            if id(v) in trainable:
                self.register_parameter(name, v.value)
            else:
                self.register_buffer(name, v.value.detach())
        moving = {id(v) for v in rnn_states(layer)}
        self.moving_in_evaluation = frozenset(name for name, v in self._places.items() if id(v) in moving)
        self._originals = _AsItIs(list(self._places.values()))
        self._seeds = [
            v for v in layer.variables if id(v) not in weights and v.path.endswith("seed_generator_state")
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._applied(self._layer[0], args, kwargs)

    def in_layer(self, trainable: bool, /, *args: Any, **kwargs: Any) -> Any:
        """A call with ``(result, losses, masks)`` as the result."""
        (layer,) = self._layer

        def call(*args: Any, **kwargs: Any) -> Any:
            return called_in_layer([layer], trainable, layer, args, kwargs)

        return self._applied(call, args, kwargs)

    def check_given(self) -> None:
        """UsageError where parameters that the caller owns would not learn as the module's own do."""
        check_unconstrained(
            {n: self._places[n] for n, p in self._parameters.items() if p is not None and p.requires_grad}
        )

    def regularizers(self) -> list[str]:
        """See `gradwire_workers.program.Program.regularizers`."""
        return regularized(self._layer[0])

    def _applied(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if kwargs.setdefault("training", self.training) != self.training:
            raise UsageError(
                f"training={kwargs['training']} in the call, and the module is in "
                f"{'training' if self.training else 'evaluation'} mode: use remote.train() and remote.eval()"
            )
        given = {name: self._parameters.get(name, self._buffers.get(name)) for name in self._places}
        for name in (
            self.moving_in_evaluation & self._buffers.keys()
        ):  # a state is part of the graph, and then overwritten
            given[name] = given[name].clone()
        mapping = [(self._places[name], x) for name, x in given.items()]
        # for shapes a shadow of this runs, with Keras's own lists of variables in it as they are
        for variable, (place, x) in zip(self._originals.value, mapping[:]):
            mapping += [] if variable is place else [(variable, x)]
        if self.training:
            mapping += [
                (v, torch.randint(0, 2**31 - 1, tuple(v.shape)).to(v.value.dtype)) for v in self._seeds
            ]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            with derived_anew(self._layer):
                result = call(*args, **kwargs)
        for name in self._parameters:
            if scope.get_current_value(self._places[name]) is not given[name]:
                raise UsageError(
                    f"this module assigns to its parameter {name} when it is called (as SpectralNormalization does), and in a torch "
                    "worker that would be lost, and its gradient another one. Load it in a TensorFlow worker, or make such a layer of torch's own"
                )
        for name, buffer in self._buffers.items():
            moved = scope.get_current_value(self._places[name])
            if buffer is not None and moved is not None and moved is not given[name]:
                with torch.no_grad():
                    buffer.copy_(moved)
        return result


class _AsItIs:
    """What `gradwire_workers.torch.shadows` does not look into."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _check(layer: Any) -> None:
    what = f"{type(layer).__qualname__} {getattr(layer, 'name', '')}"
    if not isinstance(layer, torch.nn.Module):
        raise UsageError(
            f"{what} is of Keras with the {keras.backend.backend()} backend, and this is a torch worker. Start it with "
            'bridge.worker("torch", env={"KERAS_BACKEND": "torch"}, ...)'
        )
    if not layer.built:
        raise UsageError(
            f"{what} has no weights yet. Build it in its factory: begin with keras.Input, or call layer.build(shape)"
        )
