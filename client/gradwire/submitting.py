"""How a call gets submitted: by the pipeline to its worker where it can, and else by a thread that makes it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gradwire.background import futures_in, raising, with_results
from gradwire.families import compiling_face, exported, face_named, in_callers_modes, tensors_named
from gradwire.site import Site
from gradwire_wire.interruption import postponed, raise_postponed

if TYPE_CHECKING:
    from concurrent.futures import Future

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
            pipeline = remote.handle.pipeline(remote._background)
            call = None if pipeline is None else _submission(remote, pipeline, args, kwargs, known, act)
            if call is not None and pipeline is not None:
                begun = pipeline.submit(call, may_wait, future)
        except Exception as error:
            act = raising(error)
    if begun is not None:
        return begun
    future = future or remote._background.new_future()
    remote._background.start(future, act)
    return future


def _submission(
    remote: Remote,
    pipeline: Pipeline,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: tuple[str, Site] | None,
    again: Any,
) -> Submission | None:
    """The call as it goes by the pipeline; None where a gradient would be recorded, or it may be repeated."""
    family, site, leaves = remote._route(args, kwargs) if known is None else (*known, list(args))
    is_plain = getattr(face_named(family), "is_plain", None)
    if site.seeded or site.retry or is_plain is None or not is_plain(site, leaves):
        return None
    carriers = exported(leaves, site.structure)
    adopt = tensors_named(family).adopt
    if family != "numpy":
        adopt = in_callers_modes(adopt)
    return remote.handle.submission(pipeline, site, carriers, adopt, again)
