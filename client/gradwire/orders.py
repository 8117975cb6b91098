"""What is asked of `Bridge.worker`, checked before a byte is sent."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gradwire.worker_records import WorkerSpec
from gradwire_wire.control import FRAMEWORKS, LONGEST_S
from gradwire_wire.errors import UsageError

__all__ = [
    "checked_dtype",
    "checked_framework",
    "checked_python",
    "checked_seconds",
    "checked_shape",
    "checked_spec",
    "checked_target",
    "with_environment",
]


def checked_spec(
    framework: str,
    name: str,
    *,
    python: str | os.PathLike[str] | None,
    env: Mapping[str, Any] | None,
    path: Sequence[str | os.PathLike[str]] | None,
    cwd: str | os.PathLike[str] | None,
    threads: int | None,
    x64: bool | None,
    device: str | None,
    start_timeout: float,
) -> WorkerSpec:
    """The order for the broker, its paths absolute. Raises UsageError, which says what to write instead."""
    return WorkerSpec(
        framework=checked_framework(framework),
        name=_name(name),
        python=checked_python(python),
        env=_env(env or {}),
        path=_folders(path),
        cwd=_absolute("cwd", "." if cwd is None else cwd),
        threads=_threads(threads),
        x64=_of_type("x64", x64, bool, "True, False or None"),
        device=_of_type("device", device, str, "a text such as 'cpu' or 'cuda:0'"),
        start_timeout=checked_seconds(start_timeout),
    )


def with_environment(requirements: Sequence[str] | None, spec: WorkerSpec) -> WorkerSpec:
    """The order with the interpreter of an environment that has these requirements, which is built where it is not
    there. None: the order as it is. Raises UsageError, WorkerStartError.
    """
    if requirements is None:
        return spec
    if isinstance(requirements, (str, bytes)) or not isinstance(requirements, Iterable):
        raise UsageError(f"requirements={requirements!r}: give a list of them, [{requirements!r}]")
    from gradwire import environments

    return spec._replace(python=environments.build(requirements, spec.python).python)


_MEANT = {
    **{framework: repr(framework) for framework in FRAMEWORKS},
    "pytorch": "'torch'",
    "tf": "'tensorflow'",
    "keras": "'tensorflow', or the framework of its backend",
    "flax": "'jax'",
}


def checked_framework(framework: str) -> str:
    """A framework that there is."""
    if framework not in FRAMEWORKS:
        meant = _MEANT.get(str(framework).lower())
        raise UsageError(
            f"there is no framework {framework!r}; there are {', '.join(FRAMEWORKS)}"
            + (f". Did you mean {meant}?" if meant else "")
        )
    return framework


def checked_python(python: str | os.PathLike[str] | None) -> str | None:
    """A path, name or version as text, or None."""
    if isinstance(python, (int, float)):
        raise UsageError(
            f"python={python!r} is a number, and 3.10 and 3.1 are the same one: write it as text"
        )
    if python is None:
        return None
    named = _path("python", python)
    return _absolute("python", named) if os.sep in named else named


def _name(name: str) -> str:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise UsageError(f"name={name!r}: a worker's name is a text that can be printed")
    return name


def _env(env: Mapping[str, Any]) -> dict[str, str | None]:
    """None removes a variable; numbers are written as text."""
    if not isinstance(env, Mapping):
        raise UsageError(f"env={env!r}: give the variables as a dict")
    return {_variable(name): _value(name, value) for name, value in env.items()}


def _variable(name: Any) -> str:
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        raise UsageError(f"env has {name!r}, which cannot be the name of an environment variable")
    return name


def _value(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float, os.PathLike)):
        raise UsageError(f"env[{name!r}] is {value!r}: give text, a number, or None to remove the variable")
    text = str(os.fspath(value)) if isinstance(value, os.PathLike) else str(value)
    if "\0" in text:
        raise UsageError(f"env[{name!r}] has a zero character, which no environment variable can hold")
    return text


def _folders(path: Sequence[str | os.PathLike[str]] | None) -> list[str]:
    if path is None:
        return [_absolute("path", ".")]
    if isinstance(path, (str, bytes, os.PathLike)) or not isinstance(path, Iterable):
        raise UsageError(f"path={path!r}: give a list of folders, [{path!r}]")
    return [_folder(_absolute("path", folder)) for folder in path]


def _folder(path: str) -> str:
    """One where Python finds modules: a folder, or an archive of the kind that it reads."""
    if os.path.isdir(path):
        return path
    if not os.path.exists(path):
        raise UsageError(f"path: there is no folder {path}")
    from zipfile import is_zipfile  # rarely needed

    if not is_zipfile(path):
        raise UsageError(f"path: {path} is a file. Name the folder it lies in: {os.path.dirname(path)}")
    return path


def _absolute(argument: str, path: Any) -> str:
    try:
        return os.path.abspath(_path(argument, path))
    except OSError as error:
        raise UsageError(
            f"{argument}: the folder that this program runs in is not there any more; change to another (os.chdir), "
            "or give absolute paths as cwd= and path="
        ) from error


def _path(argument: str, path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise UsageError(f"{argument}={path!r} is not a path")
    return os.path.expanduser(str(os.fspath(path)))


def _threads(threads: int | None) -> int | None:
    if threads is None or (type(threads) is int and threads > 0):
        return threads
    raise UsageError(f"threads={threads!r}: give a number of 1 or more, or None for the worker's share")


def _of_type(argument: str, value: Any, kind: type, expected: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise UsageError(f"{argument}={value!r}: give {expected}")
    return value


def checked_target(target: Any) -> str:
    """What a target is named by."""
    if not isinstance(target, str):
        raise UsageError(
            f"a target is named by a text, 'pkg.mod:attr' or 'path/file.py:attr', not by {target!r:.80}"
        )
    try:
        target.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the target {target!r:.80} cannot be sent: {error}") from None
    return target


def checked_dtype(dtype: Any) -> np.dtype[Any]:
    """One of numpy's."""
    try:
        return np.dtype(dtype)
    except TypeError:
        raise UsageError(
            f"dtype={dtype!r:.80} is none of numpy's; write it as in numpy.float32 or 'float32'"
        ) from None


def checked_shape(shape: Any) -> tuple[int, ...]:
    """A shape, of one number or several."""
    try:
        made = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    except Exception:  # what stands for a number in some framework's shape, or for all of them
        made = (-1,)
    if any(n < 0 for n in made):
        raise UsageError(f"a shape is a natural number or a tuple of such, not {shape!r:.80}")
    return made


def checked_seconds(start_timeout: Any) -> float:
    """A start timeout, `LONGEST_S` at most."""
    number = isinstance(start_timeout, (int, float)) and not isinstance(start_timeout, bool)
    if not number or not math.isfinite(start_timeout) or start_timeout <= 0:
        raise UsageError(f"start_timeout={start_timeout!r}: give a number of seconds")
    return float(min(start_timeout, LONGEST_S))
