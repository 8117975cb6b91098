"""The command line: ``gradwire COMMAND …``, also ``python -m gradwire``.

One module here per command, each with two functions::

    add_parser(subparsers)      declare the command; set the default ``run``, or `main` takes the module's
    run(arguments) -> int       do it; returns the exit code

Exit codes: 0 done; 1 it could not be done, and a sentence on stderr says why; 2 the command was written wrongly
(argparse says how); 130 interrupted. What a program may want to read is printed as one JSON document with ``--json``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from gradwire_wire.errors import GradwireError

__all__ = ["COMMANDS", "main"]

COMMANDS = ("up", "ps", "stop", "logs", "call", "env", "keys", "doctor", "bench")
"""Modules of this package, in the order of ``gradwire --help``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. ``argv``: without the program's name; None is the process's own."""
    arguments = parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except GradwireError as error:
        print(f"gradwire {arguments.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # its reader has seen enough, as in `gradwire … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"gradwire {arguments.command}: {place}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    made = argparse.ArgumentParser(
        prog="gradwire",
        description="Call a model of another process, environment and framework as a local function.",
    )
    subparsers = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"gradwire.commands.{name}")
        module.add_parser(subparsers)
        command = subparsers.choices[name]
        if command.get_default("run") is None:
            command.set_defaults(run=module.run)
    return made
