"""The command line: ``gradwire COMMAND …``, also ``python -m gradwire``.

One module here per command, each with two functions::

    add_parser(subparsers)      declare the command; set the default ``run``, or `main` takes the module's
    run(arguments) -> int       do it; returns the exit code

Exit codes: 0 done; 1 it could not be done, and a sentence on stderr says why; 2 the command was written wrongly
(argparse says how, also of what a command finds itself and raises as `Miswritten`); 130 interrupted. What a program may
want to read is printed as one JSON document with ``--json``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from gradwire import __version__
from gradwire.commands.miswritten import Miswritten
from gradwire_wire.errors import GradwireError

__all__ = ["COMMANDS", "main"]

COMMANDS = ("up", "ps", "stop", "logs", "call", "env", "keys", "doctor", "bench")
"""Modules of this package, in the order of ``gradwire --help``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. ``argv``: without the program's name; None is the process's own."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # whatever the locale cannot write; stderr does so anyhow
    try:
        return _run(parser().parse_args(argv))
    except KeyboardInterrupt:
        _say("")
        return 130


def _run(arguments: argparse.Namespace) -> int:
    try:
        code: int = arguments.run(arguments)
        print(end="", flush=True)  # there may be no stdout
        return code
    except Miswritten as error:
        arguments.usage_error(str(error))
    except GradwireError as error:
        _say(f"gradwire {arguments.command}: {error}")
    except BrokenPipeError:  # its reader has seen enough, as in `gradwire … | head`
        _give_up_stdout()
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _say(f"gradwire {arguments.command}: {place}{error.strerror or error}")
        _give_up_stdout()
    return 1


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # nobody may be there to read it
        print(sentence, file=sys.stderr)


def _give_up_stdout() -> None:
    """What is still to be written cannot be: the interpreter is not to complain of that at its exit."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    made = argparse.ArgumentParser(
        prog="gradwire",
        description="Call a model of another process, environment and framework as a local function.",
    )
    made.add_argument("--version", action="version", version=f"gradwire {__version__}")
    subparsers = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"gradwire.commands.{name}")
        module.add_parser(subparsers)
        command = subparsers.choices[name]
        command.set_defaults(usage_error=command.error)
        if command.get_default("run") is None:
            command.set_defaults(run=module.run)
    return made
