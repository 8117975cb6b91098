"""``gradwire call TARGET``: one call of a remote function from the shell, with arrays from files."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.bridge import connect
from gradwire.commands.brokers import ANSWER_S, add_option, chosen_card
from gradwire.commands.miswritten import Miswritten, positive
from gradwire.numpy_files import fields_of, read_argument, write_result
from gradwire.worker import Worker
from gradwire_wire.errors import UsageError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "call",
        help="call a function or module once, with arrays from files",
        description="Call a function in a worker of a shared broker, or in one that is started for this call. An argument is "
        "a .npy file, or else JSON: 3, '[1, 2]', '\"text\"'.",
    )
    parser.add_argument(
        "target", metavar="TARGET", help="pkg.mod:attr, path/file.py:attr, or a name the file loads"
    )
    parser.add_argument("--arg", action="append", default=[], metavar="VALUE", help="a positional argument")
    parser.add_argument(
        "--kwarg", action="append", default=[], metavar="KEY=VALUE", help="a keyword argument"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--worker", metavar="NAME", help="a worker of a shared broker")
    where.add_argument("--framework", metavar="F", help="start a worker of this framework for the call")
    parser.add_argument("--python", metavar="P", help="the interpreter of that worker (path or version)")
    parser.add_argument(
        "--module", action="store_true", help="TARGET is a factory: make it, and call what it gives"
    )
    parser.add_argument("--timeout", type=positive, metavar="S", help="seconds the call may take (no limit)")
    parser.add_argument(
        "--out", metavar="FILE", help="write the result there: .npy for one array, .npz for several"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON, arrays as nested lists"
    )
    add_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Call it; print the result, or write it to a file."""
    if arguments.python and not arguments.framework:
        raise Miswritten("--python goes with --framework: it is the interpreter of the worker to start")
    args = [_value(text) for text in arguments.arg]
    kwargs = dict(_keyword(text) for text in arguments.kwarg)
    if arguments.out:
        _check_out(Path(arguments.out))  # the call may take long
    with _worker(arguments) as worker:
        load = worker.module if arguments.module else worker.function
        remote = load(arguments.target).options(timeout=arguments.timeout)
        result = remote(*args, **kwargs)
        if arguments.out:
            write_result(Path(arguments.out), result)
            print(arguments.out, file=sys.stderr)
        else:
            print(json.dumps(_plain(result)) if arguments.json else _shown(result))
    return 0


def _check_out(path: Path) -> None:
    if path.suffix not in (".npy", ".npz"):
        raise Miswritten(f"--out {path}: the file's name must end in .npy, for one array, or .npz")
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}")


def _keyword(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise Miswritten(f"--kwarg {text}: write it as name=value")
    return name, _value(value)


def _value(text: str) -> Any:
    try:
        return read_argument(text)
    except UsageError as error:
        if text.endswith(".npy"):  # well written; the file is to blame
            raise
        raise Miswritten(str(error)) from None


@contextlib.contextmanager
def _worker(arguments: argparse.Namespace) -> Iterator[Worker]:
    if arguments.framework:
        with connect() as bridge:
            yield bridge.worker(arguments.framework, python=arguments.python)
        return
    card = chosen_card(
        arguments, otherwise=", or have a worker started for this call by --framework and --python"
    )
    with connect(card.address, start_timeout=ANSWER_S) as bridge:
        if arguments.worker:
            yield bridge[arguments.worker]
            return
        names = [worker.name for worker in bridge.workers()]
        names = names or [present.name for present in bridge._link.look()]  # the only one may have died
        if len(names) != 1:
            raise UsageError(f"say which worker with --worker NAME; there are {', '.join(names) or 'none'}")
        yield bridge[names[0]]


def _plain(result: Any) -> Any:
    """The result as JSON has it."""
    result = fields_of(result)
    if isinstance(result, dict):
        return {str(key): _plain(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)):
        return [_plain(item) for item in result]
    if isinstance(result, (np.ndarray, np.generic)):
        return _plain(result.tolist()) if result.dtype.kind in "biuf" else _wide(result)
    if isinstance(result, complex):
        return [result.real, result.imag]
    if isinstance(result, bytes):
        return result.decode(errors="backslashreplace")
    return result


def _wide(array: Any) -> Any:
    """Complex numbers as pairs, and the narrow floats that json does not know as floats."""
    return _plain(np.asarray(array).astype(np.complex128 if array.dtype.kind == "c" else np.float64).tolist())


def _shown(result: Any) -> str:
    with np.printoptions(linewidth=min(120, _columns())):
        return str(result)


def _columns() -> int:
    try:
        return os.get_terminal_size().columns
    except OSError:
        return 80
