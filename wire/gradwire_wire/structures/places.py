"""Where the leaves of a structure are: in another tree of its shape, in one without its scalars, and in words."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from gradwire_wire.errors import DtypeError, UnsupportedTensorError, UsageError
from gradwire_wire.structures.format import Leaf
from gradwire_wire.structures.reading import leaf_count, unpack
from gradwire_wire.structures.values import children, field_names, is_record

__all__ = ["fill_leaves_only", "leaf_paths", "leaves_like", "naming"]


def leaves_like(structure: bytes, tree: Any, what: str) -> list[Any]:
    """Match a tree against a structure: what stands where each leaf is, None where ``tree`` stops early.

    Containers must agree; what stands where the structure has no leaf is ignored. UsageError names the place.
    """
    found: dict[int, Any] = {}
    _match(unpack(structure, Leaf), tree, what, found)
    return [found.get(i) for i in range(leaf_count(structure))]


def _match(shape: Any, tree: Any, path: str, found: dict[int, Any]) -> None:
    if isinstance(shape, Leaf):
        found[shape.index] = tree
        return
    if tree is None or not children(shape):
        return
    mine, theirs = children(shape), children(tree)
    if set(mine) != set(theirs):
        raise UsageError(
            f"{path} must have the structure of what it belongs to: {list(mine)}, not {tree!r:.80}"
        )
    for key, child in mine.items():
        _match(child, theirs[key], f"{path}[{key!r}]", found)


def fill_leaves_only(structure: bytes, leaves: Sequence[Any]) -> Any:
    """The tree with ``leaves`` in its holes and None in place of every scalar and string."""
    return _leaves_only(unpack(structure, Leaf), leaves)


def _leaves_only(x: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(x, Leaf):
        return leaves[x.index]
    items = {key: _leaves_only(child, leaves) for key, child in children(x).items()}
    if isinstance(x, dict):
        return type(x)(items)
    if isinstance(x, tuple):
        return tuple.__new__(type(x), items.values())
    if isinstance(x, list):
        return list(items.values())
    for name, value in items.items():
        object.__setattr__(x, name, value)
    return x if items else None


def leaf_paths(structure: bytes, argument_names: bool = True) -> list[str]:
    """Where each leaf sits, for error messages: ``args[0]['x']``, ``scale`` (a keyword)."""
    tree = unpack(structure, Leaf)
    found: dict[int, str] = {}
    if argument_names and isinstance(tree, list) and len(tree) == 2 and isinstance(tree[1], dict):
        for i, x in enumerate(tree[0]):
            _walk(x, f"args[{i}]", found)
        for name, x in tree[1].items():
            _walk(x, str(name), found)
    else:
        _walk(tree, "result", found)
    return [found[i] for i in sorted(found)]


def _walk(x: Any, path: str, found: dict[int, str]) -> None:
    if isinstance(x, Leaf):
        found[x.index] = path
    elif is_record(x):
        for name in field_names(type(x)):
            _walk(getattr(x, name), f"{path}.{name}", found)
    elif isinstance(x, dict):
        for k, v in x.items():
            _walk(v, f"{path}[{k!r}]", found)
    elif isinstance(x, (list, tuple)):
        names = getattr(x, "_fields", None)
        for i, v in enumerate(x):
            _walk(v, f"{path}.{names[i]}" if names else f"{path}[{i}]", found)


def naming(
    error: UsageError,
    leaves: Sequence[Any],
    structure: bytes,
    export: Callable[[Any], Any],
    argument_names: bool = True,
) -> UsageError:
    """The error with the place of its leaf in front, where to export one of these raises it: found by trying again."""
    for x, path in zip(leaves, leaf_paths(structure, argument_names)):
        try:
            export(x)
        except (UnsupportedTensorError, DtypeError) as again:
            if str(again) == str(error):
                return type(error)(f"{path}: {error}").with_traceback(error.__traceback__)
        except Exception:  # what this one has to say is not what was asked
            pass
    return error
