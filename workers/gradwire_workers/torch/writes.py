"""Whether user code has written into parameters that it was given for a call: the caller, who owns them, would not see it.

torch counts writes to a tensor (``_version``), but not those by ``x.data``, which is the same memory under a counter of its
own. So while a `Watch` is on, ``.data`` of whatever shares memory with a parameter that was given is ``x.detach()``: the same
values, and writes are counted. ``x.data = y`` is noted. What is written by way of numpy or DLPack no hook sees: for that,
contents are compared, which costs as much as a copy, and so is done in a module's first calls.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

__all__ = ["Watch"]

_data: Any = torch.Tensor.data
_is_batched: Any = getattr(getattr(torch._C, "_functorch", None), "is_batchedtensor", lambda x: False)
_watches: list[Watch] = []  # of calls within calls, the innermost last


class Watch:
    """Of the parameters that are given to one call, by name. looks: whether their contents are compared.

    On while it is entered. One thread.
    """

    __slots__ = ("_before", "_parameters", "_swapped", "_versions")

    def __init__(self, parameters: dict[str, Any], looks: bool) -> None:
        self._parameters = parameters
        self._versions = [x._version for x in parameters.values()]
        self._before = (
            {name: _bits(x).clone() for name, x in parameters.items() if _is_plain(x)} if looks else {}
        )
        self._swapped: dict[int, int] = {}

    def __enter__(self) -> None:
        _watches.append(self)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _watches.remove(self)

    def written(self) -> str | None:
        """The name of a parameter that was written to since; None where none was."""
        for (name, x), version in zip(self._parameters.items(), self._versions):
            if x._version != version:
                return name
            if self._swapped and self._swapped.get(id(x), _memory(x)) != _memory(x):
                return name
            before = self._before.get(name)
            if before is not None and not torch.equal(before, _bits(x)):
                return name
        return None

    def has(self, x: Any) -> bool:
        """Whether a tensor shares memory with one that was given."""
        if any([p is x for p in self._parameters.values()]):
            return True
        at = _memory(x)
        return at != 0 and any([_memory(p) == at for p in self._parameters.values()])

    def note_swap(self, x: Any) -> None:
        """Other memory is about to be put into this tensor."""
        if id(x) not in self._swapped and any([p is x for p in self._parameters.values()]):
            self._swapped[id(x)] = _memory(x)


def _is_plain(x: Any) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and not _is_batched(x)


def _bits(x: Any) -> Any:
    return x.detach().reshape(-1).view(torch.uint8)


def _memory(x: Any) -> int:
    """Where a tensor's memory begins; views share it. 0 for what has none (under vmap, sparse)."""
    try:
        return int(x.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return 0


def _get(x: Any) -> Any:
    if _watches and any([watch.has(x) for watch in _watches]):
        return x.detach()
    return _data.__get__(x)


def _set(x: Any, value: Any) -> None:
    for watch in _watches:
        watch.note_swap(x)
    _data.__set__(x, value)


torch.Tensor.data = property(_get, _set)
