"""A command that is written wrongly: `gradwire.commands.main` shows how it is written, and exits with 2."""

from __future__ import annotations

import argparse
import math

from gradwire_wire.control import LONGEST_S

__all__ = ["Miswritten", "count", "not_negative", "positive"]


class Miswritten(Exception):
    """What is wrong with the command as it stands, whatever there is on this machine."""


def positive(text: str) -> float:
    """For argparse: a number above 0, of seconds; `LONGEST_S` at most."""
    if not_negative(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return min(float(text), LONGEST_S)


def count(text: str) -> int:
    """For argparse: a number of things, at least one."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def not_negative(text: str) -> float:
    """For argparse: a number from 0 up."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return number
