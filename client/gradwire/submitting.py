"""How a call gets submitted: by the pipeline to its worker where it can, and else by a thread that makes it.

What could go by the pipeline keeps its order. While its target is not there, after a death or a restart, it waits in the anteroom.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gradwire.background import behind, futures_in, raising, with_results
from gradwire.families import compiling_face, exported, face_named, in_callers_modes, tensors_named
from gradwire.site import Site
from gradwire_wire.interruption import postponed, raise_postponed

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gradwire.handle import Handle
    from gradwire.pipeline import Pipeline
    from gradwire.remote import Remote
    from gradwire.submissions import Submission

__all__ = ["submit"]


def submit(remote: Remote, args: tuple[Any, ...], kwargs: dict[str, Any], may_wait: bool) -> Future[Any]:
    """See `Remote.submit`. may_wait: whether this thread may wait for room."""
    if postponed:
        raise_postponed()
    known = None if kwargs else remote._routes.get((remote.handle.training, *map(type, args)))
    waited = () if known is not None else futures_in([args, kwargs])
    if not waited:
        return _begin(_Call(remote, args, kwargs, known), may_wait, None)
    future = _future(remote)

    def begin() -> None:
        try:
            args_there, kwargs_there = with_results([args, kwargs])
            _begin(_Call(remote, args_there, kwargs_there), False, future)
        except Exception as error:
            remote._background.start(future, raising(error))

    remote._background.after(waited, future, in_callers_modes(begin))
    return future


def _future(remote: Remote) -> Future[Any]:
    """One for a call that will begin later."""
    future = remote._background.new_future()
    pipeline = remote.handle.pipeline_or_none(remote._background)
    return future if pipeline is None else pipeline.new_future()


class _Call(NamedTuple):
    """What is to be called. known: its route, where that is known already."""

    remote: Remote
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    known: tuple[str, Site] | None = None

    def make(self) -> Any:
        """It, the ordinary way."""
        return self.remote(*self.args, **self.kwargs)

    def route(self) -> tuple[str, Site, list[Any]]:
        """See `Remote._route`."""
        if self.known is None:
            return self.remote._route(self.args, self.kwargs)
        return (*self.known, list(self.args))


def _begin(call: _Call, may_wait: bool, future: Future[Any] | None) -> Future[Any]:
    """Submit a call by the pipeline, or by a thread that makes it."""
    act, background = in_callers_modes(call.make), call.remote._background
    begun = None
    if compiling_face() is None:
        try:
            begun = _begin_in_order(call, may_wait, future, act)
        except Exception as error:
            act = raising(error)
    if begun is not None:
        return begun
    future = future or background.new_future()
    background.start(future, act)
    return future


def _begin_in_order(call: _Call, may_wait: bool, future: Future[Any] | None, act: Any) -> Future[Any] | None:
    """Submit a call by the pipeline, or by the anteroom while its target is not there. None where it keeps no order."""
    handle, background = call.remote.handle, call.remote._background
    anteroom = background.anteroom
    pipeline = None if anteroom.is_occupied else handle.pipeline(background)
    submission = None if pipeline is None else _submission(call, pipeline, act)
    if submission is not None and pipeline is not None:
        begun = pipeline.submit(submission, may_wait, future)
        if begun is not None:
            return begun
        if submission.is_elsewhere:
            alone = future or background.new_future()
            background.start_in_order(alone, behind(handle.drain, act))
            return alone
    if not (
        anteroom.is_occupied or (submission is not None and submission.is_late) or _is_away(handle, pipeline)
    ):
        return None
    if submission is None and not _keeps_order(*call.route()):
        return None
    waiting = future or background.new_future()
    handle.give_back()
    anteroom.put(in_callers_modes(partial(_proceed, call._replace(known=None), waiting, act)))
    return waiting


def _proceed(call: _Call, future: Future[Any], act: Any) -> None:
    """The turn of a call in the anteroom: its target is brought back if need be, and then it goes by the pipeline."""
    handle, background = call.remote.handle, call.remote._background
    begun = pipeline = submission = None
    try:
        if not (handle.is_there or future.cancelled()):
            handle.bring_back()
        pipeline = handle.pipeline(background)
        submission = None if pipeline is None else _submission(call, pipeline, act)
        if submission is not None and pipeline is not None:
            begun = pipeline.submit(submission, False, future, in_turn=True)
            if submission.is_elsewhere:
                act = behind(handle.drain, act)
    except Exception as error:
        act = raising(error)
    if begun is not None:
        return
    if submission is not None or _is_away(handle, pipeline):
        background.do_here(future, behind(handle.drain, act))  # there may be a pipeline, but not just now
    else:
        background.start(future, act)


def _is_away(handle: Handle, pipeline: Pipeline | None) -> bool:
    """Whether a call had no pipeline though it keeps its order: its target is not there, or the worker goes this very moment.

    Else it is one that keeps none.
    """
    if not handle.is_there:
        return True
    return handle.keeps_order if pipeline is None else pipeline.is_over


def _submission(call: _Call, pipeline: Pipeline, again: Any) -> Submission | None:
    """The call as it goes by the pipeline; None where a gradient would be recorded, or it may be repeated."""
    family, site, leaves = call.route()
    if not _keeps_order(family, site, leaves):
        return None
    carriers = exported(leaves, site.structure)
    adopt = tensors_named(family).adopt
    if family != "numpy":
        adopt = in_callers_modes(adopt)
    return call.remote.handle.submission(pipeline, site, carriers, adopt, again)


def _keeps_order(family: str, site: Site, leaves: list[Any]) -> bool:
    """Whether it may go by a pipeline: no gradient would be recorded, and it is not repeated."""
    is_plain = getattr(face_named(family), "is_plain", None)
    return not (site.seeded or site.retry or is_plain is None) and is_plain(site, leaves)
