"""A module that takes a minute to import, and makes the file that the caller's program has named first."""

import os
import time

if "BEGUN" in os.environ:
    open(os.environ["BEGUN"], "w").close()
time.sleep(60)


def double(x):
    return x * 2
