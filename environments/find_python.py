"""Print the path of the first Python among the versions given: on PATH, in pyenv, in uv. Says what is missing."""

import os
import sys

from gradwire_wire.interpreters import NoInterpreter, find_interpreter

for version in sys.argv[1:]:
    try:
        print(find_interpreter(version, os.environ))
        break
    except NoInterpreter:
        continue
else:
    sys.exit(f"make: no Python {' or '.join(sys.argv[1:])} was found: the tests that need it will be skipped")
