"""Asking an interpreter what it is."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping

from gradwire.environments.manifest import Interpreter
from gradwire_wire.errors import WorkerStartError
from gradwire_wire.interpreters import NoInterpreter, cleaned, find_interpreter

__all__ = ["interpreter_of"]

OLDEST = (3, 9)
ANSWER_S = 30.0

# Old Pythons must be able to run it, to be told that they are too old.
_ASK = """\
import json, os, platform, sys, sysconfig
print(json.dumps([platform.python_implementation().lower(), platform.python_version(), sysconfig.get_platform(),
                  sysconfig.get_config_var('SOABI') or '', os.path.realpath(sys.executable)]))
"""


def interpreter_of(python: str | None, environment: Mapping[str, str]) -> Interpreter:
    """The interpreter that is meant by a path, a name, a version or None (this program's own).

    A virtual environment's stands for the one it was made from. Raises WorkerStartError.
    """
    try:
        path = find_interpreter(python, environment)
    except NoInterpreter as error:
        raise WorkerStartError(f"no environment can be built: {error}") from error
    interpreter = Interpreter(*_answer(path, environment))
    if tuple(map(int, interpreter.version.split(".")[:2])) < OLDEST:
        raise WorkerStartError(
            f"no environment can be built: gradwire needs Python 3.9 or newer, and {path} is Python "
            f"{interpreter.version}; give another one with python="
        )
    return interpreter


def _answer(path: str, environment: Mapping[str, str]) -> list[str]:
    command = [os.path.abspath(path), "-E", "-s", "-S", "-c", _ASK]
    try:
        done = subprocess.run(
            command,
            env=cleaned(environment, path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
        answer: list[str] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorkerStartError(f"no environment can be built: {path} cannot be run: {error}") from error
    except (ValueError, IndexError):
        said = (done.stderr or done.stdout).strip()[-500:] or f"nothing (exit code {done.returncode})"
        raise WorkerStartError(
            f"no environment can be built: {path} is no Python interpreter; it said {said}"
        ) from None
    return answer
