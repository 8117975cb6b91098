"""PyTorch's tensors. See `gradwire_wire.tensors.TensorFamily` for what each function promises.

The plain case is tried first and costs about 3 µs; whatever torch will not show as numpy memory
raises there, and is then converted (conjugate bits, other devices) or refused by name.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple

import numpy as np
import torch

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BOOL, BY_NAME, DType
from gradwire_wire.errors import DtypeError, UnsupportedTensorError
from gradwire_wire.structures import AS_TUPLES, on_stand_in

__all__ = ["NAME", "adopt", "adopter", "aval", "export", "is_tensor", "torch_dtype", "wire_dtype"]

NAME = "torch"
AS_TUPLES.add(torch.Size)


class _Kind(NamedTuple):
    """One element type in both worlds.

    as_bits: torch's dtype of the same size that numpy can show, or None where numpy knows the type itself.
    bits, carrier: numpy's dtypes of ``as_bits`` and of the carrier.
    """

    native: Any
    wire: DType
    as_bits: Any
    bits: np.dtype
    carrier: np.dtype


def _kind(name: str, wire: DType) -> _Kind:
    native, carrier = getattr(torch, name), np.dtype(wire.carrier)
    if wire.carrier != wire.name:
        as_bits = torch.int16 if wire.bits == 16 else torch.uint8
        return _Kind(native, wire, as_bits, np.dtype("int16" if wire.bits == 16 else "uint8"), carrier)
    if wire == BOOL:
        return _Kind(native, wire, torch.uint8, np.dtype("uint8"), carrier)
    return _Kind(native, wire, None, carrier, carrier)


_KINDS = {wire: _kind(name, wire) for name, wire in BY_NAME.items() if hasattr(torch, name)}
_BY_NATIVE = {kind.native: kind for kind in _KINDS.values()}
_is_functional: Callable[[Any], bool] = getattr(torch, "_is_functional_tensor", lambda x: False)


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def torch_dtype(dtype: DType) -> Any:
    """torch's dtype; DtypeError where this torch has none."""
    kind = _KINDS.get(dtype)
    if kind is None:
        raise DtypeError(
            f"PyTorch {torch.__version__} has no {dtype.name}. Convert the tensor, or use a newer PyTorch"
        )
    return kind.native


def wire_dtype(dtype: Any) -> DType:
    """The wire's name of a torch dtype; UnsupportedTensorError where it has none."""
    kind = _BY_NATIVE.get(dtype)
    if kind is None:
        raise _no_kind(dtype)
    return kind.wire


def _no_kind(dtype: Any) -> UnsupportedTensorError:
    names = ", ".join(kind.wire.name for kind in _KINDS.values())
    return UnsupportedTensorError(
        f"a torch tensor of dtype {str(dtype)[6:]} cannot be sent. Convert it to one of {names}"
    )


def export(x: Any) -> Carrier:
    kind = _BY_NATIVE.get(x.dtype)
    if kind is None or _is_functional(x):  # whose .numpy() is whatever lies where it points, without a word
        raise _refusal(x)
    try:
        return _shown(x.detach() if x.requires_grad else x, kind)
    except (RuntimeError, TypeError, ValueError) as error:
        cause = error
    if _what(x) is not None:
        raise _refusal(x) from cause
    if x._is_zerotensor():  # zeros that nobody has allocated yet
        return Carrier(np.zeros(tuple(x.shape), kind.carrier), kind.wire)
    try:  # without lazy bits, in host memory: a copy
        return _shown(x.detach().resolve_conj().resolve_neg().cpu(), kind)
    except Exception as error:
        raise _refusal(x) from error


def _shown(x: Any, kind: _Kind) -> Carrier:
    array = x.numpy() if kind.as_bits is None else x.view(kind.as_bits).numpy()
    if array.flags.owndata and array.size:  # numpy has taken fresh memory for what is nowhere
        raise ValueError("no memory")
    if kind.as_bits is None:
        return Carrier(array, kind.wire)
    if kind.wire is not BOOL:
        return Carrier(array.view(kind.carrier), kind.wire)
    if array.size and array.max() > 1:  # torch takes any byte but 0 for True; others take 1 alone
        return Carrier(array != 0, kind.wire)
    return Carrier(array.view(kind.carrier), kind.wire)


