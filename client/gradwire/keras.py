"""A remote module as a Keras layer: `Layer`. For Keras 3 with any of its backends.

The layer has the remote module's parameters as Keras variables of its own, and each call takes their values along. So
gradients, optimizers, `model.fit`, `assign` and weight files are Keras's business, as with any layer; what is remote is only the call.
The call itself is made by the face of the backend's tensors: `gradwire.tensorflow`, `gradwire.jax` or `gradwire.torch`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import keras
import numpy as np

from gradwire.conversion import to_numpy
from gradwire.derived import Derived
from gradwire.families import face_named, family_of_call, is_leaf
from gradwire.functional import Functional
from gradwire.remote import Remote
from gradwire.static_shapes import StaticAval, static_results
from gradwire_wire.dtypes import dtype_named
from gradwire_wire.errors import DtypeError, RemoteError, UsageError
from gradwire_wire.structures import fill, flatten

__all__ = ["Layer"]

if not hasattr(keras, "KerasTensor"):
    raise UsageError(f"gw.keras needs Keras 3, and this is Keras {keras.__version__}: pip install -U keras")

try:
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope
except ImportError:  # then a shape probe of the torch backend may be a real call

    def in_symbolic_scope() -> bool:
        return False


try:
    from keras.src.backend import get_keras_mask, set_keras_mask
except ImportError:  # an older one, with masks as attributes of tensors and nowhere else

    def get_keras_mask(x: Any) -> Any:
        return getattr(x, "_keras_mask", None)

    def set_keras_mask(x: Any, mask: Any) -> None:
        x._keras_mask = mask


_BUFFERS = "worker."


class Layer(keras.layers.Layer):
    """A Keras layer that calls ``remote``, with the remote module's parameters as its trainable weights.

    Weights: they are named after the remote's (``"0.weight"`` becomes ``0_weight``), begin with the values that the remote has
    now, and belong to the caller from then on. What `Remote.requires_grad_` has frozen stays in the worker.
    ``layer.trainable = False`` freezes the rest, as in any layer; a Keras module in the worker is then called as a frozen one, with
    its BatchNorm in inference mode.

    buffers="worker": buffers such as BatchNorm's statistics stay in the worker, and move once for each call in training mode. Weight
    files and `tf.train.Checkpoint` have them, but ``get_weights`` does not, and neither does what restores weights by it
    (``EarlyStopping(restore_best_weights=True)``).
    buffers="explicit": they are non-trainable weights of this layer, and a call changes nothing in the worker.

    Calls: the mode of a call is the one that Keras says (``training=``, else that of the call around it, else evaluation), whatever
    `Remote.train` has set. Inputs are sent as they are, whatever Keras's global policy says. If ``dtype`` is given, inputs are cast to what it
    computes in, as other layers do, and so are this layer's trainable weights for the call (``dtype="mixed_bfloat16"``), but not those of a TensorFlow
    module. Buffers, and what is frozen in the worker, keep their dtype.
    A model with this layer can be compiled by XLA under JAX, but not under TensorFlow, where Keras therefore does not do so.

    With a Keras module in the worker: what its regularizers and its ``add_loss`` collect in a call becomes losses of this layer, with
    their gradients. Masks that Keras has attached to the inputs reach the module, and masks of its results come back.

    Memory: weights lie in the bridge's shared memory, where a call need not copy them, when the layer has made them and after
    ``set_weights`` or a weight file; with the torch backend always. An optimizer of TensorFlow or JAX puts new
    memory in their place, which each call copies; ``layer.set_weights(layer.get_weights())`` undoes that.

    Raises UsageError for a remote that is not a module, and DtypeError for parameters that this backend would narrow.
    """

    def __init__(self, remote: Remote, *, buffers: str = "worker", dtype: Any = None, **kwargs: Any) -> None:
        if buffers not in ("worker", "explicit"):
            raise UsageError(f"buffers must be 'worker' or 'explicit', not {buffers!r}")
        explicit = buffers == "explicit"
        by_mode = {(mode, True): self._functional(remote, explicit, mode, True) for mode in (False, True)}
        super().__init__(dtype=dtype, autocast=dtype is not None, **kwargs)
        self.supports_jit = keras.backend.backend() == "jax"
        self._remote, self._by_mode, self._explicit = _Untracked(remote), _Untracked(by_mode), explicit
        self._own: _Untracked = _Untracked(({}, {}))
        self._has_weights = False
        self._take_weights()

    @staticmethod
    def _functional(remote: Remote, explicit: bool, training: bool, trainable: bool) -> Functional:
        return Functional(remote, buffers=explicit, training=training, trainable=trainable)

    autograph_info__ = (
        None  # as of `Remote`: what is called here is not for TensorFlow's AutoGraph to rewrite
    )

    @property
    def remote(self) -> Remote:
        """What it calls."""
        remote: Remote = self._remote.value
        return remote

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def _take_weights(self) -> None:
        """Make variables of what the remote has; nothing where it has none yet (a Keras model that was not called)."""
        remote = self.remote.options(family="numpy")
        frozen = set(self._by_mode.value[False, True].frozen())
        parameters = {n: x for n, x in remote.parameters().items() if n not in frozen}
        buffers = remote.buffers()
        if not (parameters or buffers or frozen):
            return
        names = _variable_names([*parameters, *(buffers if self._explicit else ())])
        own = {n: self._weight(names[n], x, True) for n, x in parameters.items()}
        moving = {n: self._weight(names[n], x, False) for n, x in buffers.items()} if self._explicit else {}
        self._own = _Untracked((own, moving))
        self._has_weights = self.built = True

    def _weight(self, name: str, value: np.ndarray, trainable: bool) -> Any:
        dtype = value.dtype.name

        def initial(shape: Any, dtype: Any = None) -> Any:
            return self._resident(value)

        variable = self.add_weight(
            name=name,
            shape=value.shape,
            dtype=dtype,
            initializer=initial,
            trainable=trainable,
            autocast=False,
        )
        setattr(self, f"_own_{name}", variable)  # where TensorFlow's checkpoints look for it
        kept = keras.backend.standardize_dtype(variable.value.dtype)
        if kept != dtype:
            raise DtypeError(
                f"{name} of {self.remote.handle.name} is {dtype}, which Keras's {keras.backend.backend()} backend would "
                f"narrow to {kept} here. Allow it (jax.config.update('jax_enable_x64', True)), or load the module in {kept}"
            )
        return variable

    def _resident(self, value: Any) -> Any:
        """As a tensor in the bridge's shared memory, which a variable of TensorFlow or JAX takes over as its own."""
        functional = self._by_mode.value[False, True]
        try:
            return functional.resident(value, keras.backend.backend())
        except DtypeError:  # this backend would narrow it: `_weight` says what to do
            return keras.ops.convert_to_tensor(value)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """As of every layer. The values come to lie where a call need not copy them (see `Layer`)."""
        resident = [self._resident(x) if isinstance(x, np.ndarray) else x for x in weights]
        super().set_weights(resident)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_weights:
            self._build_remote(args, kwargs)
        if "_tree" not in kwargs and _has_both(args, kwargs):
            context = {name: kwargs.pop(name) for name in ("training",) if name in kwargs}
            structure, tensors = flatten([list(args), kwargs], _is_symbolic_leaf)
            return super().__call__(*tensors, _tree=_Untracked(structure), **context)
        return super().__call__(*args, **kwargs)

    def _build_remote(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A spec makes the weights that the module makes at its first call. Once; a module may have none at all."""
        kwargs = {name: x for name, x in kwargs.items() if name != "training"}
        structure, leaves = flatten([list(args), kwargs], _is_symbolic_leaf)
        site = self.remote._site(structure, training=self.remote.training)
        static_results(Derived(self.remote.handle, site), [_static_aval(x) for x in leaves])
        self._take_weights()
        self._has_weights = self.built = True

    # ---- Calls -------------------------------------------------------------------------------------------------------

    def call(self, *args: Any, training: Any = None, _tree: _Untracked | None = None, **kwargs: Any) -> Any:
        args, kwargs = _given(args, kwargs, _tree)
        if keras.backend.backend() == "torch" and in_symbolic_scope():
            return self._probe(args, training, kwargs)
        functional, own, moving = self._at(training)
        kwargs = {**kwargs, **_masks(args, kwargs)}
        # copies: what is assigned below must not change what a pullback will send (in torch it would)
        buffers = [{n: keras.ops.copy(v.value) for n, v in moving.items()}] if self._explicit else []
        parameters = {n: self._as_computed(v, v.value, keras.ops.cast) for n, v in own.items()}
        site, leaves = functional.flatten(parameters, (*buffers, *args), kwargs)
        face = face_named(family_of_call(leaves, site.structure, keras.backend.backend()))
        result = face.call(functional.handle, site, leaves)
        if self._explicit:
            result, moved = result
            for name, variable in moving.items():  # also in evaluation mode: a stateful RNN's move there
                self._check_kept(variable, moved[name])
                variable.assign(moved[name])
        result, losses, masks = result
        self.supports_masking = masks is not None
        for loss in losses:
            self.add_loss(loss)
        for y, mask in zip(flatten(result, is_leaf)[1], masks or (), strict=False):
            if mask is not None:
                set_keras_mask(y, mask)
        return result

    def _as_computed(self, variable: Any, value: Any, cast: Callable[[Any, str], Any]) -> Any:
        """Where a dtype is given, inputs come in the one that it computes in; torch takes no weights of another beside them.

        TensorFlow's variables have theirs for good, and Keras layers that have them cast what comes to it by themselves.
        """
        wanted = self.compute_dtype
        other = keras.backend.is_float_dtype(variable.dtype) and variable.dtype != wanted
        if not (other and self.autocast and keras.backend.is_float_dtype(wanted)):
            return value
        return value if self.remote.handle.framework == "tensorflow" else cast(value, wanted)

    def compute_mask(self, *_: Any) -> None:
        """None beside those that came with the results."""

    def _check_kept(self, variable: Any, moved: Any) -> None:
        kind = keras.backend.standardize_dtype(moved.dtype)
        if kind != variable.dtype:
            raise DtypeError(
                f"{self.name}: {variable.name} is {variable.dtype} and a call has made {kind} of it, which a Keras variable cannot "
                f"become. Have the factory make it in {kind}, or leave it in the worker (buffers='worker')"
            )

    def compute_output_spec(
        self, *args: Any, training: Any = None, _tree: _Untracked | None = None, **kwargs: Any
    ) -> Any:
        """By asking the worker once for each signature; nothing runs there for real."""
        args, kwargs = _given(args, kwargs, _tree)
        functional, own, moving = self._at(training)
        own = {n: self._as_computed(v, v, _of_dtype) for n, v in own.items()}
        state = [own, moving] if self._explicit else [own]
        structure, leaves = flatten([[*state, *args], kwargs], _is_symbolic_leaf)
        site, operands = functional.site(structure), [*functional.remote.seed_operand, *leaves]
        avals, structure = static_results(
            Derived(functional.handle, site), [_static_aval(x) for x in operands]
        )
        result = fill(structure, [keras.KerasTensor(a.shape, a.dtype.name) for a in avals])
        result, _, masks = result[0] if self._explicit else result
        self.supports_masking = masks is not None  # Keras warns of masks that come to a layer that does not
        return result

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Of one argument: what `TimeDistributed` asks for. The dtype of an input is taken for that of the policy."""
        given = keras.tree.map_shape_structure(
            lambda s: keras.KerasTensor(s, self.compute_dtype), input_shape
        )
        return keras.tree.map_structure(lambda y: y.shape, self.compute_output_spec(given))

    def _at(self, training: Any) -> tuple[Functional, dict[str, Any], dict[str, Any]]:
        if training is not None and not isinstance(training, (bool, int, np.bool_)):
            raise UsageError(
                f"{self.name}: training must be True or False, not {training!r:.80}: a remote mode is no tensor"
            )
        key = (bool(training), bool(self.trainable))
        functional = self._by_mode.value.get(key)
        if functional is None:
            functional = self._by_mode.value[key] = self._functional(self.remote, self._explicit, *key)
        return functional, *self._own.value

    def _probe(self, args: tuple[Any, ...], training: Any, kwargs: dict[str, Any]) -> Any:
        """Keras's torch backend finds shapes out by calling with tensors of ones."""
        spec = self.compute_output_spec(*args, training=training, **kwargs)
        return keras.tree.map_structure(lambda y: keras.ops.zeros(y.shape, y.dtype), spec)

    # ---- Saving ------------------------------------------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """All weights by name, and the buffers that the worker has. Warns of extra states of a torch module, which are not."""
        self._warn_of_extra_states()
        for variable in self._all_own():
            store[variable.name] = to_numpy(variable.value)
        for key, (_, value) in self._remote_buffers().items():
            store[key] = value

    def load_own_variables(self, store: Any) -> None:
        """The same back, those of the worker to the worker; all or nothing."""
        variables, buffers = {v.name: v for v in self._all_own()}, self._remote_buffers()
        wanted = {
            **{n: tuple(v.shape) for n, v in variables.items()},
            **{k: x.shape for k, (_, x) in buffers.items()},
        }
        found = {key: np.asarray(store[key]) for key in list(store.keys())}
        problems = list(_problems(wanted, found))
        if problems:
            hint = "" if self._has_weights else ". It has no weights yet: call it once"
            raise UsageError(f"{self.name}: nothing was loaded: {'; '.join(problems)}{hint}")
        self._load_remote_buffers(found)
        for name, variable in variables.items():
            variable.assign(self._resident(found[name]))

    def _serialize_to_tensors(self) -> dict[str, Any]:
        """The buffers that the worker has, for `tf.train.Checkpoint`.

        The names are without the dot, which TensorFlow writes in one way and looks for in another.
        """
        buffers = self._remote_buffers()
        return {key.replace(".", "_"): keras.ops.convert_to_tensor(x) for key, (_, x) in buffers.items()}

    def _restore_from_tensors(self, restored: Mapping[str, Any]) -> None:
        """The same back; nothing where this is traced for a SavedModel, which never has the worker."""
        if all(hasattr(x, "numpy") for x in restored.values()):
            found = {key: to_numpy(restored[key.replace(".", "_")]) for key in self._remote_buffers()}
            self._load_remote_buffers(found)

    def _load_remote_buffers(self, found: Mapping[str, np.ndarray]) -> None:
        buffers = self._remote_buffers()
        if buffers:
            state = {name: found[key].astype(value.dtype) for key, (name, value) in buffers.items()}
            self.remote.load_state_dict(state, strict=False)

    def _warn_of_extra_states(self) -> None:
        own = self.remote.options(family="numpy")
        known = {*own.parameters(), *own.buffers(), *self.remote._change("aliases")}
        try:
            extra = [name for name in own.state_dict() if name not in known]
        except (UsageError, RemoteError) as error:
            extra = [f"something that cannot be sent: {error}"]
        if extra:
            warnings.warn(
                f"{self.name}: weight files do not have what else is in the state of {self.remote.handle.name} "
                f"({', '.join(extra[:5])}). Save that yourself: remote.state_dict()",
                UserWarning,
                stacklevel=2,
            )

    def _all_own(self) -> Iterable[Any]:
        own, moving = self._own.value
        return [*own.values(), *moving.values()]

    def _remote_buffers(self) -> dict[str, tuple[str, Any]]:
        """Of the worker, by their names in a file."""
        if self._explicit or not self._has_weights:
            return {}
        buffers = self.remote.options(family="numpy").buffers()
        names = _variable_names(buffers)
        return {f"{_BUFFERS}{names[n]}": (n, x) for n, x in buffers.items()}

    def get_config(self) -> NoReturn:
        raise UsageError(
            f"{self.name} calls a module of another process ({self.remote.handle.name}), which cannot be written into a "
            "file. Save the weights (model.save_weights, model.load_weights), and make the model again around "
            "gw.keras.Layer(remote)"
        )


def _of_dtype(variable: Any, dtype: str) -> Any:
    return keras.KerasTensor(variable.shape, dtype)


def _masks(args: Any, kwargs: Any) -> dict[str, list[Any]]:
    """The masks that Keras has attached to these tensors, as a keyword of the call: one, or None, for each of them."""
    masks = [get_keras_mask(x) for x in flatten([list(args), kwargs], is_leaf)[1]]
    return {"_keras_masks": masks} if any(mask is not None for mask in masks) else {}


class _Untracked:
    """Keeps Keras from looking into what an attribute holds: it copies dicts, and makes layers of torch modules."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _has_both(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether there are constants beside tensors, which Keras refuses where a layer's signature does not name its arguments."""
    kinds = {
        _is_symbolic_leaf(x)
        for x in keras.tree.flatten([list(args), [x for name, x in kwargs.items() if name != "training"]])
        if x is not None
    }
    return len(kinds) == 2


def _given(args: Any, kwargs: dict[str, Any], tree: _Untracked | None) -> tuple[Any, dict[str, Any]]:
    """The arguments as they were given, of which Keras has seen the tensors alone if there is a tree."""
    return (args, kwargs) if tree is None else fill(tree.value, list(args))


def _variable_names(names: Iterable[str]) -> dict[str, str]:
    """Names that every backend takes, without / and dots; numbered where two become the same."""
    found: dict[str, str] = {}
    for name in names:
        plain = name.replace("/", "_").replace(".", "_")
        number, free = 1, plain
        while free in found.values():
            free, number = f"{plain}_{number}", number + 1
        found[name] = free
    return found


def _is_symbolic_leaf(x: Any) -> bool:
    return isinstance(x, (keras.KerasTensor, keras.Variable)) or is_leaf(x)


def _static_aval(x: Any) -> StaticAval:
    name = keras.backend.standardize_dtype(x.dtype)
    dtype = dtype_named(name)
    if dtype is None:
        raise DtypeError(f"a tensor of dtype {name} cannot be sent: convert it")
    shape = getattr(x, "shape", None)
    return StaticAval(None if shape is None or getattr(shape, "rank", 0) is None else tuple(shape), dtype)


def _problems(wanted: Mapping[str, Sequence[int]], found: Mapping[str, np.ndarray]) -> Iterator[str]:
    missing, unexpected = [n for n in wanted if n not in found], [n for n in found if n not in wanted]
    if missing:
        yield f"missing: {', '.join(missing)}"
    if unexpected:
        yield f"unexpected: {', '.join(unexpected)}"
    for name, shape in wanted.items():
        if name in found and found[name].shape != tuple(shape):
            yield f"{name} has shape {tuple(shape)}, not {found[name].shape}"
