"""Finding what a target names: ``"pkg.mod:attr"`` or ``"path/file.py:attr"``."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from types import ModuleType
from typing import Any

from gradwire_wire.errors import UnknownTargetError, UsageError
from gradwire_workers.permissions import Permissions

__all__ = ["cannot_be_called", "find_target", "is_factory", "with_colon"]


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.sep


_START = _working_directory()
"""Where the worker was started: relative paths mean the same whatever user code does to the working directory."""


def find_target(target: str, permissions: Permissions | None = None) -> Any:
    """Import the module or file and fetch the attribute (dots allowed), if the permissions allow it (None: anything).

    UnknownTargetError says what was looked for and where. What the user's module raises while it
    is imported comes out as it is.
    """
    place, colon, attribute = target.rpartition(":")
    is_relative = place.startswith(".") and not place.endswith(".py")
    if not colon or not place or not attribute or is_relative:
        raise UsageError(
            f"a target is 'pkg.mod:attr' or 'path/file.py:attr', not {target!r}{with_colon(target)}"
        )
    if permissions is not None:
        permissions.check_name(place, attribute)
    module = _from_file(place) if place.endswith(".py") else _from_import(place)
    found: Any = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
            if permissions is not None:
                permissions.check_step(module, place, attribute, name, found)
        except AttributeError:
            near = difflib.get_close_matches(name, [n for n in dir(found) if not n.startswith("__")], 3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise UnknownTargetError(f"{place} has no {attribute!r}{hint}{_origin(place, module)}") from None
    return found


def with_colon(name: str) -> str:
    """What a target without its colon was probably meant to be."""
    if name.endswith(".py"):
        return f"; name what is in it: '{name}:attr'"
    parts = name.split(".")
    # a class is in a module, and its methods are in the class
    classes = [i for i, part in enumerate(parts) if i and part[:1].isupper()]
    at = classes[0] if classes else len(parts) - 1
    return f"; did you mean '{'.'.join(parts[:at])}:{'.'.join(parts[at:])}'?" if at else ""


def _origin(place: str, module: ModuleType) -> str:
    """Where it lies, for it may be another than the one that was meant: Python's own ``test`` or ``code``, say."""
    file = getattr(module, "__file__", None)
    return f" ({place} is {file})" if file and not place.endswith(".py") else ""


def cannot_be_called(found: Any, is_module: bool) -> UsageError:
    """Of a target that is no function, or whose factory has returned none."""
    kind = type(found).__qualname__
    if not is_module:
        return UsageError(f"the target is a {kind}, which cannot be called. Name a function or a module")
    return UsageError(
        f"the factory returned a {kind}, which cannot be called. To reach its methods have it return a function that is told "
        "which one: lambda name, *args: getattr(found, name)(*args)"
    )


def is_factory(found: Any) -> bool:
    """Whether ``Worker.module`` should call it (a class or function) or take it as it is (an instance)."""
    return inspect.isclass(found) or inspect.isroutine(found) or isinstance(found, functools.partial)


def _from_import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UnknownTargetError(
                f"no module named {error.name!r} in the worker's environment ({sys.executable}) or its folders "
                f"{_folders()}; give bridge.worker(path=[...]) the folder it is in, or name a file: 'folder/file.py:attr'"
            ) from None
        raise


def _folders() -> list[str]:
    return [p for p in sys.path if "site-packages" not in p and f"{os.sep}lib{os.sep}python" not in p] or [
        "(none)"
    ]


def _from_file(place: str) -> ModuleType:
    place = os.path.expanduser(place)
    candidates = [place] if os.path.isabs(place) else [os.path.join(f, place) for f in [_START, *_folders()]]
    path = next((os.path.realpath(c) for c in candidates if os.path.isfile(c)), None)
    if path is None:
        raise UnknownTargetError(f"no file {place!r}; looked at {list(dict.fromkeys(candidates))}")
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnknownTargetError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if os.path.dirname(path) not in sys.path:
        sys.path.append(os.path.dirname(path))  # its siblings can be imported, as under "python file.py"
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, ImportError) and "relative import" in str(error):
            package = os.path.basename(os.path.dirname(path))
            raise UnknownTargetError(
                f"{path} imports relatively ({error}), so it is a part of a package: name it by its import path, as in "
                f"'{package}.{name}:attr', and give bridge.worker(path=[...]) the folder that {package!r} is in"
            ) from error
        raise
    return module


def _module_name(path: str) -> str:
    """The file's own name where nothing else has it, else one made unique by its path."""
    stem = os.path.splitext(os.path.basename(path))[0]
    loaded = sys.modules.get(stem)
    if loaded is not None and os.path.realpath(getattr(loaded, "__file__", None) or "") == path:
        return stem
    try:
        spec = importlib.util.find_spec(stem) if loaded is None and stem.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    origin = os.path.realpath(spec.origin) if spec is not None and spec.origin else None
    if loaded is None and stem.isidentifier() and (spec is None or origin == path):
        return stem
    return f"{stem}_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