def _what(x: Any) -> str | None:
    """What keeps a tensor from being numpy memory, and what to do; None for nothing that is known."""
    if isinstance(x, torch.nn.parameter.UninitializedTensorMixin):
        return "an uninitialised parameter has no values yet. Call its lazy module once with an example"
    if x.is_nested:
        return "a nested tensor cannot be sent. Send its parts as a list: x.unbind()"
    if x.is_quantized:
        return "a quantised tensor cannot be sent. Send x.dequantize(), or x.int_repr() and the scales"
    if x.layout is not torch.strided:
        return f"a tensor of layout {str(x.layout)[6:]} (sparse or opaque) cannot be sent. Send x.to_dense(), or its parts"
    if type(x).__name__ == "MaskedTensor":
        return (
            "a masked tensor cannot be sent: its masked values would be taken for real ones. "
            "Send x.to_tensor(value), or x.get_data() and x.get_mask() as two arguments"
        )
    if type(x).__name__ == "DTensor":
        return (
            "a DTensor is spread over several processes: send what this one has of it, x.to_local(), or all of it, x.full_tensor(). "
            "(A module whose parameters fully_shard() has spread gathers them for its forward)"
        )
    if type(x).__name__ == "FakeTensor":
        return "a fake tensor has no values to send. Use Remote.spec for shapes, or pass a real tensor"
    if _is_functional(x):
        return "a tensor of torch.func.functionalize has no memory of its own. Make the call outside of it"
    if x.device.type == "meta":
        return (
            "a tensor on device meta has no values to send. Use Remote.spec for shapes, or pass a real tensor"
        )
    if x.device.type == "cpu" and x.numel() and not x._is_zerotensor() and _is_freed(x):
        return (
            "the memory of this tensor was given back (its storage resized to 0, as sharded training does with parameters between "
            "their uses). Send it where it is gathered"
        )
    return None


def _is_freed(x: Any) -> bool:
    try:
        return not x.data_ptr()
    except RuntimeError:  # a wrapper, which has no memory of its own
        return False


def _refusal(x: Any) -> UnsupportedTensorError:
    what = _what(x)
    if what is None and x.dtype not in _BY_NATIVE:
        return _no_kind(x.dtype)
    name = f"{type(x).__module__}.{type(x).__qualname__}"
    return UnsupportedTensorError(
        what
        or f"this {name} has no memory that numpy could show (a functorch or tracing wrapper, or a tensor subclass). "
        "Pass a plain torch.Tensor"
    )


def adopt(carrier: Carrier) -> Any:
    kind = _KINDS.get(carrier.dtype)
    if kind is None:
        return torch_dtype(carrier.dtype)
    array = carrier.array
    if not array.flags.writeable:
        array = _writable(array)
    if kind.bits is not kind.carrier and kind.wire is not BOOL:
        array = array.view(kind.bits)
    x = _from_numpy(array, kind)
    return x if kind.as_bits is None or kind.wire is BOOL else x.view(kind.native)


def adopter(dtype: DType) -> Any:
    """What `adopt` does to arrays that are fresh copies in C order: one function for all of them. None: nothing shorter."""
    kind = _KINDS.get(dtype)
    return torch.from_numpy if kind is not None and kind.as_bits is None else None


def _from_numpy(array: np.ndarray, kind: _Kind) -> Any:
    if array.flags.aligned:
        try:
            return torch.from_numpy(array)
        except ValueError:  # negative strides, or strides that are no multiple of the element
            pass
        except TypeError as error:  # a torch without uint16, say
            raise DtypeError(f"PyTorch {torch.__version__} has no {kind.wire.name}: {error}") from error
    return torch.from_numpy(array.copy(order="K" if min(array.strides, default=0) >= 0 else "C"))


class _Writable:
    """Lends a read-only array's memory as if it could be written, for torch warns of all others.

    In a worker the memory is a private mapping, or the array is one of numpy's own views (broadcast_to).
    """

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.array = array


def _writable(array: np.ndarray) -> np.ndarray:
    return np.asarray(_Writable(array)) if array.size else array.copy()


def aval(x: Any) -> Aval:
    kind = _BY_NATIVE.get(x.dtype)
    if kind is None or x.layout is not torch.strided or x.is_nested:
        raise _refusal(x)
    return Aval(tuple(x.shape), kind.wire)


def _register(cls: Any) -> None:
    """torch walks what stands for a dataclass (in torch.func, for one), but for fields that are None, which it has no place for."""

    def flatten(x: Any) -> tuple[list[Any], Any]:
        values, keys = cls.parts(x)
        return [y for y in values if y is not None], ([y is None for y in values], keys)

    def unflatten(found: Iterable[Any], context: Any) -> Any:
        found, (are_none, keys) = iter(found), context
        return cls.of([None if is_none else next(found) for is_none in are_none], keys)

    _register_node(cls, flatten, unflatten)


_register_node: Any = getattr(getattr(torch.utils, "_pytree", None), "register_pytree_node", None)
if _register_node is not None:  # an older torch has another
    on_stand_in(_register)
