"""Starting a child of ours: a fresh interpreter, a session of its own, and one inherited socket.

Never a fork of this process (its threads hold locks that nobody in the child would release), so no
``preexec_fn`` either; what the child must set up for itself is in its first lines. The program on the command
line lends the child exactly the packages it is told to, by an import finder: a PYTHONPATH would lend the whole
folder they lie in, and ``-m`` would let a ``torch.py`` of the current folder in.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any, NamedTuple

from gradwire_wire.lifeline import ANOTHER_GRADWIRE, Lifeline

__all__ = ["BEGINNING", "BOOT", "Lent", "shown", "spawn"]

BEGINNING = "# gradwire "
"""Of what a child is given to run. An interpreter takes it away: who finds it in ``sys.argv`` is a program that was taken for one."""

# Python 2.7 must be able to parse this, to be told in its own words that it is too old.
BOOT = """\
import os, sys
line = int(sys.argv[1])
if sys.version_info < (3, 9):
    why = 'gradwire needs Python 3.9 or newer, and this is Python %d.%d.%d' % tuple(sys.version_info[:3])
    os.write(line, ('["CouldNot", "%s"]' % why).encode())
    sys.exit(1)
sys.path[:] = [folder for folder in sys.path if folder]
import json
lent, folders, module = json.loads(os.read(line, 1 << 20))
class Lent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in lent:
            from importlib.util import spec_from_file_location
            return spec_from_file_location(name, lent[name] + '/__init__.py', submodule_search_locations=[lent[name]])
sys.meta_path.insert(0, Lent)
sys.path.extend(folder for folder in folders if folder not in sys.path)
from importlib import import_module
try:
    main = import_module(module).main
except Exception:
    import traceback
    traceback.print_exc()
    why = 'gradwire itself does not load, as below. ANOTHER_GRADWIRE'
    os.write(line, json.dumps(['CouldNot', why]).encode())
    sys.exit(1)
sys.exit(main(line))
""".replace("ANOTHER_GRADWIRE", ANOTHER_GRADWIRE)


class Lent(NamedTuple):
    """What a child gets from us: packages and the folders they lie in, folders for the end of its sys.path."""

    packages: dict[str, str]
    folders: list[str]


def spawn(
    python: list[str], lent: Lent, module: str, config: Any, title: str, **popen: Any
) -> tuple[subprocess.Popen[bytes], Lifeline]:
    """Start ``module.main(lifeline's descriptor)`` in the interpreter; returns at once, with our end.

    ``title``: one line for people who look at ``ps``, after `BEGINNING`. Raises OSError or ValueError where the system cannot run
    the interpreter. The caller owns and reaps the process.
    """
    if not title.isprintable():
        raise ValueError(f"a name must be printable, and {title!r} is not")
    ours, theirs = Lifeline.pair()
    try:
        ours.send_raw(json.dumps(lent[:] + (module,)).encode())
        ours.send_nowait(config)
        process = subprocess.Popen(
            [*python, "-c", f"{BEGINNING}{title}\n{BOOT}", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            **popen,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def shown(process: subprocess.Popen[bytes]) -> str:
    """The command line of a child for people: quoted, and without the text of `BOOT`."""
    arguments = [str(argument) for argument in process.args]  # type: ignore[union-attr]
    return shlex.join(argument.replace(f"\n{BOOT}", " …") for argument in arguments)
