"""``python -m gradwire``: the same as the command ``gradwire``."""

import sys

from gradwire.commands import main

if __name__ == "__main__":
    sys.exit(main())
