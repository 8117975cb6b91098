"""Losses of a Keras module that are no part of what a call of it gives: whoever trains by the result alone is told."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.remote import Remote

__all__ = ["warn_of_regularizers"]


def warn_of_regularizers(remote: Remote, once: str = "") -> None:
    """A UserWarning, once for each remote, where training by a call's result alone would leave losses of Keras out.

    once: an occasion on which the worker need not be asked a second time. (What ``add_loss`` is given may be known to it
    only after calls.)
    """
    handle = remote.handle
    if handle.has_warned or once in handle.asked or not handle.is_module:
        return
    if once:
        handle.asked.add(once)
    names = list(remote._change("regularizers"))
    handle.has_warned = bool(names)
    if names:
        shown = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
        warnings.warn(
            f"{handle.name} has regularizers or losses of its own ({shown}). As with a Keras model that is called, their losses are no part of "
            "the result, so training by the result leaves them out. gw.keras.Layer adds them to its losses; elsewhere have the "
            "factory return a model that returns them, such as (y, sum(net.losses)), and add them to your loss",
            UserWarning,
            stacklevel=_levels_to_the_user(),
        )


def _levels_to_the_user() -> int:
    """How far up the stack from the caller of this the first frame is that is none of gradwire's."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "gradwire":
        frame, level = frame.f_back, level + 1
    return level
