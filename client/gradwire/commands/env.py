"""``gradwire env list | build | remove``: environments built from requirements, and the cache they are kept in."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from gradwire import environments
from gradwire.commands.miswritten import Miswritten, not_negative
from gradwire.environments import Environment
from gradwire.environments.requirements import BadRequirement, normalized

__all__ = ["add_parser", "run"]

DAY_S = 86400.0


def add_parser(subparsers: Any) -> None:
    """The command and its three verbs."""
    parser = subparsers.add_parser(
        "env",
        help="environments built from requirements=: list, build, remove",
        description="Environments that were built once from the requirements= of a worker, in $GRADWIRE_CACHE or "
        "~/.cache/gradwire (see docs/reference/environments.md).",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="list | build | remove", required=True)
    verb = verbs.add_parser("list", help="what there is: size, last use, Python, requirements")
    verb.add_argument("--json", action="store_true", help="for programs")
    verb.set_defaults(act=_list)
    verb = verbs.add_parser("build", help="build one, unless it is there; print its interpreter")
    verb.add_argument("requirements", nargs="*", metavar="REQUIREMENT", help="as for pip: 'torch==2.13.0'")
    verb.add_argument(
        "-r", "--requirement", action="append", default=[], metavar="FILE", help="a requirements file"
    )
    verb.add_argument("--python", help="path, name or version of an interpreter (default: this one)")
    verb.set_defaults(act=_build, usage_error=verb.error)
    verb = verbs.add_parser("remove", help="remove some")
    verb.add_argument("names", nargs="*", metavar="NAME", help="name or key, or how one begins")
    verb.add_argument(
        "--unused", type=not_negative, metavar="DAYS", help="all that were not used for so many days"
    )
    verb.set_defaults(act=_remove, usage_error=verb.error)


def run(arguments: argparse.Namespace) -> int:
    """The verb's part of the command; returns the exit code."""
    code: int = arguments.act(arguments)
    return code


def _list(arguments: argparse.Namespace) -> int:
    there = environments.listed()
    if arguments.json:
        print(json.dumps([_facts(one) for one in there], indent=2))
        return 0
    for one in there:
        print(f"{one.name}\n    {_line(one)}")
    if not there:
        print(
            "there are no environments; bridge.worker(…, requirements=[…]) or `gradwire env build` makes one"
        )
    return 0


def _facts(one: Environment) -> dict[str, Any]:
    about = one.manifest
    known = {} if about is None else {**about._asdict(), "interpreter": about.interpreter._asdict()}
    return {
        "name": one.name,
        "python": one.python,
        "last_use": one.last_use,
        "finished": bool(about),
        **known,
    }


def _line(one: Environment) -> str:
    used = f"used {_ago(time.time() - one.last_use)}"
    if one.manifest is None:
        return f"unfinished: being built, or left by a build that was killed; {used}"
    about = one.manifest
    size = f"{about.nbytes / 1e6:,.0f} MB"
    return f"Python {about.interpreter.version}, {size}, {used}: {' '.join(about.requirements)}"


def _ago(seconds: float) -> str:
    if seconds < 3600:
        return "within the hour"
    return f"{seconds / 3600:.0f} h ago" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} days ago"


def _build(arguments: argparse.Namespace) -> int:
    if not (arguments.requirements or arguments.requirement):
        raise Miswritten("give requirements, or a file of them with -r")
    try:
        normalized(arguments.requirements)
    except BadRequirement as error:
        raise Miswritten(str(error)) from None
    lines = [*arguments.requirements]
    for file in arguments.requirement:
        lines += environments.read_requirements(file)
    print(environments.build(lines, arguments.python).python)
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    if bool(arguments.names) == (arguments.unused is not None):
        raise Miswritten("give names, or --unused DAYS (`gradwire env list` shows what there is)")
    chosen = [environments.named(name) for name in arguments.names]
    if arguments.unused is not None:
        chosen = environments.unused_since(time.time() - arguments.unused * DAY_S)
    for one in {one.name: one for one in chosen}.values():
        environments.remove([one])
        print(f"removed {one.name}")
    return 0
