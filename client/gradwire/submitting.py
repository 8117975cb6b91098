"""How a call gets submitted: by the pipeline to its worker where it can, and else by a thread that makes it.

What could go by the pipeline keeps its order. While its target is not there, after a death or a restart, it waits in the anteroom.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gradwire.background import futures_in, raising, with_results
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
        return _begin(remote, args, kwargs, may_wait, None, known)
    future = _future(remote)

    def begin() -> None:
        try:
            args_there, kwargs_there = with_results([args, kwargs])
            _begin(remote, args_there, kwargs_there, False, future, None)
        except Exception as error:
            remote._background.start(future, raising(error))

    remote._background.after(waited, future, in_callers_modes(begin))
    return future


def _future(remote: Remote) -> Future[Any]:
    """One for a call that will begin later."""
    future = remote._background.new_future()
    pipeline = remote.handle.pipeline_or_none(remote._background)
    return future if pipeline is None else pipeline.new_future()


def _begin(
    remote: Remote,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    may_wait: bool,
    future: Future[Any] | None,
    known: tuple[str, Site] | None,
) -> Future[Any]:
    """Submit a call by the pipeline, or by a thread that makes it. known: its route."""
    act: Any = in_callers_modes(partial(remote, *args, **kwargs))
    begun = None
    if compiling_face() is None:
        try:
            begun = _begin_in_order(remote, args, kwargs, may_wait, future, known, act)
        except Exception as error:
            act = raising(error)
    if begun is not None:
        return begun
    future = future or remote._background.new_future()
    remote._background.start(future, act)
    return future


def _begin_in_order(
    remote: Remote,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    may_wait: bool,
    future: Future[Any] | None,
    known: tuple[str, Site] | None,
    act: Any,
) -> Future[Any] | None:
    """Submit a call by the pipeline, or by the anteroom while its target is not there. None where it keeps no order."""
    handle, background = remote.handle, remote._background
    anteroom = background.anteroom
    pipeline = None if anteroom.is_occupied else handle.pipeline(background)
    call = None if pipeline is None else _submission(remote, pipeline, args, kwargs, known, act)
    if call is not None and pipeline is not None:
        begun = pipeline.submit(call, may_wait, future)
        if begun is not None:
            return begun
    if not (anteroom.is_occupied or _is_away(handle, pipeline)):
        return None
    if call is None and not _keeps_order(*_routed(remote, args, kwargs, known)):
        return None
    waiting = future or background.new_future()
    handle.give_back()
    anteroom.put(in_callers_modes(partial(_proceed, remote, args, kwargs, waiting, act)))
    return waiting


def _proceed(
    remote: Remote, args: tuple[Any, ...], kwargs: dict[str, Any], future: Future[Any], act: Any
) -> None:
    """The turn of a call in the anteroom: its target is brought back if need be, and then it goes by the pipeline."""
    handle, background = remote.handle, remote._background
    begun = pipeline = None
    try:
        if not (handle.is_there or future.cancelled()):
            handle.bring_back()
        pipeline = handle.pipeline(background)
        call = None if pipeline is None else _submission(remote, pipeline, args, kwargs, None, act)
        if call is not None and pipeline is not None:
            begun = pipeline.submit(call, False, future)
    except Exception as error:
        act = raising(error)
    if begun is not None:
        return
    if _is_away(handle, pipeline):
        background.do_here(future, act)
    else:
        background.start(future, act)


def _is_away(handle: Handle, pipeline: Pipeline | None) -> bool:
    """Whether a call had no pipeline though it keeps its order: its target is not there, or the worker goes this very moment.

    Else it is one that keeps none.
    """
    if not handle.is_there:
        return True
    return handle.keeps_order if pipeline is None else pipeline.is_over


def _submission(
    remote: Remote,
    pipeline: Pipeline,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: tuple[str, Site] | None,
    again: Any,
) -> Submission | None:
    """The call as it goes by the pipeline; None where a gradient would be recorded, or it may be repeated."""
    family, site, leaves = _routed(remote, args, kwargs, known)
    if not _keeps_order(family, site, leaves):
        return None
    carriers = exported(leaves, site.structure)
    adopt = tensors_named(family).adopt
    if family != "numpy":
        adopt = in_callers_modes(adopt)
    return remote.handle.submission(pipeline, site, carriers, adopt, again)


def _routed(
    remote: Remote, args: tuple[Any, ...], kwargs: dict[str, Any], known: tuple[str, Site] | None
) -> tuple[str, Site, list[Any]]:
    return remote._route(args, kwargs) if known is None else (*known, list(args))


def _keeps_order(family: str, site: Site, leaves: list[Any]) -> bool:
    """Whether it may go by a pipeline: no gradient would be recorded, and it is not repeated."""
    is_plain = getattr(face_named(family), "is_plain", None)
    return not (site.seeded or site.retry or is_plain is None) and is_plain(site, leaves)
