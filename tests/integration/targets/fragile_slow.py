"""A module that takes a minute to import."""

import time

time.sleep(60)


def double(x):
    return x * 2
